"""A job and its life: the states, the one table of allowed moves, and the pure steps between them.

A step takes a job and returns the job after it, with the notes for its timeline. Knows neither the
database nor the cluster nor a clock: the callers store the outcome, tell the cluster, and pass the time
(`now`, Unix seconds).

`pausing` and `cancelling` are wishes: the job stays there until the cluster says that it has stopped,
whatever phases the controller still logs on the way.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from service.errors import ImpossibleResize, WrongState
from workers.goodput import goodput
from workers.reports import Event, RankReport
from workers.spec import JobSpec


class JobState(StrEnum):
    """Where a job is in its life."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    RESIZING = "resizing"
    RECOVERING = "recovering"
    PAUSING = "pausing"
    PAUSED = "paused"
    CANCELLING = "cancelling"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


TERMINAL = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})
"""Nothing happens to the job any more."""

ACTIVE = frozenset({JobState.STARTING, JobState.RUNNING, JobState.RESIZING, JobState.RECOVERING})
"""The job is to make progress on the cluster."""

LIVE = ACTIVE | {JobState.PAUSING, JobState.CANCELLING}
"""The job has, or is about to have, a controller on the cluster."""

_STOPPED = TERMINAL | {JobState.PAUSED}
_FROM_ACTIVE = ACTIVE | _STOPPED | {JobState.PAUSING, JobState.CANCELLING}

TRANSITIONS: Mapping[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.STARTING, JobState.CANCELLED}),
    JobState.STARTING: _FROM_ACTIVE,
    JobState.RUNNING: _FROM_ACTIVE,
    JobState.RESIZING: _FROM_ACTIVE,
    JobState.RECOVERING: _FROM_ACTIVE,
    JobState.PAUSING: _STOPPED | {JobState.CANCELLING},
    JobState.PAUSED: frozenset({JobState.QUEUED, JobState.CANCELLED}),
    JobState.CANCELLING: TERMINAL,
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}
"""What is allowed: from each state, the states it may go to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job as the database knows it. Times are Unix seconds.

    version            counts changes of what is wanted or of the state; progress leaves it alone
    attempt            starts from a checkpoint or from nothing; 0 before the first
    wanted_workers     world size asked for
    workers            world size now; 0 while nothing runs
    generation, step, loss   as last reported by the cluster
    cursor             number of the last entry read from the controller's log
    controller_losses  times the controller was started again since the last checkpoint
    began_at, seen_at  times of the attempt's first phase event and of its last entry; None: there is none
    productive_s       seconds of rank 0 in the attempt's steps that count; those done again count once
    productive_step    the last of these steps
    """

    id: str
    spec: JobSpec
    submitted_by: str
    created_at: float
    updated_at: float
    queued_at: float
    wanted_workers: int
    name: str = ""
    state: JobState = JobState.QUEUED
    reason: str = ""
    version: int = 1
    attempt: int = 0
    workers: int = 0
    generation: int = 0
    step: int = 0
    loss: float | None = None
    finished_at: float | None = None
    cursor: int = 0
    controller_losses: int = 0
    began_at: float | None = None
    seen_at: float | None = None
    productive_s: float = 0.0
    productive_step: int = 0

    @property
    def goodput(self) -> float | None:
        """The part of the attempt's time, up to its last entry, that went into steps that count; or None."""
        if self.began_at is None or self.seen_at is None or not self.productive_s:
            return None
        return goodput(self.productive_s, max(self.seen_at - self.began_at, self.productive_s))


@dataclass(frozen=True, slots=True)
class Note:
    """What the control plane adds to a job's timeline: a `request` of a user, or a change of `state`."""

    kind: str
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A job after a step, and the notes that go with it."""

    job: Job
    notes: tuple[Note, ...] = ()


def submitted(job_id: str, spec: JobSpec, *, who: str, now: float) -> Outcome:
    """A new job, in the queue."""
    job = Job(
        id=job_id,
        name=spec.name,
        spec=spec,
        submitted_by=who,
        created_at=now,
        updated_at=now,
        queued_at=now,
        wanted_workers=spec.workers.wanted,
    )
    return Outcome(job, (_request("submit", who, workers=job.wanted_workers),))


def started(job: Job, *, now: float) -> Outcome:
    """Leave the queue: the next attempt begins. Nothing where the job has left it already."""
    if job.state is not JobState.QUEUED:
        return Outcome(job)
    return _moved(replace(job, attempt=job.attempt + 1), JobState.STARTING, "", now)


def waiting(job: Job, *, reason: str, now: float) -> Outcome:
    """Still in the queue, and why. Nothing where the job has left it, or says so already."""
    if job.state is not JobState.QUEUED or job.reason == reason:
        return Outcome(job)
    note = Note("state", {"from": job.state.value, "to": job.state.value, "reason": reason})
    return Outcome(replace(job, reason=reason, updated_at=now), (note,))


def controller_lost(job: Job, *, cause: str, limit: int, now: float) -> Outcome:
    """A live job turned out to have no controller: what becomes of it.

    An active job starts again from its last checkpoint, at most `limit` times without a new one; a wish to
    stop is fulfilled. Nothing where the job is not live any more.
    """
    if job.state not in LIVE:
        return Outcome(job)
    if job.state is JobState.CANCELLING:
        return _moved(job, JobState.CANCELLED, f"stopped: {cause}", now)
    if job.state is JobState.PAUSING:
        return _moved(job, JobState.PAUSED, f"stopped at the last checkpoint: {cause}", now)
    if job.controller_losses >= limit:
        reason = f"given up after {limit} new starts without a checkpoint (max_controller_losses): {cause}"
        return _moved(job, JobState.FAILED, reason, now)
    again = replace(job, attempt=job.attempt + 1, controller_losses=job.controller_losses + 1, workers=0)
    return _moved(again, JobState.STARTING, f"started again from the last checkpoint: {cause}", now)


def cancelled(job: Job, *, who: str, now: float) -> Outcome:
    """A user wants the job gone. Asking twice is one wish. Raises WrongState once it is over."""
    if job.state in {JobState.CANCELLING, JobState.CANCELLED}:
        return Outcome(job)
    target = JobState.CANCELLING if job.state in LIVE else JobState.CANCELLED
    return _requested(job, target, "cancel", who, now)


def paused(job: Job, *, who: str, now: float) -> Outcome:
    """A user wants the job saved and its workers freed. Raises WrongState unless it is active."""
    if job.state in {JobState.PAUSING, JobState.PAUSED}:
        return Outcome(job)
    return _requested(job, JobState.PAUSING, "pause", who, now)


def resumed(job: Job, *, who: str, now: float) -> Outcome:
    """A user wants a paused job to go on: it queues for its resources. Raises WrongState otherwise."""
    if job.state is not JobState.PAUSED:
        raise _wrong_state(job, "resume", "only a paused job can be resumed")
    return _requested(replace(job, queued_at=now), JobState.QUEUED, "resume", who, now)


def resized(job: Job, workers: int, *, who: str, now: float) -> Outcome:
    """A user wants another world size.

    Raises ImpossibleResize for one the job can never have, WrongState where it is over or stopping.
    """
    if job.state in TERMINAL or job.state in {JobState.CANCELLING, JobState.PAUSING}:
        raise _wrong_state(job, "resize", "a job is resized while it is queued, active or paused")
    check_workers(job.spec, workers)
    if workers == job.wanted_workers:
        return Outcome(job)
    note = _request("resize", who, workers=workers, from_workers=job.wanted_workers)
    return Outcome(replace(job, wanted_workers=workers, updated_at=now), (note,))


def check_workers(spec: JobSpec, workers: int) -> None:
    """Raise ImpossibleResize, with the bound that is broken, unless the job may have so many workers."""
    m, low, high = spec.micro_batches, spec.workers.min, spec.workers.max
    details = {"wanted": workers, "min": low, "max": high, "micro_batches": m}
    if workers > m:
        raise ImpossibleResize(
            f"{workers} workers are more than the {m} micro-batches of a step (global_batch "
            f"{spec.global_batch} / micro_batch {spec.micro_batch}), and each rank needs at least one; "
            f"ask for at most {spec.max_workers}",
            details=details,
        )
    if high is not None and workers > high:
        raise ImpossibleResize(
            f"{workers} workers are more than this job's workers.max of {high}; ask for at most {high}",
            details=details,
        )
    if workers < low:
        raise ImpossibleResize(
            f"{workers} workers are fewer than this job's workers.min of {low}; ask for at least {low}",
            details=details,
        )


def observed(job: Job, entry: Event | RankReport, *, now: float) -> Job:
    """The job after an entry of its controller's log. Entries of a generation that is past change nothing."""
    if entry.generation < job.generation:
        return job
    job = _productive(replace(job, generation=entry.generation, updated_at=now), entry)
    if isinstance(entry, RankReport):
        workers = entry.world_size if job.state in LIVE else job.workers
        return replace(job, step=entry.step, loss=entry.loss, workers=workers)
    match entry.kind:
        case "phase":
            job = _observed_phase(job, entry, now)
        case "resize" | "recovery":
            job = replace(job, workers=int(entry.data["new_workers"]))
        case "checkpoint":
            job = replace(job, controller_losses=0)
        case "resize_refused":
            job = _observed_refusal(job, entry)
    return job


def _productive(job: Job, entry: Event | RankReport) -> Job:
    """Keep the account of time well spent, while the attempt is under way."""
    if entry.type == "event" and entry.kind == "phase":
        if entry.data["attempt"] != job.attempt:
            return job
        if entry.data["phase"] == "starting":
            at = entry.time
            return replace(job, began_at=at, seen_at=at, productive_s=0.0, productive_step=0)
    if job.began_at is None or job.state not in LIVE:
        return job
    job = replace(job, seen_at=max(entry.time, job.seen_at or entry.time))
    if isinstance(entry, Event):
        return _by_the_controllers_account(job, entry)
    if entry.rank or entry.step <= job.productive_step:
        return job
    return replace(job, productive_s=job.productive_s + entry.step_s, productive_step=entry.step)


def _by_the_controllers_account(job: Job, entry: Event) -> Job:
    """Where an event carries `productive_s`: after a recovery, what is done again is taken out of it."""
    known = entry.data.get("productive_s")
    if known is None:
        return job
    step = min(job.productive_step, int(entry.data.get("at_step", job.productive_step)))
    return replace(job, productive_s=float(known), productive_step=step)


def _observed_phase(job: Job, entry: Event, now: float) -> Job:
    target = JobState(entry.data["phase"])
    reason = str(entry.data.get("reason") or "")
    if entry.data["attempt"] != job.attempt:
        return job  # what an attempt that is past went through says nothing of this one
    workers = int(entry.data["workers"])
    if target is job.state:
        return replace(job, reason=reason, workers=workers)
    if target not in TRANSITIONS[job.state]:
        return job  # said before the controller heard of a wish
    return _moved(replace(job, workers=workers), target, reason, now).job


def _observed_refusal(job: Job, entry: Event) -> Job:
    """What could not be had is no longer wanted, unless something else has been asked for since."""
    if job.wanted_workers != entry.data["wanted"]:
        return job
    standing = int(entry.data["workers"])
    return replace(job, wanted_workers=standing) if standing else job


def _moved(job: Job, target: JobState, reason: str, now: float) -> Outcome:
    if target not in TRANSITIONS[job.state]:
        raise _wrong_state(job, f"become {target}", f"from {job.state} it may go to {_named(job.state)}")
    note = Note("state", {"from": job.state.value, "to": target.value, "reason": reason})
    after = replace(
        job,
        state=target,
        reason=reason,
        updated_at=now,
        workers=0 if target in _STOPPED else job.workers,
        finished_at=now if target in TERMINAL else None,
    )
    return Outcome(after, (note,))


def _requested(job: Job, target: JobState, action: str, who: str, now: float) -> Outcome:
    if target not in TRANSITIONS[job.state]:
        raise _wrong_state(job, action, f"from {job.state} it may go to {_named(job.state)}")
    outcome = _moved(job, target, f"{action} asked for by {who}", now)
    return Outcome(outcome.job, (_request(action, who), *outcome.notes))


def _request(action: str, who: str, **values: int) -> Note:
    return Note("request", {"action": action, "who": who, **values})


def _named(state: JobState) -> str:
    return ", ".join(sorted(TRANSITIONS[state])) or "no other state: it is over"


def _wrong_state(job: Job, action: str, why: str) -> WrongState:
    return WrongState(
        f"job {job.id} is {job.state} and cannot {action}: {why}",
        details={"job_id": job.id, "state": job.state.value, "action": action},
    )
