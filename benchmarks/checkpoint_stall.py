"""How long a save behind the training keeps the ranks, beside one copy of the same bytes."""

import gc
import shutil
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.checkpoint_contestants import Ours
from benchmarks.checkpoint_ranks import TIMEOUT_S
from benchmarks.checkpoint_results import StallRound
from tests.distributed.ranks import run_ranks
from zero_core.checkpoint import Outcome, Saver

_Times = tuple[int, list[float], list[float], list[float]]


def measure_stall(size: str, ranks: int, root: Path, *, turns: int, busy_cores: float) -> StallRound:
    """A round of so many turns. Raises RankFailedError."""
    found: list[_Times] = run_ranks(ranks, _take_turns, size, root, turns, timeout_s=TIMEOUT_S)
    stalls_s, copies_s, writes_s = (
        [max(times) for times in zip(*(rank[part] for rank in found), strict=True)] for part in (1, 2, 3)
    )
    return StallRound(
        first_s=stalls_s[0],
        stalls_s=stalls_s[1:],
        copies_s=copies_s[1:],
        writes_s=writes_s[1:],
        shard_bytes=max(rank[0] for rank in found),
        busy_cores=busy_cores,
    )


def _take_turns(rank: int, _ranks: int, size: str, root: Path, turns: int) -> _Times:
    """Shard bytes; seconds of stalls, copies and writes. The first turn of all is the one that allocates."""
    ours = Ours(size)
    ours.fill(seed=1)
    sources = [tensor for _, tensor in ours.held()]
    targets = [torch.zeros_like(tensor) for tensor in sources]
    outcomes: list[Outcome] = []
    saver = Saver(outcomes.append)
    stalls_s, copies_s, writes_s = [], [], []
    for turn in range(turns + 1):
        ours.stand_at(step=turn + 1)
        gc.collect()
        for act in ("copy", "save") if turn % 2 else ("save", "copy"):
            dist.barrier()
            began = time.perf_counter()
            if act == "copy":
                for target, source in zip(targets, sources, strict=True):
                    target.copy_(source)
                copies_s.append(time.perf_counter() - began)
                continue
            saver.begin(ours.engine, root, extra={}, generation=1)
            stalls_s.append(time.perf_counter() - began)
            saver.wait()
            writes_s.append(time.perf_counter() - began)
        _check(outcomes, turn + 1)
        dist.barrier()
        if rank == 0:
            shutil.rmtree(root)
    saver.close()
    return sum(tensor.numel() * tensor.element_size() for tensor in sources), stalls_s, copies_s, writes_s


def _check(outcomes: list[Outcome], count: int) -> None:
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    if errors:
        raise errors[0]
    if len(outcomes) != count:
        raise RuntimeError(f"{count} saves were begun, and {len(outcomes)} ended")
