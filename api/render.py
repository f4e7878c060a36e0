"""What the command line and the demo show: jobs, ranks, plans and events as tables and lines of text.

Turns wire objects into rich's renderables; asks the service nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from api.schemas import CheckpointOut, EventOut, JobOut, PlanOut, ReportOut
from workers.reports import MemoryUse

MEMORY_HEADING = "each rank's throughput, and its memory in MiB (below: as predicted before it started)"

_MIB = 1 << 20
_STATE_STYLES = {
    "succeeded": "green",
    "running": "green",
    "failed": "bold red",
    "cancelled": "dim",
    "resizing": "cyan",
    "recovering": "yellow",
}
_CATEGORIES: tuple[tuple[str, str], ...] = (
    ("parameters", "params"),
    ("gradients", "grads"),
    ("optimizer_states", "optim"),
    ("communication_buffers", "comm"),
    ("activations", "activ"),
    ("padding", "pad"),
    ("unattributed", "other"),
)


def jobs_table(jobs: Sequence[JobOut]) -> Table:
    """One line a job."""
    table = Table("job", "name", "state", "workers", "step", "loss", box=None, pad_edge=False)
    for job in jobs:
        workers = f"{job.workers.current}"
        if not job.over and job.workers.current != job.workers.wanted:
            workers += f" (wants {job.workers.wanted})"
        table.add_row(job.id, job.name, state(job), workers, f"{job.step}/{job.steps}", loss(job.loss))
    return table


def job_details(
    job: JobOut, ranks: Sequence[ReportOut], saved: Sequence[CheckpointOut], events: Sequence[EventOut]
) -> RenderableType:
    """All about one job."""
    facts = Table.grid(padding=(0, 2))
    workers = job.workers
    rows: list[tuple[str, RenderableType]] = [
        ("job", job.id),
        ("name", job.name),
        ("state", Text.assemble(state(job), f"  {job.reason}" if job.reason else "")),
        ("workers", f"{workers.current} (wanted {workers.wanted}, from {workers.min} to {workers.max})"),
        ("step", f"{job.step} of {job.steps}, loss {loss(job.loss)}"),
        ("stage", f"{job.spec.zero.stage}, {job.spec.precision}"),
        ("generation", f"{job.generation}, attempt {job.attempt}, version {job.version}"),
        ("checkpoints", ", ".join(f"step {one.step}" for one in saved) or "none"),
    ]
    for name, value in rows:
        facts.add_row(Text(name, style="dim"), value)
    parts: list[RenderableType] = [facts]
    if ranks:
        parts += ["", MEMORY_HEADING, memory_table(ranks)]
    if events:
        parts += ["", *(event_line(event) for event in events)]
    return Group(*parts)


def memory_table(ranks: Sequence[ReportOut]) -> Table:
    """Each rank's throughput, and its memory in MiB by category: measured, and predicted below it."""
    table = Table(
        box=None,
        pad_edge=False,
    )
    table.add_column("rank", justify="right")
    table.add_column("tokens/s", justify="right")
    table.add_column("step", justify="right")
    for _, heading in _CATEGORIES:
        table.add_column(heading, justify="right")
    table.add_column("resident", justify="right")
    for report in ranks:
        table.add_row(
            str(report.rank),
            f"{report.tokens / report.step_s:,.0f}",
            seconds(report.step_s),
            *(_over(report.memory, report.predicted, name) for name, _ in _CATEGORIES),
            f"{report.resident_bytes / _MIB:,.1f}",
        )
    return table


def plan_table(plan: PlanOut) -> RenderableType:
    """What each rank would hold, and whether it fits."""
    verdict = Text("fits", style="green") if plan.fits else Text("does not fit", style="bold red")
    lines: list[RenderableType] = [Text.assemble(f"{plan.workers} workers: ", verdict)]
    lines += [Text(f"  {said}") for said in (*plan.reasons, *plan.notes)]
    if plan.per_rank is None:
        return Group(*lines)
    table = Table("each rank", Column("MiB", justify="right"), box=None, pad_edge=False)
    rows = [(name, getattr(plan.per_rank, name)) for name, _ in _CATEGORIES[:-1]]
    rows += [("together", plan.per_rank.total), ("the process itself", plan.process_bytes)]
    for name, size in rows:
        table.add_row(name.replace("_", " "), f"{size / _MIB:,.2f}")
    return Group(*lines, Text(f"{plan.parameters:,} parameters"), table)


def event_line(event: EventOut) -> Text:
    """One event as a line: the step where it happened, what it was, and what matters of it."""
    describe = _EVENTS.get(event.kind)
    said = describe(event.data) if describe else ", ".join(f"{k} {v}" for k, v in event.data.items())
    at = "" if event.step is None else f"step {event.step}"
    style = {"error": "red", "worker_lost": "yellow", "resize_refused": "yellow", "resize": "cyan"}
    return Text.assemble((f"{at:>10}  ", "dim"), (event.kind, style.get(event.kind, "bold")), f"  {said}")


def state(job: JobOut) -> Text:
    """The job's state in its colour."""
    return Text(job.state.value, style=_STATE_STYLES.get(job.state.value, ""))


def loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def seconds(value: float) -> str:
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


def _over(measured: MemoryUse, predicted: MemoryUse, category: str) -> Text:
    seen, expected = getattr(measured, category), getattr(predicted, category)
    return Text.assemble(f"{seen / _MIB:,.2f}\n", (f"{expected / _MIB:,.2f}", "dim"))


def _phases(data: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {seconds(value)}" for name, value in data.get("seconds", {}).items())


def _resize(data: Mapping[str, Any]) -> str:
    return (
        f"{data['old_workers']} -> {data['new_workers']} workers, paused {seconds(data['pause_s'])} "
        f"({_phases(data)}), steps lost {data['steps_lost']}"
    )


def _recovery(data: Mapping[str, Any]) -> str:
    return (
        f"{data['old_workers']} -> {data['new_workers']} workers, paused {seconds(data['pause_s'])}, "
        f"steps lost {data['steps_lost']}: {data['cause']}"
    )


def _reason(data: Mapping[str, Any]) -> str:
    return f": {data['reason']}" if data.get("reason") else ""


_EVENTS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "phase": lambda data: f"{data['phase']}{_reason(data)}",
    "state": lambda data: f"{data['from']} -> {data['to']}{_reason(data)}",
    "resize": _resize,
    "resize_refused": lambda data: f"{data['wanted']} workers{_reason(data)}",
    "recovery": _recovery,
    "worker_lost": lambda data: f"rank {data.get('rank')} ({data.get('worker')}): {data.get('cause')}",
    "checkpoint": lambda data: (
        f"{data['bytes'] / _MIB:,.2f} MiB in {seconds(data['seconds'])} ({data['reason']})"
    ),
    "error": lambda data: f"rank {data.get('rank')}: {data.get('message')}",
}
