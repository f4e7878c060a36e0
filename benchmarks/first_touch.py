"""Memory that is touched before anything is timed. Linux only; knows no torch.

On a virtual machine the host backs guest memory only when it is first touched, which may take fifty times
as long as touching it again. So a child touches nearly all of it and ends: what it frees stays backed, for
all. Nearly all, because nobody knows which part the next process is given.
"""

import json
import mmap
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

GIB = 1 << 30
_SHARE = 0.9
"""Of what is available; the rest is for whatever else the machine does meanwhile."""

_PIECE_BYTES = GIB // 4
_TIMEOUT_S = 600.0
LIMIT, USED = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")


@dataclass(frozen=True, slots=True, kw_only=True)
class Touched:
    """How much was touched, and the seconds of each piece of `piece_bytes` in order; the last may be less."""

    bytes: int
    piece_bytes: int
    seconds: list[float]

    def __str__(self) -> str:
        first, slowest = self.seconds[0], max(self.seconds)
        return (
            f"Memory touched beforehand: {self.bytes / GIB:.1f} GiB in {sum(self.seconds):.1f} s; of pieces "
            f"of {self.piece_bytes / GIB:.2f} GiB the first took {first:.2f} s, the slowest {slowest:.2f} s."
        )


def touch_memory(
    *, most_bytes: int | None = None, piece_bytes: int = _PIECE_BYTES, timeout_s: float = _TIMEOUT_S
) -> Touched:
    """Have a child touch nine tenths of what is available, or `most_bytes` if less, and free it again.

    Raises subprocess.CalledProcessError where the child fails and TimeoutExpired where it takes too long.
    """
    size = max(mmap.PAGESIZE, int(available_bytes() * _SHARE))
    size = size if most_bytes is None else min(size, most_bytes)
    command = [sys.executable, __file__, str(size), str(piece_bytes)]
    told = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=timeout_s).stdout
    return Touched(bytes=size, piece_bytes=piece_bytes, seconds=json.loads(told))


def available_bytes() -> int:
    """What a new process can have without swapping, within the limit of its control group (version 2)."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    limit = LIMIT.read_text(encoding="ascii").strip() if LIMIT.exists() else "max"
    if limit == "max":
        return free
    return max(0, min(free, int(limit) - int(USED.read_text(encoding="ascii"))))


def touch(size: int, piece_bytes: int) -> list[float]:
    """Seconds for each piece. All are kept to the end, so that none is given back and touched again."""
    kept, seconds = [], []
    for start in range(0, size, piece_bytes):
        began = time.perf_counter()
        piece = mmap.mmap(-1, min(piece_bytes, size - start))
        pages = len(range(0, len(piece), mmap.PAGESIZE))
        piece[:: mmap.PAGESIZE] = b"\1" * pages
        seconds.append(time.perf_counter() - began)
        kept.append(piece)
    return seconds


if __name__ == "__main__":
    print(json.dumps(touch(*map(int, sys.argv[1:]))))
