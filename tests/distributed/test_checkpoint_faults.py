"""Ranks that are killed in the middle of a save: what they leave is no checkpoint, and is in nobody's way.

What every single call of a save may do wrong is in tests/unit/zero_core/test_saving_faults.py.
"""

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.distributed.odd_model import batch, build
from tests.distributed.ranks import RankFailedError, run_ranks
from zero_core import AdamWConfig, ZeroConfig, ZeroEngine
from zero_core.checkpoint import Outcome, Saver, load, manifest, save
from zero_core.checkpoint.store import Files, LocalStore

pytestmark = pytest.mark.distributed


def make() -> ZeroEngine:
    config = ZeroConfig(stage=2, micro_batches=4, optimizer=AdamWConfig(lr=1e-2), tile=64, staging_bytes=4096)
    return ZeroEngine(build(), config)


class KillingFiles(Files):
    """The process ends at its first write of tensors, or when it is about to commit."""

    def __init__(self, at: str) -> None:
        self._at = at

    def pwrite(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self._at == "write":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().pwrite(descriptor, buffers, offset)

    def rename(self, source: Path, target: Path) -> None:
        if self._at == "commit" and target.name.startswith("step-"):
            os.kill(os.getpid(), signal.SIGKILL)
        super().rename(source, target)


def save_and_die(rank: int, world: int, root: Path, victim: int, at: str, behind: bool) -> None:
    engine = make()
    save(engine, root, extra={"step": 0}, generation=1)
    for index in engine.micro_batches:
        engine.backward(engine(*batch(0, index)))
    engine.step()
    place = LocalStore(root, KillingFiles(at) if rank == victim else None)
    if behind:
        told = list[Outcome]()
        saver = Saver(told.append)
        saver.begin(engine, place, extra={"step": 1}, generation=1)
        saver.close()
    else:
        save(engine, place, extra={"step": 1}, generation=1)


def go_on(rank: int, world: int, root: Path) -> int:
    engine = make()
    info = manifest.latest(root)
    assert info is not None
    assert load(engine, info.path) == {"step": 0}
    step = engine.steps_done
    for index in engine.micro_batches:
        engine.backward(engine(*batch(0, index)))
    engine.step()
    save(engine, root, extra={"step": 1}, generation=2)
    if rank == 0:
        manifest.prune(root, keep=2)
    return step


@pytest.mark.parametrize(
    ("victim", "at", "behind"),
    [(1, "write", False), (0, "write", True), (0, "commit", False), (0, "commit", True)],
)
def test_killed_in_the_middle_of_a_save(tmp_path: Path, victim: int, at: str, behind: bool) -> None:
    """K8 (metaseq 53, Automodel 3254): the one before loads, at another N, and the next save succeeds."""
    with pytest.raises(RankFailedError):
        run_ranks(2, save_and_die, tmp_path, victim, at, behind)
    assert [info.step for info in manifest.scan(tmp_path)] == [0]
    if victim == 0:  # where it is another, rank 0 may have swept by now
        assert any(path.name.startswith(".saving-") for path in tmp_path.iterdir()), "it was in the middle"
    assert run_ranks(3, go_on, tmp_path) == [0, 0, 0]
    assert {path.name for path in tmp_path.iterdir()} == {
        "LATEST",
        manifest.folder_name(0, 1),
        manifest.folder_name(1, 2),
    }
