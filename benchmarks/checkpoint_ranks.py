"""One save, or loads one after the other, by the ranks of a group, in fresh processes; what it took.

From the moment on when all ranks are ready. A load is verified: its state has to be the one that was saved.
"""

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from benchmarks.checkpoint_contestants import Contestant, build
from benchmarks.probes import PeakResident, moved_bytes
from tests.distributed.ranks import run_ranks

_T = TypeVar("_T")
TIMEOUT_S = 600.0
_SAVED_SEED, _OTHER_SEED = 1, 2
_IMPORTED_LATE = ["torch._dynamo", "torch._inductor.compile_fx", "networkx"]


class StateDiffersError(Exception):
    """What was loaded is not what was saved."""


@dataclass(frozen=True, slots=True)
class Done:
    """One save or load. Of a rank, or of all: then seconds and extra_bytes are the worst rank's, else sums.

    extra_bytes  highest resident memory, less that before
    prints       of the state afterwards, by kind
    """

    seconds: float
    read_bytes: int
    written_bytes: int
    extra_bytes: int
    prints: list[int]


@dataclass(frozen=True, slots=True)
class Saved:
    """Where a checkpoint is, and the prints of the state in it."""

    place: Path
    prints: list[int]


def preload() -> None:
    """Have ranks forked from a process that has imported everything. Before the first rank.

    What is read while modules are imported would count as read by a load.
    """
    get_context("forkserver").set_forkserver_preload(["benchmarks.checkpoint_ranks", *_IMPORTED_LATE])


def save(name: str, size: str, ranks: int, folder: Path) -> tuple[Saved, Done]:
    """Save a state of random numbers. Raises RankFailedError."""
    found = run_ranks(ranks, _save, name, size, folder, timeout_s=TIMEOUT_S)
    done = _combined(done for _, done in found)
    return Saved(found[0][0], done.prints), done


def load(name: str, size: str, ranks: int, saved: Saved) -> Done:
    """Load it where another state was. Raises RankFailedError, StateDiffersError."""
    return _loaded(name, size, ranks, [saved], first=0)[0]


def load_all(name: str, size: str, ranks: int, saved: Sequence[Saved]) -> list[Done]:
    """Load each of these, one after the other in the same ranks. Raises RankFailedError, StateDiffersError.

    The first is loaded once before them: what a process reads only once is no load's.
    """
    return _loaded(name, size, ranks, [saved[0], *saved], first=1)


def _loaded(name: str, size: str, ranks: int, saved: Sequence[Saved], *, first: int) -> list[Done]:
    places = [one.place for one in saved]
    found = run_ranks(ranks, _load, name, size, places, timeout_s=TIMEOUT_S)
    dones = [_combined(of_all) for of_all in zip(*found, strict=True)][first:]
    for one, done in zip(saved[first:], dones, strict=True):
        if done.prints != one.prints:
            raise StateDiffersError(
                f"{name}: what {ranks} ranks loaded is not what was saved: {done.prints}, not {one.prints}"
            )
    return dones


def _combined(ranks: Iterable[Done]) -> Done:
    dones = list(ranks)
    return Done(
        seconds=max(done.seconds for done in dones),
        read_bytes=sum(done.read_bytes for done in dones),
        written_bytes=sum(done.written_bytes for done in dones),
        extra_bytes=max(done.extra_bytes for done in dones),
        prints=[sum(kind) for kind in zip(*(done.prints for done in dones), strict=True)],
    )


# -- in the ranks -----------------------------------------------------------------------------------


def _save(_rank: int, _ranks: int, name: str, size: str, folder: Path) -> tuple[Path, Done]:
    contestant = build(name, size)
    contestant.fill(_SAVED_SEED)
    return _measured(contestant, lambda: contestant.save(folder))


def _load(_rank: int, _ranks: int, name: str, size: str, places: list[Path]) -> list[Done]:
    contestant = build(name, size)
    dones = []
    for place in places:
        contestant.fill(_OTHER_SEED)
        _, done = _measured(contestant, partial(contestant.load, place))
        dones.append(done)
    return dones


def _measured(contestant: Contestant, act: Callable[[], _T]) -> tuple[_T, Done]:
    """What it returns, and what it took from the moment on when all ranks were ready."""
    gc.collect()
    dist.barrier()
    read, written = moved_bytes()
    with PeakResident() as resident:
        began = time.perf_counter()
        result = act()
        seconds = time.perf_counter() - began
    read_after, written_after = moved_bytes()
    return result, Done(
        seconds=seconds,
        read_bytes=read_after - read,
        written_bytes=written_after - written,
        extra_bytes=resident.bytes,
        prints=contestant.prints(),
    )
