"""What the system says of a process and a machine: memory, bytes on an interface, busy cores. Linux only.

Memory is the proportional set size (PSS): a page that k processes map counts 1/k in each, so that memory
which ranks share is counted once over all of them.
"""

import os
import threading
import time
from pathlib import Path
from typing import Self

_SAMPLE_EVERY_S = 0.002


def pss_bytes() -> int:
    """This process's proportional set size. Takes milliseconds: the kernel walks all its pages."""
    with Path("/proc/self/smaps_rollup").open("rb") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(b"Pss:"))


class PeakPss:
    """Within the context a thread samples the process again and again; `bytes` is the highest it saw.

    Sampling slows the process down, so it must not run in steps that are timed.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="pss", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while True:
            self.bytes = max(self.bytes, pss_bytes())
            if self._over.wait(_SAMPLE_EVERY_S):
                return


def busy_cpu_s() -> float:
    """CPU seconds the machine has spent so far in processes, or was kept from spending by its host.

    Soft interrupts are left out: they are mostly the loopback's work for the ranks themselves.
    """
    user, nice, system, _, _, _, _, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + steal) / os.sysconf("SC_CLK_TCK")


def wait_until_quiet(limit_s: float, *, cores: float = 0.2) -> float:
    """Wait until fewer than `cores` are busy over half a second, at most `limit_s`; how many were at last."""
    deadline = time.monotonic() + limit_s
    while True:
        before, began = busy_cpu_s(), time.monotonic()
        time.sleep(0.5)
        busy = (busy_cpu_s() - before) / (time.monotonic() - began)
        if busy < cores or time.monotonic() > deadline:
            return busy


class PeakResident:
    """Within the context the kernel keeps the process's highest resident memory, which costs nothing.

    `bytes` is how much that was beyond what was resident before. Files that are mapped count as well.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._before = 0

    def __enter__(self) -> Self:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget the highest so far
        self._before = _status_bytes("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.bytes = max(0, _status_bytes("VmHWM") - self._before)


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def moved_bytes() -> tuple[int, int]:
    """Bytes that all threads of this process have read and written by system calls, as the kernel counts.

    Whether they came from a disk or from the page cache is the same. What is read through a mapping is not
    among them, nor what `recv` and `send` move.
    """
    rows = dict(line.split(": ") for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines())
    return int(rows["rchar"]), int(rows["wchar"])


def file_system(folder: Path) -> str:
    """The type of the file system that the folder lies on, as "ext4"."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    above = [(place, kind) for place, kind in mounts if folder.resolve().is_relative_to(place)]
    return max(above, key=lambda mount: len(mount[0]))[1]
