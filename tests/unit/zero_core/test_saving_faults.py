"""Every call that a save makes of the file system fails once, in every way; and the process is killed there.

After each: the checkpoint before still reads back, the next save succeeds, and nothing that was left is taken
for a checkpoint. K1, K8, K12 and K15 of the public faults, at every place where they could happen.
"""

import errno
import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from tests.unit.zero_core.small_save import reads_back, work_of
from zero_core.checkpoint import manifest
from zero_core.checkpoint.store import Files, LocalStore
from zero_core.checkpoint.writing import write_behind
from zero_core.errors import CheckpointError

_context = get_context("forkserver")
_context.set_forkserver_preload(["tests.unit.zero_core.test_saving_faults"])


class FaultyFiles(Files):
    """Fails in the way of `fault` at call number `at`, and works before and after it."""

    def __init__(self, fault: str = "", at: int = -1) -> None:
        self.fault = fault
        self.at = at
        self.calls: list[str] = []

    def _do(self, name: str, act: Callable[[], Any]) -> Any:
        self.calls.append(name)
        here = len(self.calls) - 1
        if self.fault == "dead" and here >= self.at >= 0:
            raise OSError(errno.EIO, "the device is gone")
        if here != self.at:
            return act()
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "kill after":
            act()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault in ("lost answer", "close"):
            act()
        number = errno.ENOSPC if self.fault == "full" else errno.EIO
        raise OSError(number, os.strerror(number))

    def open(self, path: Path, flags: int) -> int:
        return int(self._do("open", lambda: super(FaultyFiles, self).open(path, flags)))

    def fallocate(self, descriptor: int, size: int) -> None:
        self._do("fallocate", lambda: super(FaultyFiles, self).fallocate(descriptor, size))

    def pwrite(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.fault == "short" and len(self.calls) == self.at:
            self.calls.append("pwrite")
            joined = b"".join(buffers)
            return os.pwrite(descriptor, joined[: len(joined) // 2], offset)
        return int(self._do("pwrite", lambda: super(FaultyFiles, self).pwrite(descriptor, buffers, offset)))

    def fsync(self, descriptor: int) -> None:
        self._do("fsync", lambda: None)  # nothing here crashes the machine

    def close(self, descriptor: int) -> None:
        try:
            self._do("close", lambda: super(FaultyFiles, self).close(descriptor))
        except OSError:
            if self.fault != "close":
                os.close(descriptor)
            raise

    def rename(self, source: Path, target: Path) -> None:
        self._do("rename", lambda: super(FaultyFiles, self).rename(source, target))

    def mkdir(self, path: Path) -> None:
        self._do("mkdir", lambda: super(FaultyFiles, self).mkdir(path))

    def unlink(self, path: Path) -> None:
        self._do("unlink", lambda: super(FaultyFiles, self).unlink(path))

    def rmdir(self, path: Path) -> None:
        self._do("rmdir", lambda: super(FaultyFiles, self).rmdir(path))


def save(root: Path, step: int, files: Files, way: str) -> None:
    """One save as `saving.save` goes about it with two ranks, or one rank's behind the training.

    "fenced": by two ranks of the generation that was opened last, as jobs save.
    """
    if way == "fenced":
        manifest.open_generation(root, 1)
    ranks = 1 if way == "behind" else 2
    works = work_of(LocalStore(root, files), world_size=ranks, step=step, fenced=way == "fenced")
    if way == "behind":
        write_behind(works[0])
        return
    try:
        for work in works:
            work.write()
        works[0].commit(works[0].receipts())
    except Exception:
        works[0].abandon()
        raise


def calls_of(root: Path, way: str) -> list[str]:
    """What a save that succeeds calls, in order."""
    files = FaultyFiles()
    save(root, 1, files, way)
    return files.calls


def left(root: Path) -> set[str]:
    """Names of all that is there, also where an open generation fills its checkpoints."""
    opened = manifest.staging(root, 1)
    inside = opened.iterdir() if opened.exists() else ()
    return {path.name for path in (*root.iterdir(), *inside)} - {opened.name}


def check_after(root: Path, step: int, failed: bool, swept: bool) -> None:
    """The state of things after a save of `step` had its fault; `step` - 1 was there before."""
    before = {info.step for info in manifest.scan(root)}
    assert before <= {step - 1, step}
    assert step - 1 in before
    if not failed:
        assert step in before
    reads_back(LocalStore(root), max(before))
    if failed and swept:
        assert left(root) == {"LATEST", manifest.folder_name(step - 1, 1)}


_FAULTS = {
    "broken": None,
    "full": None,
    "dead": None,
    "short": {"pwrite"},
    "close": {"close"},
    "lost answer": {"rename", "mkdir", "unlink"},
}
"""Ways to fail, and of which calls; None: of all."""


@pytest.mark.parametrize("way", ["together", "behind", "fenced"])
@pytest.mark.parametrize("fault", list(_FAULTS))
def test_any_call_may_fail(fault: str, way: str, tmp_path: Path) -> None:
    calls = calls_of(tmp_path, way)
    assert {"mkdir", "open", "fallocate", "pwrite", "fsync", "close", "rename", "unlink"} <= set(calls)
    failures, step = 0, 1
    for at, name in enumerate(calls):
        if _FAULTS[fault] is not None and name not in (_FAULTS[fault] or ()):
            continue
        step += 1
        failed = False
        try:
            save(tmp_path, step, FaultyFiles(fault, at), way)
        except (OSError, CheckpointError):
            failed = True
        failures += failed
        # A device that is gone cannot be cleaned up; the next prune does that.
        check_after(tmp_path, step, failed, swept=fault != "dead" and name != "mkdir")
        step += 1
        save(tmp_path, step, FaultyFiles(), way)
        reads_back(LocalStore(tmp_path), step)
        manifest.prune(tmp_path, keep=1)
        if way == "fenced":
            manifest.clear_unfinished(tmp_path)
        assert left(tmp_path) <= {"LATEST", manifest.folder_name(step, 1)}
    if fault == "short":
        assert failures == 0, "what is left of a short write is written by another"
    elif fault == "close":
        assert failures == calls.count("close") - 1, "all but that of LATEST, which is a hint"
    elif fault != "lost answer":
        assert failures > len(calls) // 2


def killed(root: Path, step: int, fault: str, at: int, way: str) -> None:
    save(root, step, FaultyFiles(fault, at), way)


@pytest.mark.parametrize("way", ["together", "fenced"])
@pytest.mark.parametrize("fault", ["kill", "kill after"])
def test_the_process_may_be_killed_at_any_call(fault: str, way: str, tmp_path: Path) -> None:
    """K8 (metaseq 53, Automodel 3254)."""
    calls = calls_of(tmp_path, way)
    step = 1
    for at, name in enumerate(calls):
        if fault == "kill after" and name not in ("rename", "unlink", "mkdir"):
            continue  # the same as before the next call
        step += 1
        child = _context.Process(target=killed, args=(tmp_path, step, fault, at, way))
        child.start()
        child.join(60)
        assert child.exitcode == -signal.SIGKILL
        check_after(tmp_path, step, failed=True, swept=False)
        step += 1
        save(tmp_path, step, FaultyFiles(), way)
        reads_back(LocalStore(tmp_path), step)
        manifest.prune(tmp_path, keep=1)
        if way == "fenced":
            manifest.clear_unfinished(tmp_path)
        assert left(tmp_path) <= {"LATEST", manifest.folder_name(step, 1)}
