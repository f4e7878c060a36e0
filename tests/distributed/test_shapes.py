"""Training equals torch.optim in one process whatever the parameters' shapes: hypothesis draws them."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.distributed.ranks import run_ranks
from zero_core import AdamWConfig, ZeroConfig, ZeroEngine

pytestmark = pytest.mark.distributed

SHAPES = st.lists(
    st.lists(st.integers(0, 9), max_size=3).map(tuple)
    | st.sampled_from([(), (1,), (0,), (257,), (64,), (65, 3)]),
    min_size=1,
    max_size=6,
)


class Piece(nn.Module):
    """A unit."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.ParameterList()

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        loss = torch.zeros(())
        for number, parameter in enumerate(self.own):
            loss = loss + (parameter.float() * factor).sin().sum() * (number + 1)
        return loss


class Bag(nn.Module):
    """Parameters of any shapes, spread over two units and the root; each adds to the loss."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        torch.manual_seed(len(shapes))
        self.parts = nn.ModuleList(Piece() for _ in range(2))
        self.last = Piece()
        homes = [piece.own for piece in (*self.parts, self.last)]
        for index, shape in enumerate(shapes):
            homes[index % 3].append(nn.Parameter(torch.randn(shape)))

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        return sum((part(factor) for part in self.parts), self.last(factor))


def reference(
    shapes: list[tuple[int, ...]], steps: int, world: int
) -> tuple[list[float], list[torch.Tensor]]:
    model, norms = Bag(shapes), []
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    plain = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": plain, "weight_decay": 0.0}], lr=1e-2)
    for step in range(steps):
        for rank in range(world):
            (model(torch.tensor(0.1 + step + rank)) / world).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, [p.detach().clone() for p in model.parameters()]


def trained(rank: int, world: int) -> int:
    tried = 0

    @settings(
        max_examples=12,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(shapes=SHAPES, stage=st.sampled_from([0, 1, 2, 3]), near=st.booleans())
    def one(shapes: list[tuple[int, ...]], stage: int, near: bool) -> None:
        nonlocal tried
        norms, want = reference(shapes, 3, world)
        config = ZeroConfig(
            stage=stage,  # type: ignore[arg-type]
            tile=64,
            staging_bytes=4096,
            transport="auto" if near else "network",
            optimizer=AdamWConfig(lr=1e-2),
        )
        engine = ZeroEngine(Bag(shapes), config)
        for step in range(3):
            engine.backward(engine(torch.tensor(0.1 + step + rank)))
            assert engine.step().grad_norm == pytest.approx(norms[step], rel=1e-5, abs=1e-7)
        with engine.full_parameters():
            for got, tensor in zip(engine.module.parameters(), want, strict=True):
                torch.testing.assert_close(got.detach(), tensor, rtol=1e-5, atol=1e-6)
        engine.detach()
        tried += 1

    one()
    return tried


@pytest.mark.parametrize("world", [1, 2, 4])
def test_any_shapes_train_as_in_one_process(world: int) -> None:
    assert all(tried >= 12 for tried in run_ranks(world, trained, timeout_s=120))
