"""Makes the cluster agree with the database: starts the queued, starts again the lost, ends what is over.

All starts and ends of controllers happen here, in one thread, so that none of them can overtake another.
What is to be done is decided by the pure functions of `service.scheduler` and `service.jobs` and by
`reminder` below; this shell only does it. Safe to repeat from any point after a crash of the service.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from service.changes import Changes
from service.cluster import Cluster, ControllerStatus
from service.collector import Collector
from service.errors import ControllerGone, NotFound, ServiceError
from service.jobs import ACTIVE, LIVE, Job, JobState, Outcome, controller_lost, started, waiting
from service.journal import logger
from service.scheduler import decide
from service.store import Store
from workers.spec import JobSpec

_log = logger(__name__)

_LONGEST_PAUSE_S = 30.0

_GOING = frozenset({"starting", "running", "resizing", "recovering"})
"""Phases in which a controller is not on its way to an end."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """A controller that did not start: why, and when (monotonic seconds) the next try may come."""

    text: str
    not_before: float


class Keeper:
    """`round` is one comparison of the database with the cluster, and what follows from it."""

    def __init__(
        self,
        store: Store,
        cluster: Cluster,
        collector: Collector,
        changes: Changes,
        *,
        clock: Callable[[], float],
        max_controller_losses: int,
        status_interval_s: float,
        cluster_grows: bool = False,
        resolved: Callable[[JobSpec], JobSpec] = lambda spec: spec,
    ) -> None:
        """cluster_grows: see `service.scheduler`; resolved: the specification as a controller gets it."""
        self._store = store
        self._cluster = cluster
        self._collector = collector
        self._changes = changes
        self._clock = clock
        self._max_controller_losses = max_controller_losses
        self._status_interval_s = status_interval_s
        self._cluster_grows = cluster_grows
        self._resolved = resolved
        self._next_status = 0.0
        self._failures: dict[str, _Failure] = {}
        self._silent: set[str] = set()
        self._accounts: dict[str, ControllerStatus] = {}

    @property
    def accounts(self) -> Mapping[str, ControllerStatus]:
        """What each live job's controller said of itself when it was last asked."""
        return self._accounts

    def round(self) -> None:
        """Raises ClusterUnavailable where the cluster cannot be reached; one job's trouble is only logged."""
        self._cluster.connect()
        present = self._cluster.running_jobs()
        live = {job.id: job for job in self._store.in_states(LIVE)}
        self._accounts = {job_id: said for job_id, said in self._accounts.items() if job_id in live}
        for job_id in sorted(present - live.keys()):
            self._guarded(job_id, self._release)
        for job in live.values():
            if job.id not in present:
                self._guarded(job.id, self._start_again)
        if time.monotonic() >= self._next_status:
            self._next_status = time.monotonic() + self._status_interval_s
            for job_id in sorted(live.keys() & present):
                self._guarded(job_id, self._look_after)
        self._start_queued()

    def _start_queued(self) -> None:
        queued = self._store.in_states(frozenset({JobState.QUEUED}))
        if not queued:
            return
        live, view = self._store.in_states(LIVE), self._cluster.view()
        decision = decide(queued, live, view, grows=self._cluster_grows)
        told = {job.id: job.reason for job in queued}
        for job_id, reason in decision.waiting.items():
            if reason != told[job_id]:
                self._change(job_id, partial(waiting, reason=reason, now=self._clock()))
        for job_id in decision.start:
            self._guarded(job_id, self._start)

    def _start(self, job_id: str) -> None:
        job = self._change(job_id, partial(started, now=self._clock()))
        if job.state is JobState.STARTING:
            self._launch(job)

    def _start_again(self, job_id: str) -> None:
        """The job is live, its controller is not there. Its log file may still tell how it ended."""
        job = self._store.get(job_id)
        failure = self._failures.get(job_id)
        if failure is not None and job.state in ACTIVE and time.monotonic() < failure.not_before:
            return
        job = self._collector.drain_file(job)
        lost = partial(
            controller_lost,
            cause=failure.text if failure else "its controller was gone",
            limit=self._max_controller_losses,
            now=self._clock(),
        )
        after = self._change(job_id, lost)
        _log.warning("a job had no controller", job=job_id, was=job.state.value, state=after.state.value)
        if after.state is JobState.STARTING:
            self._launch(after)
        else:
            self._failures.pop(job_id, None)

    def _launch(self, job: Job) -> None:
        _log.info("starting a job", job=job.id, attempt=job.attempt, workers=job.wanted_workers)
        try:
            spec = self._resolved(job.spec)
            self._cluster.start_job(job.id, spec, attempt=job.attempt, wanted=job.wanted_workers)
        except ServiceError as error:
            pause_s = min(2.0**job.controller_losses, _LONGEST_PAUSE_S)
            text = f"its controller did not start: {error}"
            self._failures[job.id] = _Failure(text, time.monotonic() + pause_s)
            raise
        self._failures.pop(job.id, None)

    def _release(self, job_id: str) -> None:
        """A controller whose job is over, paused, or none of ours: read it to its end, then end it."""
        try:
            job = self._store.get(job_id)
        except NotFound:
            _log.warning("a controller of no known job is ended", job=job_id)
        else:
            if job.state in LIVE:
                return  # started meanwhile
            self._collector.drain(job)
        self._cluster.release(job_id)
        _log.info("controller ended", job=job_id)

    def _look_after(self, job_id: str) -> None:
        """Give a controller its orders again where it does not follow them: the first may have been lost.

        One that belongs to an attempt that is past, or is over without having logged it, is ended; the next
        round finds the job without a controller and goes on from there.
        """
        status, job = self._cluster.status(job_id), self._store.get(job_id)
        self._accounts[job_id] = status
        over = status.phase not in _GOING and status.phase != "pausing" and status.last_seq == job.cursor
        silent = over and job.state in LIVE
        # Twice, as a controller is over for a moment before its log says so.
        if status.attempt != job.attempt or (silent and job_id in self._silent):
            _log.error("a controller is of no use and is ended", job=job_id, status=status)
            self._cluster.release(job_id)
        elif (order := reminder(job, status)) is not None:
            _log.info("a controller is reminded", job=job_id, order=order)
            self._cluster.command(job_id, order)
        (self._silent.add if silent else self._silent.discard)(job_id)

    def _change(self, job_id: str, step: Callable[[Job], Outcome]) -> Job:
        job = self._store.change(job_id, step, now=self._clock())
        self._changes.ring(job_id)
        return job

    def _guarded(self, job_id: str, act: Callable[[str], None]) -> None:
        """Do something about one job; its trouble is logged and comes up again in the next round."""
        try:
            act(job_id)
        except ControllerGone:
            return  # lost between the look and the deed: the next round sees it
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            _log.error("a job could not be looked after", job=job_id, doing=act.__name__, error=text)


def reminder(job: Job, status: ControllerStatus) -> dict[str, Any] | None:
    """The command that the controller seems to have missed, if any. Pure.

    Only said once all of its log is stored, so that what it has refused or done already is known.
    """
    if status.last_seq != job.cursor or status.phase not in _GOING:
        return None
    who = "the control plane"
    match job.state:
        case JobState.CANCELLING:
            return {"kind": "cancel", "who": who}
        case JobState.PAUSING:
            return {"kind": "pause", "who": who}
        case JobState.RUNNING if status.phase == "running" and status.wanted != job.wanted_workers:
            return {"kind": "resize", "workers": job.wanted_workers, "who": who}
    return None
