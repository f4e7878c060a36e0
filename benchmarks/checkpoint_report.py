"""The dated table of the checkpoint benchmark: figures in, Markdown out."""

import importlib.metadata
import statistics
from collections.abc import Iterator, Sequence

from benchmarks.checkpoint_bars import verdicts
from benchmarks.checkpoint_results import (
    LOADS,
    OURS,
    PEER,
    PLAIN,
    SAVE,
    BytesResult,
    Grid,
    PlanResult,
    Results,
    SpeedResult,
    StallResult,
    Timed,
)
from benchmarks.first_touch import Touched
from benchmarks.report import machine

_MB = 1e6

_METHOD = """\
The same GPT for all, fp32 with AdamW states of random numbers: the engine at stage 3, DCP on FSDP2 with fused
AdamW, files synced. "plain" is pwrite and fsync of as many bytes, and preadv into memory already touched. One
torch thread a rank, every save and load in fresh processes whose states exist already. Times are the slowest
rank's from the moment all are ready. Rounds are interleaved, in an order that changes; medians over rounds,
ratios within a round. The page cache is warm: files are read once before each load. Our loads verify digests;
after the clock, the sum of all bits of every contestant's state is held against that of what was saved. Bytes
are those of system calls as the kernel counts them for each process. Extra memory: highest resident beyond
that before, worst rank."""


def render(results: Results, *, when: str, command: str, touched: Touched, place: str, missing: str) -> str:
    """The whole page; its last lines are the bars.

    place    what the files lay on
    missing  why a part that is None is not there
    """
    peer = f"DCP of torch {importlib.metadata.version('torch')}"
    lines = [f"# Checkpoints, {when}", "", *machine(peer, touched)]
    lines += [f"Files on {place}.", f"Command: `{command}`", ""]
    lines += _METHOD.splitlines()
    if (speed := results.speed) is not None:
        lines += [*_speed_table(speed), *_failures(speed.failures)]
    if results.stall is not None:
        lines += _stall_table(results.stall)
    if (read := results.read) is not None:
        lines += [*_grid_table(read), *_peer_table(read), *_failures(read.failures)]
    if results.plan is not None:
        lines += _plan_table(results.plan)
    lines += ["", "## Bars", ""]
    lines += [f"- {verdict.line()}" for verdict in verdicts(results, missing=missing)]
    return "\n".join(lines) + "\n"


def _speed_table(result: SpeedResult) -> Iterator[str]:
    yield from (
        "",
        f"## Saves and loads, {result.size}, {result.needed / _MB:.0f} MB",
        "",
        f"| what | who | median, s | rounds, s | over {PEER} | over {PLAIN} | moved, MB | over needed "
        "| extra memory, MB | others' cores before |",
        "|---|---|---|---|---|---|---|---|---|---|",
    )
    for action in (SAVE, *LOADS):
        for name in (OURS, PEER, PLAIN):
            rounds = result.rounds.get((name, action))
            if rounds:
                yield f"| {action} | {name} | {' | '.join(_speed_cells(result, name, action, rounds))} |"
    rounding = ", ".join(f"{action} {extra / result.needed:.2f}" for action, extra in result.rounding.items())
    yield from ("", f"Rounding to blocks of {OURS}, over needed: {rounding}.")


def _speed_cells(result: SpeedResult, name: str, action: str, rounds: Sequence[Timed]) -> Iterator[str]:
    yield f"{statistics.median(one.seconds for one in rounds):.3f}"
    yield " ".join(f"{one.seconds:.3f}" for one in rounds)
    for other in (PEER, PLAIN):
        ratios = result.ratios(name, other, action)
        yield f"{statistics.median(ratios):.2f}" if ratios and name != other else "-"
    moved = max(one.moved_bytes for one in rounds)
    yield f"{moved / _MB:.1f}"
    yield f"{moved / result.needed:.3f}"
    yield f"{max(one.extra_bytes for one in rounds) / _MB:.0f}"
    yield " ".join(f"{one.busy_cores:.1f}" for one in rounds)


def _stall_table(result: StallResult) -> Iterator[str]:
    yield from (
        "",
        f"## Saves behind the training, {result.size} N={result.world_size}",
        "",
        "Saves and copies take turns in the same ranks, with nothing being written meanwhile. The first save "
        "allocates staging.",
        "",
        "| round | MB a rank | first save, ms | stalls, ms | copies, ms | stall over copy | on disk after, s "
        "| others' cores before |",
        "|---|---|---|---|---|---|---|---|",
    )
    for number, one in enumerate(result.rounds, 1):
        stalls, copies = (" ".join(f"{s * 1e3:.0f}" for s in times) for times in (one.stalls_s, one.copies_s))
        yield (
            f"| {number} | {one.shard_bytes / _MB:.0f} | {one.first_s * 1e3:.0f} | {stalls} | {copies} "
            f"| {one.ratio:.3f} | {statistics.median(one.writes_s):.2f} | {one.busy_cores:.1f} |"
        )
    if result.failure:
        yield from _failures({OURS: result.failure})


def _grid_table(result: BytesResult) -> Iterator[str]:
    cells = {(cell.saved_at, cell.loaded_at): cell for cell in result.cells.get(OURS, ())}
    if not cells:
        return
    columns = sorted({loaded_at for _, loaded_at in cells})
    needed = next(iter(cells.values())).needed
    yield from (
        "",
        f"## Bytes read over bytes needed, {result.size}, {needed / _MB:.1f} MB",
        "",
        f"By {OURS}, saved at N (rows), loaded at M (columns); in brackets less the rounding to blocks.",
        "",
        f"| N | {' | '.join(map(str, columns))} |",
        "|---" * (len(columns) + 1) + "|",
    )
    for row in sorted({saved_at for saved_at, _ in cells}):
        shown = (_grid_cell(cells.get((row, column))) for column in columns)
        yield f"| {row} | {' | '.join(shown)} |"


def _grid_cell(cell: Grid | None) -> str:
    return f"{cell.ratio:.3f} ({cell.rounded:.4f})" if cell is not None else "-"


def _peer_table(result: BytesResult) -> Iterator[str]:
    theirs = result.cells.get(PEER, [])
    if not theirs:
        return
    ours = {cell.title: cell for cell in result.cells.get(OURS, ())}
    yield from ("", f"| N -> M | {PEER} | {OURS} |", "|---|---|---|")
    for cell in theirs:
        yield f"| {cell.title} | {cell.ratio:.3f} | {_grid_cell(ours.get(cell.title))} |"


def _plan_table(result: PlanResult) -> Iterator[str]:
    reading = statistics.median(result.reads_s) * 1e3
    yield from (
        "",
        f"## What to read, {result.parameters:,} parameters saved by {result.saved_at:,} ranks",
        "",
        f"The manifest has {result.manifest_bytes / _MB:.3f} MB and takes {reading:.1f} ms to parse and "
        "check. Plans of a rank in the middle, from there:",
        "",
        "| loaded by | median, ms | all, ms |",
        "|---|---|---|",
    )
    for ranks, times in result.plans_s.items():
        shown = " ".join(f"{seconds * 1e3:.1f}" for seconds in times)
        yield f"| {ranks:,} | {statistics.median(times) * 1e3:.1f} | {shown} |"


def _failures(failures: dict[str, str]) -> list[str]:
    return [f"\n{name} failed: {reason}" for name, reason in failures.items()]
