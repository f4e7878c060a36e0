"""Reads the ends of a job's worker logs. Owns the bounds; every path is computed, none is taken from a user.

Knows the folder layout of `workers.naming`; neither the database nor the cluster, so logs stay readable when
the node that wrote them is gone.
"""

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from service.errors import InvalidRequest, NotFound
from workers.naming import JobFolder

MAX_TAIL_LINES = 5000
MAX_TAIL_BYTES = 512 << 10
MAX_WORKERS = 64
"""Logs of one answer, newest first; more are read one by one."""

_WORKER = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_NUMBERS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class LogTail:
    """The last lines of one worker's log; `truncated` where there is more before them."""

    worker: str
    lines: tuple[str, ...]
    truncated: bool


def tails(folder: JobFolder, *, worker: str | None, tail_lines: int) -> list[LogTail]:
    """The ends of one worker's log, or of all of them in the order of the workers' numbers.

    Raises NotFound (unknown_worker), and InvalidRequest for a tail beyond MAX_TAIL_LINES.
    """
    if not 1 <= tail_lines <= MAX_TAIL_LINES:
        raise InvalidRequest(f"a tail of {tail_lines} lines must be between 1 and {MAX_TAIL_LINES}")
    names = _workers(folder)
    if worker is not None:
        if worker not in names:
            raise NotFound(
                f"job {folder.job_id} has no log of a worker {worker[:80]!r}",
                code="unknown_worker",
                details={"job_id": folder.job_id, "worker": worker[:80]},
            )
        names = [worker]
    found = (_tail(folder.worker_log(name), name, tail_lines) for name in names[-MAX_WORKERS:])
    return [tail for tail in found if tail is not None]


def _workers(folder: JobFolder) -> list[str]:
    """Names of the workers that left a log, as the folder tells them."""
    if not folder.worker_logs.is_dir():
        return []
    stems = (path.stem for path in folder.worker_logs.iterdir() if path.suffix == ".log")
    return sorted((stem for stem in stems if _WORKER.fullmatch(stem)), key=_in_number_order)


def _in_number_order(name: str) -> tuple[str, int, str]:
    number = _NUMBERS.search(name)
    return (name[: number.start()], int(number.group()), name) if number else (name, -1, name)


def _tail(path: Path, worker: str, tail_lines: int) -> LogTail | None:
    """The end of the file; None where it is not a regular file (a job could have put a link there)."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            return None
        start = max(0, found.st_size - MAX_TAIL_BYTES)
        file.seek(start)
        lines = file.read(MAX_TAIL_BYTES).decode(errors="replace").splitlines()
    if start:
        lines = lines[1:]  # cut in the middle
    return LogTail(worker, tuple(lines[-tail_lines:]), truncated=bool(start) or len(lines) > tail_lines)
