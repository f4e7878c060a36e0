"""`torch.compile` of the user's model stays possible: the same losses, to the bit."""

import pytest

from tests.distributed.odd_model import batch, build
from tests.distributed.ranks import run_ranks
from zero_core import AdamWConfig, ZeroConfig, ZeroEngine

pytestmark = pytest.mark.distributed


def losses(rank: int, stage: int, *, compiled: bool) -> list[float]:
    model = build()
    if compiled:
        for block in model.blocks:
            block.compile(backend="aot_eager")
    engine = ZeroEngine(model, ZeroConfig(stage=stage, tile=64, optimizer=AdamWConfig(lr=1e-2)))
    found = []
    for step in range(3):
        engine.backward(engine(*batch(step, rank)))
        found.append(engine.step().loss)
    engine.detach()
    return found


def compare(rank: int, world: int) -> bool:
    return all(
        losses(rank, stage, compiled=True) == losses(rank, stage, compiled=False) for stage in (1, 2, 3)
    )


def test_compiled_blocks_train_alike_at_every_stage() -> None:
    assert run_ranks(2, compare, timeout_s=300) == [True, True]
