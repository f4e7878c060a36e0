"""What a job will take, computed before anything starts, and whether the cluster has it.

Pure arithmetic over layouts: loads no torch, and asks no one. A user's own model is unknown here until it
runs; then only its CPUs, GPUs and reserved memory are checked, and the plan says so.
"""

from dataclasses import dataclass, replace
from typing import get_args

from service.cluster import ClusterView
from service.errors import ImpossibleResize, InvalidRequest
from service.jobs import check_workers
from service.scheduler import Room, describe, total_room
from workers.engine_config import engine_config, saves_behind
from workers.model_shapes import gpt_activation_bytes, gpt_parameters, gpt_unit_of
from workers.spec import GPTModel, JobSpec, Resources
from zero_core.budget import Budget, predict, save_copy_bytes, tile_rounding, wire_elements
from zero_core.config import Stage, ZeroConfig
from zero_core.layout import Layout, build_layout

PROCESS_BYTES = 300 << 20
"""What a worker process takes on the host before it holds a model: Python, torch and Ray."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one rank will hold at this world size, and whether it fits.

    known          whether the model's parameters are known before it runs
    parameters     psi, tied ones counted once; None where unknown
    per_rank       bytes by category of rank 0, which holds the most; None where unknown
    process_bytes  what a worker takes on the host beside the budget: its process
    fits           whether nothing speaks against it
    reasons        what does, with the numbers
    notes          what could not be checked
    """

    workers: int
    known: bool
    parameters: int | None
    per_rank: Budget | None
    process_bytes: int
    fits: bool
    reasons: tuple[str, ...]
    notes: tuple[str, ...]


def plan(spec: JobSpec, view: ClusterView | None, *, workers: int | None = None, grows: bool = False) -> Plan:
    """The plan at `workers` ranks (default: those wanted at the start), on the cluster as it is.

    `view` is None where the cluster cannot be asked; then only the job itself is looked at. Where the
    cluster `grows`, what its nodes lack is a note: which nodes may yet come is not known here.
    """
    n = workers or spec.workers.wanted
    layout = _layout(spec, n)
    budget = None if layout is None else _budget(spec, layout, engine_config(spec))
    reasons, notes = _own_memory(spec, budget), _unchecked(spec, budget, view)
    if view is not None:
        lacking = _places(spec, n, budget, view)
        if grows:
            notes += [f"the cluster would have to grow: {lack}" for lack in lacking]
        else:
            reasons += lacking
    return Plan(
        workers=n,
        known=budget is not None,
        parameters=None if layout is None else layout.numel(),
        per_rank=budget,
        process_bytes=PROCESS_BYTES,
        fits=not reasons,
        reasons=tuple(reasons),
        notes=tuple(notes),
    )


@dataclass(frozen=True, slots=True)
class StageBudget:
    """What a job would hold and send at one stage.

    largest        bytes by category of rank 0, which holds the most
    tile_rounding  its model states beyond those of an even share, because cuts fall between tiles
    wire           elements a rank sends in a step by kind, on average
    """

    largest: Budget
    tile_rounding: int
    wire: dict[str, float]


@dataclass(frozen=True, slots=True)
class StageBudgets:
    """A job at every stage, whichever it asks for, on so many ranks.

    parameters  psi, tied ones counted once
    notes       why the job could not have so many ranks, if so
    """

    workers: int
    parameters: int
    stages: dict[Stage, StageBudget]
    notes: tuple[str, ...]


def every_stage(spec: JobSpec, *, workers: int | None = None) -> StageBudgets:
    """The job at each stage on `workers` ranks (default: those wanted at the start), over its exact layout.

    Raises InvalidRequest for a user's own model, of which nothing is known before it runs.
    """
    n = workers or spec.workers.wanted
    layout = _layout(spec, n)
    if layout is None:
        raise InvalidRequest(
            f"the model of job {spec.name!r} is its own, and its parameters are known only once it runs; "
            "give their number instead of the file"
        )
    notes: tuple[str, ...] = ()
    try:
        check_workers(spec, n)
    except ImpossibleResize as error:
        notes = (error.message,)
    stages: dict[Stage, StageBudget] = {}
    for stage in get_args(Stage):
        own = engine_config(spec)
        config = replace(own, stage=stage, keep_gathered_bytes=own.keep_gathered_bytes if stage == 3 else 0)
        stages[stage] = StageBudget(
            _budget(spec, layout, config),
            tile_rounding(layout, config, 0),
            wire_elements(layout, config),
        )
    return StageBudgets(n, layout.numel(), stages, notes)


def check_resize(spec: JobSpec, workers: int, view: ClusterView, *, grows: bool = False) -> None:
    """Raise ImpossibleResize, with what is in the way, where the job can never have so many workers there.

    Where the cluster `grows`, that is only what the job's own bounds and reserved memory forbid.
    """
    check_workers(spec, workers)
    found = plan(spec, view, workers=workers, grows=grows)
    if not found.fits:
        raise ImpossibleResize(
            f"the job cannot have {workers} workers: {'; '.join(found.reasons)}",
            details={"wanted": workers, "reasons": list(found.reasons)},
        )


def _layout(spec: JobSpec, workers: int) -> Layout | None:
    model = spec.model
    if not isinstance(model, GPTModel):
        return None
    return build_layout(
        gpt_parameters(model, sequence_length=spec.sequence_length),
        gpt_unit_of(model),
        tile=spec.zero.tile,
        world_size=workers,
    )


def _budget(spec: JobSpec, layout: Layout, config: ZeroConfig) -> Budget:
    copied = save_copy_bytes(layout, config, 0) if saves_behind(spec) else 0
    return predict(layout, config, 0, activation_bytes=_activations(spec), save_copy=copied)


def _activations(spec: JobSpec) -> int:
    assert isinstance(spec.model, GPTModel)
    return gpt_activation_bytes(
        spec.model,
        sequence_length=spec.sequence_length,
        micro_batch=spec.micro_batch,
        precision=spec.precision,
        checkpointing=spec.zero.activation_checkpointing,
    )


def _host_bytes(resources: Resources, budget: Budget | None) -> int:
    """Host memory of one worker; most of its budget lies on the device where it has one."""
    if budget is None:
        return PROCESS_BYTES
    return PROCESS_BYTES + (budget.host_bytes if resources.gpus else budget.total)


def _own_memory(spec: JobSpec, budget: Budget | None) -> list[str]:
    reserved = spec.resources.memory_bytes
    needed = _host_bytes(spec.resources, budget)
    if reserved is None or needed <= reserved:
        return []
    return [
        f"a rank needs {needed:,} bytes ({_parts(budget)}) and resources.memory_bytes reserves "
        f"{reserved:,}; reserve more, ask for more workers or a higher zero.stage"
    ]


def _places(spec: JobSpec, workers: int, budget: Budget | None, view: ClusterView) -> list[str]:
    """What stands against so many workers on these nodes, were they otherwise empty."""
    resources, nodes = spec.resources, total_room(view)
    places = sum(room.workers(resources) for room in nodes)
    if workers > places:
        return [
            f"{describe(spec, workers)} are more than the cluster's {len(nodes)} nodes have: "
            f"{_listed(nodes)}; there is place for {places}"
        ]
    needed = _host_bytes(resources, budget)
    roomy = sum(min(room.workers(resources), int(room.memory_bytes // needed)) for room in nodes)
    if workers > roomy:
        return [
            f"{workers} ranks of {needed:,} bytes each ({_parts(budget)}) are more than the memory "
            f"of the cluster's {len(nodes)} nodes: {_listed(nodes)}; there is memory for {roomy}; "
            "a higher zero.stage or a smaller micro_batch takes less"
        ]
    return []


def _unchecked(spec: JobSpec, budget: Budget | None, view: ClusterView | None) -> list[str]:
    notes = []
    if budget is None:
        notes.append("the model is the job's own: its memory is known only once it runs")
    if spec.resources.gpus:
        notes.append("the memory of the GPUs is not known before the job runs and was not checked")
    if view is None:
        notes.append("the cluster could not be asked: whether it has the places was not checked")
    return notes


def _parts(budget: Budget | None) -> str:
    if budget is None:
        return f"process {PROCESS_BYTES:,}, the model unknown"
    return (
        f"parameters {budget.parameters:,}, gradients {budget.gradients:,}, "
        f"optimizer states {budget.optimizer_states:,}, buffers {budget.communication_buffers:,}, "
        f"activations {budget.activations:,}, padding {budget.padding:,}, replicas {budget.replicas:,}, "
        f"copy for checkpoints {budget.save_copy:,}, process {PROCESS_BYTES:,}"
    )


def _listed(nodes: list[Room]) -> str:
    """The nodes' size, equal ones together, at most four kinds."""
    kinds: dict[str, int] = {}
    for room in nodes:
        kind = f"{room.cpus:g} CPUs, {room.gpus:g} GPUs, {int(room.memory_bytes):,} bytes"
        kinds[kind] = kinds.get(kind, 0) + 1
    shown = [f"{count} x ({kind})" for kind, count in list(kinds.items())[:4]]
    return ", ".join(shown + (["..."] if len(kinds) > 4 else [])) or "none"
