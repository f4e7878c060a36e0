"""Reproducible mode: the same bits come out whatever the number of ranks and the stage."""

import hashlib
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.odd_model import OddModel, batch
from tests.distributed.ranks import RankFailedError, run_ranks
from zero_core import AdamWConfig, ZeroConfig, ZeroEngine

pytestmark = pytest.mark.distributed

STEPS, MICRO_BATCHES = 30, 7


class WithAttention(OddModel):
    """The odd model with self-attention and dropout before its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(13, 1, dropout=0.1, batch_first=True)
        self.dropout = nn.Dropout(0.2)
        self.embed.register_forward_hook(self._mix)

    def _mix(self, _module: nn.Module, _inputs: Any, x: torch.Tensor) -> torch.Tensor:
        attended, _ = self.attention(x, x, x, need_weights=False)
        return self.dropout(x + attended)


def trace(stage: int, precision: str, *, reproducible: bool = True, steps: int = STEPS) -> tuple[Any, ...]:
    """Train; return losses and norms as exact hexadecimal, and the digest of all master parameters."""
    torch.manual_seed(1)
    config = ZeroConfig(
        stage=stage,
        precision=precision,
        micro_batches=MICRO_BATCHES,
        optimizer=AdamWConfig(lr=1e-2),
        clip_norm=0.3,
        tile=64,
        staging_bytes=4096,
        reproducible=reproducible,
    )
    engine = ZeroEngine(WithAttention(), config)
    told = []
    for step in range(steps):
        for index in engine.micro_batches:
            torch.manual_seed(1_000 * step + index)
            engine.backward(engine(*batch(step, index)))
        report = engine.step()
        told.append((report.loss.hex(), report.grad_norm.hex()))
    digest = hashlib.sha256()
    for state in engine.optimizer.states:
        flat = torch.zeros(state.unit.padded)
        flat[state.start : state.stop] = state.master
        engine.collectives.gather_from_owners(flat, state.unit.chunk, state.unit.numel, kind="test", tag=0)
        digest.update(flat[: state.unit.numel].numpy().tobytes())
    memory, budget = engine.memory(), engine.budget
    assert memory.gradients == budget.gradients
    engine.detach()
    return (*told, digest.hexdigest())


def traces(rank: int, world: int, cells: list[tuple[int, str]]) -> list[Any]:
    return [trace(stage, precision) for stage, precision in cells]


def test_same_bits_for_every_number_of_ranks_and_every_stage() -> None:
    """bf16 at all 20 of them; fp32 at one stage for each number of ranks, all four among them."""
    found: dict[str, set[Any]] = {"fp32": set(), "bf16": set()}
    for world in (1, 2, 3, 4, 5):
        cells = [*((stage, "bf16") for stage in (0, 1, 2, 3)), (world % 4, "fp32")]
        for answers in run_ranks(world, traces, cells, timeout_s=200):
            for (_, precision), answer in zip(cells, answers, strict=True):
                found[precision].add(answer)
    assert {precision: len(answers) for precision, answers in found.items()} == {"fp32": 1, "bf16": 1}


def ordinary(rank: int, world: int) -> list[Any]:
    return [trace(2, "fp32", reproducible=False, steps=8)]


def test_the_ordinary_mode_is_what_the_mode_is_needed_for() -> None:
    """Without it the number of ranks shows in the last bits: the test above can fail."""
    assert run_ranks(1, ordinary)[0] != run_ranks(3, ordinary)[0]


def late_gradient(rank: int, world: int) -> None:
    model = WithAttention()
    engine = ZeroEngine(model, ZeroConfig(stage=2, tile=64, reproducible=True))
    loss = engine(*batch(0, rank))
    weight = model.blocks[0].up.weight

    def backward_inside(_gradient: torch.Tensor) -> None:
        with torch.enable_grad():
            weight.square().sum().backward()

    # As reentrant checkpointing does; the unit's turn is over by the time the embedding's gradient comes.
    model.embed.weight.register_hook(backward_inside)
    engine.backward(loss)


def test_a_gradient_after_its_units_turn_is_refused() -> None:
    with pytest.raises(
        RankFailedError, match=r"blocks\.0\.up\.weight.* came after their unit had been reduced"
    ):
        run_ranks(2, late_gradient)
