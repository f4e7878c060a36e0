"""`torch.compile` of the user's model stays possible: the same losses, to the bit."""

import pytest
import torch

from tests.distributed.odd_model import batch, build
from tests.distributed.ranks import run_ranks
from zero_core import AdamWConfig, ZeroConfig, ZeroEngine
from zero_core.config import Precision

pytestmark = pytest.mark.distributed


def losses(rank: int, stage: int, precision: Precision, *, compiled: bool) -> list[float]:
    model = build()
    if compiled:
        for block in model.blocks:
            block.compile(backend="aot_eager")
    config = ZeroConfig(
        stage=stage,  # type: ignore[arg-type]
        precision=precision,
        low_precision_products="widened",
        tile=64,
        optimizer=AdamWConfig(lr=1e-2),
    )
    engine = ZeroEngine(model, config)
    found = []
    for step in range(3):
        engine.backward(engine(*batch(step, rank)))
        found.append(engine.step().loss)
    engine.detach()
    return found


def compare(rank: int, world: int, precision: Precision) -> int:
    """How many graphs were compiled."""
    for stage in (1, 2, 3):
        eager = losses(rank, stage, precision, compiled=False)
        assert losses(rank, stage, precision, compiled=True) == eager, stage
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_compiled_blocks_train_alike_at_every_stage(precision: Precision) -> None:
    """In bf16 with widened products too, which leave compiled modules compiled."""
    assert min(run_ranks(2, compare, precision, timeout_s=300)) > 0
