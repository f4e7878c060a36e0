"""Modules that return anything, parameters of any kind: trained as in a plain loop, at stages 0 and 3."""

import functools
import warnings
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as checkpoint_fn

from tests.distributed.ranks import run_ranks
from zero_core import AdamWConfig, ZeroConfig, ZeroEngine
from zero_core.checkpoint import load, save
from zero_core.state_dict import full_state_dict

pytestmark = pytest.mark.distributed

STEPS, WIDTH = 3, 8
Pair = namedtuple("Pair", ["x", "nothing"])


@dataclass(frozen=True)
class Output:
    x: torch.Tensor
    note: str = "a leaf to torch's own walk"


class Returns(nn.Module):
    """Its forward wraps the result in any of the shapes that users return."""

    def __init__(self, wrap: Callable[[torch.Tensor], Any], unwrap: Callable[[Any], torch.Tensor]) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.wrap, self.unwrap = wrap, unwrap

    def forward(self, x: Any) -> Any:
        return self.wrap(torch.tanh(self.inner(x)))


class Silent(nn.Module):
    """Returns nothing: what it computes goes into a list it is given (and None is passed through)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: None, into: list[torch.Tensor]) -> None:
        assert mask is None
        into.append(torch.tanh(self.inner(x)))


class Any_(nn.Module):  # noqa: N801
    """Every way of returning, one layer six times, a frozen adapter, and recomputation around some."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [
                Returns(lambda x: {"x": x, "none": None}, lambda y: y["x"]),
                Returns(Output, lambda y: y.x),
                Returns(lambda x: Pair(x, None), lambda y: y.x),
                Returns(lambda x: (None, [x]), lambda y: y[1][0]),
                Silent(),
                nn.Linear(WIDTH, WIDTH),
            ]
        )
        self.blocks[2].inner.weight.requires_grad_(False)  # a frozen matrix beside a trained bias
        # Recomputed within its own forward: backward needs its parameters without calling its hooks.
        inner = self.blocks[1].forward
        self.blocks[1].forward = functools.partial(checkpoint_fn, inner, use_reentrant=False)
        self.register_buffer("calls", torch.zeros(2, dtype=torch.int32))

    def forward(self, x: torch.Tensor, mask: None = None) -> torch.Tensor:
        self.calls += 1
        for index, block in enumerate(self.blocks):
            if isinstance(block, Returns):
                recomputed = index == 2
                y = checkpoint_fn(block, x, use_reentrant=False) if recomputed else block(x)
                x = x + block.unwrap(y)
            elif isinstance(block, Silent):
                found: list[torch.Tensor] = []
                block(x, mask, found)
                x = x + found[0]
            else:
                for _ in range(6):
                    x = checkpoint_fn(
                        lambda x, nothing, block=block: torch.tanh(block(x)), x, None, use_reentrant=False
                    )
        return x.square().mean()


class Extremes(nn.Module):
    """Sizes 8, 0, 24; three elements; 0-d; strided; larger than staging; uint8; three dtypes; used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.eight = nn.Parameter(torch.randn(8))
        self.void = nn.Parameter(torch.empty(0))
        self.wide = nn.Parameter(torch.randn(8, 3).t())  # not contiguous
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, 0), nn.Module(), nn.Linear(WIDTH, 600), nn.Module()])
        self.blocks[1].three = nn.Parameter(torch.randn(3))
        self.blocks[1].codes = nn.Parameter(torch.arange(5, dtype=torch.uint8), requires_grad=False)
        self.blocks[1].flag = nn.Parameter(torch.tensor([True, False]), requires_grad=False)
        self.blocks[3].narrow = nn.Parameter(torch.randn(WIDTH, dtype=torch.bfloat16))
        self.blocks[3].broad = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
        self.blocks[3].scale = nn.Parameter(torch.tensor(1.5))
        self.blocks[3].forward = self._last
        self.blocks[1].forward = self._first
        self.toggled = nn.Linear(WIDTH, WIDTH)

    def _first(self, x: torch.Tensor) -> torch.Tensor:
        three = self.blocks[1].three
        return x + three.sum() * three.prod() + self.blocks[1].codes.float().mean() * 0.01

    def _last(self, x: torch.Tensor) -> torch.Tensor:
        last = self.blocks[3]
        return x * last.narrow.float() * last.broad.float() + last.scale * last.scale

    def forward(self, x: torch.Tensor, branch: bool) -> torch.Tensor:
        x = x * self.eight + (x[:, :3] @ self.wide)
        x = x + self.blocks[0](x).sum() + self.void.sum()
        x = self.blocks[1](x)
        x = x + self.blocks[2](x).tanh().mean()
        x = self.blocks[3](x)
        if branch:
            x = self.toggled(x)
        return x.square().mean()


def inputs(step: int, index: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + index))


def model_of(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(2)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Initializing zero-element tensors")
        return kind()


def arguments(kind: type[nn.Module], step: int, index: int) -> tuple[Any, ...]:
    return (inputs(step, index), None if kind is Any_ else step % 2 == 0)


def plain(kind: type[nn.Module], micro_batches: int) -> dict[str, torch.Tensor]:
    model = model_of(kind).float()  # the engine holds every floating parameter in its own precision
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2]},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.01)
    for step in range(STEPS):
        for index in range(micro_batches):
            (model(*arguments(kind, step, index)) / micro_batches).backward()
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def odd(rank: int, world: int, kind: type[nn.Module], want: dict[str, torch.Tensor], folder: Path) -> None:
    for stage in (0, 2, 3):
        config = ZeroConfig(
            stage=stage, tile=64, staging_bytes=4096, micro_batches=4, optimizer=AdamWConfig(lr=1e-2)
        )
        engine = ZeroEngine(model_of(kind), config)
        first = full_state_dict(engine)
        for name, tensor in model_of(kind).state_dict().items():
            expected = tensor.float() if tensor.is_floating_point() else tensor
            assert torch.equal(first[name], expected), name
        for step in range(STEPS):
            for index in engine.micro_batches:
                engine.backward(engine(*arguments(kind, step, index)))
            with torch.no_grad():  # evaluation between steps, by the other branch
                engine(*arguments(kind, step + 1, 0))
            engine.step()
        got = full_state_dict(engine)
        for name, tensor in want.items():
            if name != "calls":
                torch.testing.assert_close(got[name], tensor, rtol=2e-5, atol=2e-6, msg=f"{stage} {name}")
                assert got[name].shape == tensor.shape
        saved = save(engine, folder / str(stage), extra={}, generation=0)
        other = ZeroEngine(model_of(kind), config)
        load(other, saved.path)
        again = full_state_dict(other)
        assert all(torch.equal(again[name], got[name]) for name in got)


@pytest.mark.parametrize(("kind", "world"), [(Any_, 2), (Extremes, 2), (Extremes, 4)])
def test_trained_as_in_a_plain_loop_and_kept(kind: type[nn.Module], world: int, tmp_path: Path) -> None:
    """Faults E8 (zero-size inside a partition), E9 (3 elements on 4 ranks), E10 (frozen uint8), E13 (a branch
    toggled, evaluation between steps), E14 (frozen weights kept), E16 (a layer six times under
    checkpointing), E21 (None among the arguments of a checkpointed module), E25 (0-d, strided, mixed dtypes).
    """
    run_ranks(world, odd, kind, plain(kind, 4), tmp_path)
