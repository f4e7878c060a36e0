"""The dated table of the elastic benchmark: figures in, Markdown out."""

import importlib.metadata
import statistics
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.elastic_bars import verdicts
from benchmarks.elastic_results import OURS, PEER, ReplicaResult, SizeResult
from benchmarks.elastic_timeline import CHANGES, GROW, KILL, SHRINK, Change
from benchmarks.first_touch import Touched
from benchmarks.report import machine

_METHOD = """\
Each round runs every contestant once on one local Ray cluster: a job of four workers goes to two (shrink),
back to four (grow), and loses one to SIGKILL. Pause: from the end of the old group's last step to the start
of the new group's first. Kill: from the signal to the end of the first step that had not been completed
before. Both from times that the ranks of both contestants write down with each step; where ranks differ, the
latest counts. Ray Train is changed right after a checkpoint. Medians over rounds; ratios within a round."""
_MB = 1e6


def render(
    sizes: Sequence[SizeResult],
    replicas: ReplicaResult | None,
    *,
    large: str,
    when: str,
    command: str,
    touched: Touched,
    absent: Mapping[str, str],
) -> str:
    """The whole page; its last lines are the bars."""
    peer = f"Ray {importlib.metadata.version('ray')}"
    lines = [f"# Resizes, recoveries and replicas, {when}", "", *machine(peer, touched)]
    lines += [f"Command: `{command}`", ""]
    lines += _METHOD.splitlines()
    for result in sizes:
        lines += [*_table(result), *_phases(result), *_bytes_table(result), *_failures(result)]
    if replicas is not None:
        lines += _replica_table(replicas)
    lines += ["", "## Bars", ""]
    found = verdicts(sizes, replicas, large=large, absent=absent)
    lines += [f"- {verdict.line()}" for verdict in found]
    return "\n".join(lines) + "\n"


def _table(result: SizeResult) -> Iterator[str]:
    yield from (
        "",
        f"## {result.size}",
        "",
        "| change | contestant | workers | median, s | rounds, s | steps repeated | others' cores before |",
        "|---|---|---|---|---|---|---|",
    )
    for kind in CHANGES:
        for name in (OURS, PEER):
            changes = result.changes(name, kind)
            if changes:
                busy = " ".join(f"{r.busy_cores:.1f}" for r in result.rounds[name])
                yield f"| {kind} | {name} | {' | '.join(_cells(changes))} | {busy} |"


def _cells(changes: Sequence[Change]) -> Iterator[str]:
    yield " ".join(sorted({f"{change.old_workers}->{change.new_workers}" for change in changes}))
    yield f"{statistics.median(change.seconds for change in changes):.3f}"
    yield " ".join(f"{change.seconds:.3f}" for change in changes)
    yield " ".join(str(change.steps_repeated) for change in changes)


def _phases(result: SizeResult) -> list[str]:
    """What the events of this repository say of the same changes."""
    told = {k: [c.event for c in result.changes(OURS, k) if c.event] for k in (SHRINK, GROW, KILL)}
    names: list[str] = []
    for events in told.values():
        for event in events:
            names += [phase for phase in event["seconds"] if phase not in names]
    if not names:
        return []
    lines = ["", f"What {OURS}'s events say of them, medians, milliseconds:", ""]
    lines += [f"| change | source | pause | {' | '.join(names)} |", "|---" * (len(names) + 3) + "|"]
    for kind, events in told.items():
        if not events:
            continue
        sources = " ".join(sorted({event.get("source", "not told") for event in events}))
        spent = [[event["seconds"].get(phase, 0.0) for event in events] for phase in names]
        times = [[event["pause_s"] for event in events], *spent]
        cells = " | ".join(f"{statistics.median(values) * 1e3:.0f}" for values in times)
        lines.append(f"| {kind} | {sources} | {cells} |")
    return lines


def _bytes_table(result: SizeResult) -> list[str]:
    rows = []
    for kind in CHANGES:
        for change in result.changes(OURS, kind):
            if "bytes_moved" in change.event:
                moved, needed = change.event["bytes_moved"], change.event["bytes_needed"]
                own = result.bytes_needed.get(kind)
                shown = f"{own / _MB:.3f}" if own is not None else "-"
                rows.append(f"| {kind} | {moved / _MB:.3f} | {needed / _MB:.3f} | {shown} |")
    if not rows:
        return []
    head = [
        "| change | moved, MB | needed by the event, MB | needed by the layout, MB |",
        "|---|---|---|---|",
    ]
    return ["", "Bytes of each round, all ranks:", "", *head, *rows]


def _failures(result: SizeResult) -> list[str]:
    return [f"\n{name} failed: {reason}" for name, reason in result.failures.items()]


def _replica_table(result: ReplicaResult) -> Iterator[str]:
    with_ms, without_ms = ([f"{s * 1e3:.0f}" for s in turns] for turns in (result.with_s, result.without_s))
    yield from (
        "",
        f"## Replicas, {result.size}, N = 4, stage 2",
        "",
        "Two engines in the same ranks take turns.",
        "",
        "| replica | median ms a step | turns, ms | seconds of a step | MB sent a step | MB held |",
        "|---|---|---|---|---|---|",
    )
    on = (result.seconds, result.bytes_sent, result.held_bytes)
    for name, turns, figures, times in (
        ("every step", with_ms, on, result.with_s),
        ("off", without_ms, result.off, result.without_s),
    ):
        seconds, sent, held = figures
        yield (
            f"| {name} | {statistics.median(times) * 1e3:.0f} | {' '.join(turns)} | {seconds:.4f} "
            f"| {sent / _MB:.1f} | {held / _MB:.1f} |"
        )
