"""What the command line and the demo show: jobs, ranks, plans and events as tables and lines of text.

Turns wire objects and plans into rich's renderables; asks the service nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from api.planning import StagePlans
from api.schemas import CheckpointOut, EventOut, JobOut, NodeOut, PlanOut, ReportOut
from workers.reports import MemoryUse

MEMORY_HEADING = "each rank's throughput, and its memory in MiB (below: as predicted before it started)"
SENT_HEADING = "bytes each rank sent in its newest step, by kind, and by the way they went"

_MIB = 1 << 20
_DECIMAL = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3))
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
    ("replicas", "repl"),
    ("save_copy", "save"),
    ("unattributed", "other"),
)
_TRANSPORTS: Mapping[str, str] = {"shared": "in shared memory", "network": "over network"}
_OPTIONAL = frozenset({"replicas", "save_copy"})
"""Categories that have a column where any rank has bytes of them."""

_BESIDE: Mapping[str, str] = {
    "tile_rounding": " of them, tile rounding",
    "padding": "padding",
    "communication_buffer": "communication buffers",
    "activation": "activations",
    "replicas": "replicas",
    "save_copy": "copy for checkpoints",
}


def jobs_table(jobs: Sequence[JobOut]) -> Table:
    """One line a job."""
    table = Table("job", "name", "state", "workers", "step", "loss", box=None, pad_edge=False)
    for job in jobs:
        workers = f"{job.workers.current}"
        if not job.over and job.workers.current != job.workers.wanted:
            workers += f" (wants {job.workers.wanted})"
        table.add_row(job.id, job.name, state(job), workers, f"{job.step}/{job.steps}", loss(job.loss))
    return table


def nodes_table(nodes: Sequence[NodeOut], *, now: float) -> Table:
    """One line a node. `now`: Unix seconds."""
    table = Table("node", "address", "state", "CPUs free", "GPUs free", "memory free", "jobs (workers)")
    table.box, table.pad_edge = None, False
    for node in nodes:
        said = Text("alive", style="green") if node.alive else Text("gone", style="dim")
        if node.alive and node.draining:
            until = f", {seconds(max(0.0, node.deadline - now))} left" if node.deadline else ""
            said = Text(f"draining{until}", style="yellow")
        table.add_row(
            node.id[:12],
            node.address + (" (head)" if node.head else ""),
            said,
            f"{node.cpus_free:g} of {node.cpus:g}",
            f"{node.gpus_free:g} of {node.gpus:g}",
            f"{size(node.memory_free_bytes)} of {size(node.memory_bytes)}",
            ", ".join(
                f"{one.job} ({' '.join([*one.workers, *(['controller'] if one.controller else [])])})"
                for one in node.jobs
            ),
        )
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
        (
            "goodput",
            "-" if job.goodput is None else f"{job.goodput:.1%} of the time went into steps that count",
        ),
        ("stage", f"{job.spec.zero.stage}, {job.spec.precision}"),
        ("generation", f"{job.generation}, attempt {job.attempt}, version {job.version}"),
        ("checkpoints", ", ".join(f"step {one.step}" for one in saved) or "none"),
    ]
    for name, value in rows:
        facts.add_row(Text(name, style="dim"), value)
    parts: list[RenderableType] = [facts]
    if ranks:
        parts += ["", MEMORY_HEADING, memory_table(ranks)]
        if any(report.bytes_sent for report in ranks):
            parts += ["", SENT_HEADING, sent_table(ranks)]
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
    table.add_column("tokens/s", justify="right", no_wrap=True)
    table.add_column("step", justify="right")
    used = {
        name
        for name, _ in _CATEGORIES
        for report in ranks
        if name not in _OPTIONAL or getattr(report.memory, name) or getattr(report.predicted, name)
    }
    categories = [one for one in _CATEGORIES if one[0] in used]
    for _, heading in categories:
        table.add_column(heading, justify="right")
    table.add_column("resident", justify="right")
    for report in ranks:
        table.add_row(
            str(report.rank),
            f"{report.tokens / report.step_s:,.0f}",
            seconds(report.step_s),
            *(_over(report.memory, report.predicted, name) for name, _ in categories),
            f"{report.resident_bytes / _MIB:,.1f}",
        )
    return table


def sent_table(ranks: Sequence[ReportOut]) -> Table:
    """What each rank sent by kind, and of that through shared memory and over the network."""
    table = Table(box=None, pad_edge=False)
    table.add_column("rank", justify="right")
    kinds = list(dict.fromkeys(kind for report in ranks for kind in report.bytes_sent))
    for heading in (*(kind.replace("_", " ") for kind in kinds), *_TRANSPORTS.values()):
        table.add_column(heading, justify="right")
    for report in ranks:
        sent = [report.bytes_sent.get(kind) for kind in kinds]
        sent += [report.bytes_by_transport.get(name) for name in _TRANSPORTS]
        table.add_row(str(report.rank), *("-" if amount is None else size(amount) for amount in sent))
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
    rows += [("together", plan.per_rank.total), ("the process", plan.process_bytes)]
    for name, size in rows:
        table.add_row(name.replace("_", " "), f"{size / _MIB:,.2f}")
    return Group(*lines, Text(f"{plan.parameters:,} parameters"), table)


def stages_table(plans: StagePlans) -> RenderableType:
    """What each rank would hold and send at every stage; the stage that a job asks for is marked."""
    facts, stages = plans.facts, plans.stages
    degrees = f"{facts['dp']} data-parallel ranks" + (f" x {facts['mp']}" if facts["mp"] > 1 else "")
    about = f"{facts['parameters']:,} parameters, {degrees}, {facts['precision']}, {facts['optimizer']}"
    table = Table(box=None, pad_edge=False)
    table.add_column("largest rank at stage", no_wrap=True)
    for stage in stages:
        own = stage == facts.get("stage")
        table.add_column(f"{stage} (the job's)" if own else f"{stage}", justify="right")
    rows: list[tuple[str, list[str]]] = [
        ("parameters", [size(plan.parameter_bytes) for plan in stages.values()]),
        ("gradients", [size(plan.gradient_bytes) for plan in stages.values()]),
        ("optimizer states", [size(plan.optimizer_bytes) for plan in stages.values()]),
        ("model states", [size(plan.model_state_bytes) for plan in stages.values()]),
    ]
    for name in stages[0].beside:
        rows.append((_BESIDE[name], [size(plan.beside[name]) for plan in stages.values()]))
    if all(plan.total_bytes is not None for plan in stages.values()):
        rows.append(("together", [size(plan.total_bytes or 0) for plan in stages.values()]))
    rows.append(("elements sent a step", [count(plan.wire_elements) for plan in stages.values()]))
    if "device_bytes" in facts:
        cells = [count(plan.largest_model or 0) for plan in stages.values()]
        rows.append((f"largest in {size(facts['device_bytes'])}", cells))
    for name, cells in rows:
        table.add_row(name, *cells)
    return Group(Text(about), *(Text(f"  {note}") for note in plans.notes), table)


def event_line(event: EventOut) -> Text:
    """One event as a line: the step where it happened, what it was, and what matters of it."""
    describe = _EVENTS.get(event.kind)
    said = describe(event.data) if describe else ", ".join(f"{k} {v}" for k, v in event.data.items())
    at = "" if event.step is None else f"step {event.step}"
    style = {
        "error": "red",
        "worker_lost": "yellow",
        "worker_stuck": "yellow",
        "worker_slow": "yellow",
        "drain": "yellow",
        "resize_refused": "yellow",
        "resize": "cyan",
    }
    return Text.assemble((f"{at:>10}  ", "dim"), (event.kind, style.get(event.kind, "bold")), f"  {said}")


def state(job: JobOut) -> Text:
    """The job's state in its colour."""
    return Text(job.state.value, style=_STATE_STYLES.get(job.state.value, ""))


def loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def seconds(value: float) -> str:
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


def count(value: float) -> str:
    """Elements or parameters: all digits while they are few."""
    if value < 10**7:
        return f"{value:,.0f}"
    return f"{value / 1e9:,.2f}e9" if value >= 10**9 else f"{value / 1e6:,.2f}e6"


def size(value: int) -> str:
    """Bytes in decimal units, as the ZeRO paper counts them."""
    unit, divisor = next(((u, d) for u, d in _DECIMAL if abs(value) >= d), ("B", 1))
    return f"{value:,} B" if divisor == 1 else f"{value / divisor:,.2f} {unit}"


def _over(measured: MemoryUse, predicted: MemoryUse, category: str) -> Text:
    seen, expected = getattr(measured, category), getattr(predicted, category)
    return Text.assemble(f"{seen / _MIB:,.2f}\n", (f"{expected / _MIB:,.2f}", "dim"))


def _phases(data: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {seconds(value)}" for name, value in data.get("seconds", {}).items())


def _resize(data: Mapping[str, Any]) -> str:
    why = f": {data['cause']}" if data.get("cause") else ""
    return (
        f"{data['old_workers']} -> {data['new_workers']} workers, paused {seconds(data['pause_s'])} "
        f"({_phases(data)}){_moved(data)}, steps lost {data['steps_lost']}{why}"
    )


def _recovery(data: Mapping[str, Any]) -> str:
    return (
        f"{data['old_workers']} -> {data['new_workers']} workers, paused {seconds(data['pause_s'])}"
        f"{_moved(data)}, steps lost {data['steps_lost']}: {data['cause']}"
    )


def _moved(data: Mapping[str, Any]) -> str:
    """What the change cost beside its time, as far as it was told."""
    said = ""
    if data.get("bytes_moved") is not None:
        said += f", {size(data['bytes_moved'])} moved"
    if data.get("source"):
        said += f", state from {data['source']}"
    if data.get("steps_repeated"):
        said += f", {data['steps_repeated']} steps repeated"
    return said


def _reason(data: Mapping[str, Any]) -> str:
    return f": {data['reason']}" if data.get("reason") else ""


def _refused(data: Mapping[str, Any]) -> str:
    missing = ", ".join(f"{amount:g} {name}" for name, amount in (data.get("missing") or {}).items())
    return f"{data['wanted']} workers{_reason(data)}{f' (missing: {missing})' if missing else ''}"


def _stuck(data: Mapping[str, Any]) -> str:
    if data.get("rank") is None:
        return str(data.get("said", "all ranks wait for each other"))
    end = "; it is treated as dead" if data.get("dead") else ""
    return f"rank {data['rank']} ({data['worker']}) at step {data['step']}: {data.get('said')}{end}"


def _slow(data: Mapping[str, Any]) -> str:
    if data.get("over"):
        return f"rank {data['rank']} ({data['worker']}) keeps up again"
    return (
        f"rank {data['rank']} ({data['worker']}): the others lose {data['share']:.0%} of the step to it, "
        f"{seconds(data['seconds'])}"
    )


def _drain(data: Mapping[str, Any]) -> str:
    workers = ", ".join(data["workers"])
    return f"node {data['node'][:12]}{f' with {workers}' if workers else ''}: {data['said']}"


_EVENTS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "phase": lambda data: f"{data['phase']}{_reason(data)}",
    "state": lambda data: f"{data['from']} -> {data['to']}{_reason(data)}",
    "resize": _resize,
    "resize_refused": _refused,
    "recovery": _recovery,
    "worker_stuck": _stuck,
    "worker_slow": _slow,
    "drain": _drain,
    "worker_lost": lambda data: f"rank {data.get('rank')} ({data.get('worker')}): {data.get('cause')}",
    "checkpoint": lambda data: (
        f"{data['bytes'] / _MIB:,.2f} MiB in {seconds(data['seconds'])} ({data['reason']})"
        + (f", training held up {seconds(data['stall_s'])}" if "stall_s" in data else "")
    ),
    "checkpoint_failed": lambda data: f"step {data['step']} ({data['reason']}): {data['error']}",
    "checkpoint_dropped": lambda data: (
        f"{'one' if data.get('dropped_step') is None else 'step ' + str(data['dropped_step'])}{_reason(data)}"
    ),
    "checkpoint_damaged": lambda data: (
        f"{data['checkpoint']} is passed over{_reason(data)}; going on from step {data['loaded_step']}"
    ),
    "data_restarted": lambda data: str(data["reason"]),
    "error": lambda data: f"rank {data.get('rank')}: {data.get('message')}",
}
