"""The JSON of the API: one model for each thing that is sent, and the only place that makes them.

Both ends share it: the routes build these from the service's objects, the client reads them back. Times
are Unix seconds. Unknown members are passed over on reading, so that a client may be older than its service.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from service.jobs import TERMINAL, JobState
from workers.reports import RankReport
from workers.spec import JobSpec

if TYPE_CHECKING:  # the client reads these models without loading the database's and the planner's code
    from collections.abc import Sequence

    from service.checkpoints import Exported, Verified
    from service.control_plane import NodeUse, Readiness
    from service.jobs import Job
    from service.logs import LogTail
    from service.planner import Plan
    from service.store import JobPage, TimelineEntry
    from zero_core.checkpoint.manifest import CheckpointInfo, Unusable

WHO_HEADER = "x-requested-by"
"""Optional request header: a name for the record of who asked. A label, no identity: the token is shared."""

MAX_ID = 2**63 - 1
"""Largest id that the database holds."""


class _Wire(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class WorkersOut(_Wire):
    """The job's world size and its bounds."""

    wanted: int
    current: int = Field(description="World size now; 0 while nothing runs.")
    min: int
    max: int = Field(description="Largest world size: workers.max, or the number of micro-batches.")


class JobOut(_Wire):
    """A job as it is now."""

    id: str
    name: str
    state: JobState
    reason: str = Field(description="Why it is in this state, for people; often empty.")
    version: int = Field(description="Counts changes of the state and of what is wanted; for If-Match.")
    attempt: int
    workers: WorkersOut
    generation: int
    step: int = Field(description="Steps finished.")
    steps: int = Field(description="Steps in all.")
    loss: float | None = Field(description="Loss of the last finished step.")
    goodput: float | None = Field(
        None,
        description="The part of the attempt's time, up to its last report or event, that went into steps "
        "that count, 0 to 1; steps that were done again count once. Null before the first step.",
    )
    submitted_by: str
    created_at: float
    updated_at: float
    finished_at: float | None
    spec: JobSpec

    @classmethod
    def of(cls, job: Job) -> Self:
        return cls(
            id=job.id,
            name=job.name,
            state=job.state,
            reason=job.reason,
            version=job.version,
            attempt=job.attempt,
            workers=WorkersOut(
                wanted=job.wanted_workers,
                current=job.workers,
                min=job.spec.workers.min,
                max=job.spec.max_workers,
            ),
            generation=job.generation,
            step=job.step,
            steps=job.spec.steps,
            loss=job.loss,
            goodput=job.goodput,
            submitted_by=job.submitted_by,
            created_at=job.created_at,
            updated_at=job.updated_at,
            finished_at=job.finished_at,
            spec=job.spec,
        )

    @property
    def over(self) -> bool:
        """Whether nothing happens to the job any more."""
        return self.state in TERMINAL


class JobPageOut(_Wire):
    """Jobs, newest first, and the cursor of the next page; null on the last."""

    jobs: list[JobOut]
    next_cursor: str | None

    @classmethod
    def of(cls, page: JobPage) -> Self:
        return cls(jobs=[JobOut.of(job) for job in page.jobs], next_cursor=page.next_cursor)


class ResizeIn(BaseModel):
    """A change of a job: the world size that is wanted."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    workers: int = Field(gt=0, le=1_000_000, strict=True, description="World size wanted from now on.")


class EventOut(_Wire):
    """Something that happened to a job."""

    id: int = Field(description="Place in the timeline, growing; what `after` counts in.")
    seq: int | None = Field(description="Number in the controller's log; null for the control plane's own.")
    time: float
    kind: str
    rank: int | None
    generation: int
    step: int | None
    data: dict[str, Any]

    @classmethod
    def of(cls, entry: TimelineEntry) -> Self:
        return cls(
            id=entry.id,
            seq=entry.seq,
            time=entry.time,
            kind=entry.kind,
            rank=entry.rank,
            generation=entry.generation,
            step=entry.step,
            data=entry.body,
        )


class EventsOut(_Wire):
    """A page of a job's events, oldest first, and the `after` of the next page."""

    events: list[EventOut]
    next_after: int

    @classmethod
    def of(cls, entries: list[TimelineEntry], after: int) -> Self:
        return cls(events=[EventOut.of(entry) for entry in entries], next_after=_next(entries, after))


class ReportOut(RankReport):
    """One rank's account of one finished step, with its place in the timeline."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    id: int

    @classmethod
    def of(cls, entry: TimelineEntry) -> Self:
        return cls(id=entry.id, **entry.body)


class RanksOut(_Wire):
    """The newest report of each rank of the current generation, by rank."""

    ranks: list[ReportOut]

    @classmethod
    def of(cls, entries: list[TimelineEntry]) -> Self:
        return cls(ranks=[ReportOut.of(entry) for entry in entries])


class RankHistoryOut(_Wire):
    """A page of one rank's reports, oldest first, and the `after` of the next page."""

    reports: list[ReportOut]
    next_after: int

    @classmethod
    def of(cls, entries: list[TimelineEntry], after: int) -> Self:
        return cls(reports=[ReportOut.of(entry) for entry in entries], next_after=_next(entries, after))


class LogOut(_Wire):
    """The last lines of one worker's log."""

    worker: str
    lines: list[str]
    truncated: bool = Field(description="Whether there is more before them.")

    @classmethod
    def of(cls, tail: LogTail) -> Self:
        return cls(worker=tail.worker, lines=list(tail.lines), truncated=tail.truncated)


class LogsOut(_Wire):
    """The ends of the workers' logs."""

    logs: list[LogOut]

    @classmethod
    def of(cls, tails: list[LogTail]) -> Self:
        return cls(logs=[LogOut.of(tail) for tail in tails])


class CheckpointOut(_Wire):
    """One committed checkpoint."""

    step: int
    generation: int
    bytes: int
    created: float
    world_size: int
    stage: int
    path: str = Field(description="Its folder or address, as the service sees it.")

    @classmethod
    def of(cls, info: CheckpointInfo) -> Self:
        return cls(
            step=info.step,
            generation=info.generation,
            bytes=info.bytes,
            created=info.created,
            world_size=info.world_size,
            stage=info.stage,
            path=info.location,
        )


class UnusableOut(_Wire):
    """A committed checkpoint that cannot be loaded."""

    step: int
    generation: int
    path: str = Field(description="Its folder or address, as the service sees it.")
    what: str = Field(description="What is wrong with it; 'verify' tells more.")

    @classmethod
    def of(cls, found: Unusable) -> Self:
        return cls(step=found.step, generation=found.generation, path=found.location, what=found.what)


class CheckpointsOut(_Wire):
    """A job's committed checkpoints, newest last."""

    checkpoints: list[CheckpointOut]
    unusable: list[UnusableOut] = Field(
        default_factory=list,
        description="Those that a look at manifest and sizes shows to be damaged. Bits are not looked at.",
    )

    @classmethod
    def of(cls, infos: Sequence[CheckpointInfo], unusable: Sequence[Unusable]) -> Self:
        return cls(
            checkpoints=[CheckpointOut.of(info) for info in infos],
            unusable=[UnusableOut.of(found) for found in unusable],
        )


class DamageOut(_Wire):
    """Bytes [start, stop) of a file of a checkpoint that are not what was written."""

    file: str
    start: int
    stop: int
    what: str


class VerifyOut(_Wire):
    """A checkpoint that was read whole, and what was found."""

    step: int
    generation: int
    bytes: int
    path: str
    whole: bool = Field(description="Whether every byte is as it was written.")
    damage: list[DamageOut]
    seconds: float

    @classmethod
    def of(cls, verified: Verified) -> Self:
        return cls(
            step=verified.step,
            generation=verified.generation,
            bytes=verified.bytes,
            path=verified.location,
            whole=not verified.damage,
            damage=[DamageOut(**asdict(one)) for one in verified.damage],
            seconds=verified.seconds,
        )


class ExportIn(BaseModel):
    """How parameters are exported. Where to is not said: it is the job's own folder."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dtype: Literal["master", "fp32", "bf16", "fp16"] = Field(
        "master",
        description="Of floating-point parameters; master: as they are stored, fp32. Others keep theirs.",
    )
    max_shard_bytes: int = Field(
        5_000_000_000,
        ge=1024,
        le=MAX_ID,
        description="Most bytes of parameters in one file; a single larger parameter has a file to itself.",
    )


class ExportOut(_Wire):
    """Exported parameters: a folder, as the service sees it, the names of its files, and their bytes."""

    step: int
    generation: int
    folder: str
    files: list[str]
    bytes: int
    seconds: float

    @classmethod
    def of(cls, exported: Exported) -> Self:
        return cls(
            step=exported.info.step,
            generation=exported.info.generation,
            folder=str(exported.folder),
            files=list(exported.files),
            bytes=exported.bytes,
            seconds=exported.seconds,
        )


class NodeJobOut(_Wire):
    """A job that is on a node, with workers or with its controller."""

    job: str = Field(description="Id of the job.")
    workers: list[str] = Field(description="Names of its workers there.")
    controller: bool = Field(False, description="Whether its controller is there.")


class NodeOut(_Wire):
    """One machine of the cluster: what it has, what is free of it, and who is on it."""

    id: str
    address: str
    alive: bool
    cpus: float
    cpus_free: float
    gpus: float
    gpus_free: float
    memory_bytes: int
    memory_free_bytes: int
    head: bool = Field(False, description="Whether the cluster ends with it; it cannot be drained.")
    draining: bool = Field(False, description="Whether it gets no new work, and jobs move off it.")
    deadline: float | None = Field(None, description="When a draining node may be gone; null: not said.")
    jobs: list[NodeJobOut] = Field(
        default_factory=list, description="Live jobs that are there, as seen within the last seconds."
    )

    @classmethod
    def of(cls, use: NodeUse) -> Self:
        jobs = [
            NodeJobOut(job=one.job_id, workers=list(one.workers), controller=one.controller)
            for one in use.jobs
        ]
        return cls(**asdict(use.node), jobs=jobs)


class NodesOut(_Wire):
    """The cluster's machines."""

    nodes: list[NodeOut]

    @classmethod
    def of(cls, used: list[NodeUse]) -> Self:
        return cls(nodes=[NodeOut.of(use) for use in used])


class DrainIn(BaseModel):
    """A node is to be taken away: why, and when."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    reason: str = Field("asked for", min_length=1, max_length=200, description="For people.")
    deadline_s: float | None = Field(
        None,
        gt=0,
        le=30 * 86_400,
        allow_inf_nan=False,
        description="Seconds from now until it may be gone; null: whenever its jobs have left it.",
    )


class BudgetOut(_Wire):
    """Bytes that one rank will hold, by category."""

    parameters: int
    gradients: int
    optimizer_states: int
    communication_buffers: int
    activations: int
    padding: int
    replicas: int = Field(description="Copies of the rank's states in host memory, for when it is lost.")
    save_copy: int = Field(
        description="Copy of its states in host memory, from which checkpoints are written while it trains."
    )
    total: int


class PlanOut(_Wire):
    """What each rank of a job will hold, and whether the cluster has room for it."""

    workers: int = Field(description="World size that was planned for: the one wanted at the start.")
    known: bool = Field(description="Whether the model's parameters are known before it runs.")
    parameters: int | None = Field(description="Parameters of the model, tied ones once; null where unknown.")
    per_rank: BudgetOut | None = Field(description="Of rank 0, which holds the most; null where unknown.")
    process_bytes: int = Field(description="What a worker's process takes on the host beside that.")
    fits: bool = Field(description="Whether nothing speaks against it.")
    reasons: list[str] = Field(description="What speaks against it, with the numbers.")
    notes: list[str] = Field(description="What could not be checked.")

    @classmethod
    def of(cls, plan: Plan) -> Self:
        budget = plan.per_rank
        return cls(
            workers=plan.workers,
            known=plan.known,
            parameters=plan.parameters,
            per_rank=None if budget is None else BudgetOut.model_validate(budget, from_attributes=True),
            process_bytes=plan.process_bytes,
            fits=plan.fits,
            reasons=list(plan.reasons),
            notes=list(plan.notes),
        )


class ProblemOut(_Wire):
    """An error (RFC 9457). Further members hold the values seen."""

    type: str
    title: str
    status: int
    detail: str = Field(description="What failed, the values seen, and what to change; for people.")
    code: str = Field(description="Stable, for programs.")
    instance: str = Field(description="Path of the request.")
    errors: list[dict[str, str]] | None = Field(
        None, description="Of an invalid request or specification: each field, what is wrong, the value."
    )


class HealthOut(_Wire):
    """The process answers."""

    status: Literal["ok"] = "ok"


class ReadinessOut(_Wire):
    """Whether the service can do its work, and how each thing it needs stands."""

    ok: bool
    checks: dict[str, str]

    @classmethod
    def of(cls, readiness: Readiness) -> Self:
        return cls(ok=readiness.ok, checks=readiness.checks)


def _next(entries: list[TimelineEntry], after: int) -> int:
    return entries[-1].id if entries else after
