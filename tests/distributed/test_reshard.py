"""Groups that take over from one another: any N to any N, every stage, and nobody notices in the numbers."""

from typing import Any

import pytest
import torch

from tests.distributed.lives import Act, Diary, Script, play
from tests.distributed.odd_model import batch
from tests.distributed.test_reproducible import WithAttention
from zero_core import AdamWConfig, ZeroConfig, ZeroEngine

pytestmark = pytest.mark.distributed

MICRO_BATCHES = 7


def config(stage: int, precision: str, **more: Any) -> ZeroConfig:
    settings: dict[str, Any] = {
        "micro_batches": MICRO_BATCHES,
        "optimizer": AdamWConfig(lr=1e-2),
        "clip_norm": 0.3,
        "tile": 64,
        "staging_bytes": 4096,
        "reproducible": True,
        "collective_timeout_s": 60.0,
    }
    return ZeroConfig(stage=stage, precision=precision, **settings | more)


def model() -> torch.nn.Module:
    torch.manual_seed(1)
    module = WithAttention()
    module.calls.fill_(41)
    return module


def train(engine: ZeroEngine, step: int) -> None:
    for index in engine.micro_batches:
        torch.manual_seed(1_000 * step + index)
        engine.backward(engine(*batch(step, index)))


def script(*acts: Act, stage: int, precision: str, **more: Any) -> Script:
    return Script(acts, config(stage, precision, **more), model, train)


def first(members: int) -> tuple[int, ...]:
    return tuple(range(members))


def curve(diaries: dict[int, Diary]) -> dict[int, str]:
    """Loss by step; what was computed more than once, or by several, must be the same each time."""
    found: dict[int, str] = {}
    for diary in diaries.values():
        for step, loss in diary.losses:
            assert found.setdefault(step, loss) == loss, f"step {step} has two losses"
    return found


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, tuple[dict[int, str], str]]:
    """Losses and digest after 15 steps on one rank."""
    found = {}
    for precision in ("fp32", "bf16", "fp16"):
        diaries = play(1, script(Act((0,), 15), stage=1, precision=precision))
        found[precision] = curve(diaries), diaries[0].digest
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_resizes_change_no_bit(stage: int, precision: str, undisturbed: Any) -> None:
    sizes = (2, 4, 3, 1, 5)
    acts = [Act(first(size), 3 * (number + 1)) for number, size in enumerate(sizes)]
    diaries = play(5, script(*acts, stage=stage, precision=precision))
    losses, digest = undisturbed[precision]
    assert curve(diaries) == losses
    for diary in diaries.values():
        assert diary.digest == digest
        assert diary.buffers == {"calls": 41}
        for number, taken in diary.taken.items():
            assert (taken.step, taken.generation) == (3 * number, number - 1)
            assert taken.bytes_moved == taken.bytes_needed
            assert taken.replica_ranks == ()
    received = [sum(d.taken[4].bytes_received for d in diaries.values() if 4 in d.taken)]
    assert received == [diaries[0].taken[4].bytes_moved], "what is said to move is what is received"
