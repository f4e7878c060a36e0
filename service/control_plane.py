"""The control plane: all that the API may ask, in one place.

Puts the parts together and owns their loops. Every method is synchronous, thread-safe and bounded in time,
and raises the errors of `service.errors`. What is wanted is stored first and then told to the cluster; where
the telling fails, the keeper repeats it.
"""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from service import jobs, planner
from service.changes import Changes
from service.checkpoints import Checkpoints
from service.cluster import Cluster, ClusterView, NodeView
from service.collector import Collector
from service.errors import ClusterUnavailable, DoesNotFit, InvalidRequest, NotFound, WrongState
from service.jobs import ACTIVE, Job, JobState, Note, Outcome
from service.journal import logger
from service.keeper import Keeper
from service.logs import LogTail, tails
from service.loops import Loop
from service.planner import Plan
from service.settings import Settings
from service.store import EntryType, JobPage, Store, TimelineEntry
from workers.naming import JobFolder
from workers.spec import JobSpec

MAX_PAGE = 1000
MAX_WAIT_S = 60.0
_MAX_NAME = 200

_log = logger(__name__)


@dataclass(frozen=True, slots=True)
class JobOnNode:
    """What of a live job is on a node: workers, by name, and perhaps its controller."""

    job_id: str
    workers: tuple[str, ...]
    controller: bool


@dataclass(frozen=True, slots=True)
class NodeUse:
    """A node, and the live jobs that are on it."""

    node: NodeView
    jobs: tuple[JobOnNode, ...]


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether the control plane can do its work, and the state of each part: "ok" or what is wrong."""

    ok: bool
    checks: dict[str, str]


def new_job_id() -> str:
    """A random id: 12 hexadecimal digits."""
    return secrets.token_hex(6)


class ControlPlane:
    """The facade. `start` begins the background work, `stop` ends it; store and cluster stay the caller's."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        cluster: Cluster,
        clock: Callable[[], float] = time.time,
        *,
        new_id: Callable[[], str] = new_job_id,
    ) -> None:
        """`clock` tells Unix seconds."""
        self._settings = settings
        self._store = store
        self._cluster = cluster
        self._clock = clock
        self._new_id = new_id
        self.checkpoints = Checkpoints(settings.storage_dir, store.get)
        """What can be asked of jobs' checkpoints. Checks and exports take as long as they take."""
        self._changes = Changes()
        self._collector = Collector(
            store,
            cluster,
            self._changes,
            storage=settings.storage_dir,
            clock=clock,
            on_stopped=lambda: self._keeping.kick(),  # noqa: PLW0108 - made below,
        )
        self._keeper = Keeper(
            store,
            cluster,
            self._collector,
            self._changes,
            clock=clock,
            max_controller_losses=settings.max_controller_losses,
            status_interval_s=settings.reconcile_interval_s,
            cluster_grows=settings.cluster_grows,
            resolved=self.checkpoints.resolved,
        )
        interval_s = settings.poll_interval_s
        self._keeping = Loop("keeper", self._keeper.round, interval_s=interval_s)
        self._collecting = Loop("collector", self._collector.visit_all, interval_s=interval_s)

    # Life.

    def start(self) -> None:
        """Begin the background work; the cluster is connected to, or started, there."""
        self._keeping.start()
        self._collecting.start()

    def stop(self) -> None:
        """End the background work and wake those who wait. Jobs run on."""
        self._changes.close()
        self._collecting.stop()
        self._keeping.stop()
        self._collector.close()

    def ready(self) -> Readiness:
        """Whether all parts work, found by asking them."""
        checks = {
            "database": _check(self._store.ping),
            "cluster": _check(self._cluster.view),
            "keeper": self._keeping.trouble or "ok",
            "collector": self._collecting.trouble or "ok",
        }
        return Readiness(all(found == "ok" for found in checks.values()), checks)

    # Submission.

    def submit(self, spec: JobSpec, *, who: str, idempotency_key: str | None = None) -> Job:
        """Put a job into the queue; a key that was used before returns the first job.

        Raises DoesNotFit, with the numbers, before anything is stored where the cluster is too small and
        does not grow, NotFound or InvalidRequest where another job has not the checkpoint that this one is
        to start from.
        """
        who = _bounded(who, "the name of who asks")
        if idempotency_key is not None:
            _bounded(idempotency_key, "the idempotency key")
            first = self._store.submitted_before(spec, who=who, idempotency_key=idempotency_key)
            if first is not None:
                return first
        self.checkpoints.check(spec)
        found = self.plan(spec)
        if not found.fits:
            raise DoesNotFit(
                f"the job does not fit: {'; '.join(found.reasons)}",
                details={"reasons": list(found.reasons), "workers": found.workers},
            )
        outcome = jobs.submitted(self._new_id(), spec, who=who, now=self._clock())
        job, created = self._store.create(outcome, idempotency_key=idempotency_key)
        if created:
            _log.info("job submitted", job=job.id, name=job.name, who=who)
            self._changes.ring(job.id)
            self._keeping.kick()
        return job

    def plan(self, spec: JobSpec, *, workers: int | None = None) -> Plan:
        """What the job will take, and whether the cluster as it is has it."""
        try:
            view = self._cluster.view()
        except ClusterUnavailable:
            view = None
        return planner.plan(spec, view, workers=workers, grows=self._settings.cluster_grows)

    # Wishes.

    def cancel(self, job_id: str, *, who: str) -> Job:
        """End the job: at once where it is not on the cluster, else once all of it is gone."""
        job = self._wish(job_id, lambda job: jobs.cancelled(job, who=who, now=self._clock()))
        self._tell(job, JobState.CANCELLING, {"kind": "cancel", "who": who})
        return job

    def pause(self, job_id: str, *, who: str) -> Job:
        """Save the job and free its workers."""
        job = self._wish(job_id, lambda job: jobs.paused(job, who=who, now=self._clock()))
        self._tell(job, JobState.PAUSING, {"kind": "pause", "who": who})
        return job

    def resume(self, job_id: str, *, who: str) -> Job:
        """Queue a paused job again; it goes on from its last checkpoint."""
        job = self._wish(job_id, lambda job: jobs.resumed(job, who=who, now=self._clock()))
        self._keeping.kick()
        return job

    def resize(self, job_id: str, workers: int, *, who: str, expected_version: int | None = None) -> Job:
        """Have the job go on with another number of workers.

        Raises ImpossibleResize where that can never be, Conflict where the job is not at `expected_version`.
        Where the cluster grows, room is left to the job's controller, which asks for it and waits.
        """
        spec, grows = self._store.get(job_id).spec, self._settings.cluster_grows
        planner.check_resize(spec, workers, self._cluster.view(), grows=grows)
        job = self._wish(
            job_id,
            lambda job: jobs.resized(job, workers, who=who, now=self._clock()),
            expected_version=expected_version,
        )
        if job.state in ACTIVE:
            self._tell(job, job.state, {"kind": "resize", "workers": workers, "who": who})
        return job

    def save_checkpoint(self, job_id: str, *, who: str) -> Job:
        """Have a running job save itself at its next step boundary."""

        def step(job: Job) -> Outcome:
            if job.state not in ACTIVE:
                raise WrongState(
                    f"job {job.id} is {job.state}: a checkpoint can be saved while it is active",
                    details={"job_id": job.id, "state": job.state.value},
                )
            return Outcome(job, (Note("request", {"action": "checkpoint", "who": who}),))

        job = self._store.get(job_id)
        step(job)
        self._cluster.command(job_id, {"kind": "checkpoint", "who": who})
        return self._wish(job_id, step)

    # Answers.

    def get(self, job_id: str) -> Job:
        """The job."""
        return self._store.get(job_id)

    def list_jobs(self, *, cursor: str | None, limit: int, state: JobState | None) -> JobPage:
        """One page of jobs, newest first."""
        return self._store.page(cursor=cursor, limit=_page(limit), state=state)

    def timeline(
        self, job_id: str, *, after: int, limit: int, kinds: EntryType | None = None
    ) -> list[TimelineEntry]:
        """Entries of the job's timeline with id > after, oldest first."""
        self._store.get(job_id)
        return self._store.entries(job_id, after=after, limit=_page(limit), kinds=kinds)

    def latest_ranks(self, job_id: str) -> list[TimelineEntry]:
        """The newest report of each rank of the current generation."""
        self._store.get(job_id)
        return self._store.latest_reports(job_id)

    def rank_history(self, job_id: str, rank: int, *, after: int, limit: int) -> list[TimelineEntry]:
        """A rank's reports with id > after, oldest first. Raises NotFound (unknown_rank)."""
        self._store.get(job_id)
        if not self._store.has_reported(job_id, rank):
            raise NotFound(
                f"no rank {rank} of job {job_id} has reported yet",
                code="unknown_rank",
                details={"job_id": job_id, "rank": rank},
            )
        return self._store.entries(job_id, after=after, limit=_page(limit), rank=rank)

    def logs(self, job_id: str, *, worker: str | None, tail_lines: int) -> list[LogTail]:
        """The ends of the workers' logs."""
        return tails(self._folder(job_id), worker=worker, tail_lines=tail_lines)

    def nodes(self) -> list[NodeUse]:
        """The nodes now, with what of jobs was on them when the controllers were last asked."""
        accounts = sorted(self._keeper.accounts.items())
        used = []
        for node in self._cluster.view().nodes:
            here = [
                JobOnNode(
                    job_id,
                    tuple(place.worker for place in said.workers if place.node == node.id),
                    said.node == node.id,
                )
                for job_id, said in accounts
            ]
            used.append(NodeUse(node, tuple(one for one in here if one.workers or one.controller)))
        return used

    def drain(self, node_id: str, *, why: str, deadline_s: float | None, who: str) -> NodeUse:
        """Have a node get no new work and the jobs on it move to others, within `deadline_s` from now.

        Asking again changes nothing, but for a deadline that comes earlier than the one that stands. Raises
        NotFound (unknown_node), and WrongState (node_gone, head_node) for one that cannot be drained.
        """
        who, why = _bounded(who, "the name of who asks"), _bounded(why, "the reason")
        node = _node(self._cluster.view(), node_id)
        deadline = None if deadline_s is None else self._clock() + deadline_s
        sooner = deadline is not None and (node.deadline is None or deadline < node.deadline)
        if not node.draining or sooner:
            self._cluster.drain(node.id, why=f"{why} ({who})", deadline=deadline)
            _log.info("a node is drained", node=node.id, why=why, who=who, deadline_s=deadline_s)
        return next(use for use in self.nodes() if use.node.id == node.id)

    def wait_for_change(self, job_id: str | None, after_id: int, timeout_s: float) -> bool:
        """Wait until the job's timeline, or anyone's, has an entry with id > after_id; False if it did not.

        Every change of a job adds an entry. A thread is held for as long as it waits, a minute at most.
        """
        return self._changes.wait(
            job_id,
            lambda: self._store.last_id(job_id) > after_id,
            timeout_s=min(timeout_s, MAX_WAIT_S),
        )

    # Shared steps.

    def _wish(
        self, job_id: str, step: Callable[[Job], Outcome], *, expected_version: int | None = None
    ) -> Job:
        job = self._store.change(job_id, step, now=self._clock(), expected_version=expected_version)
        self._changes.ring(job_id)
        return job

    def _tell(self, job: Job, state: JobState, command: dict[str, Any]) -> None:
        """Tell the controller of a job that came to `state`; the keeper repeats what does not arrive."""
        if job.state is not state:
            return
        try:
            self._cluster.command(job.id, command)
        except ClusterUnavailable as error:
            _log.warning("a wish was stored but not told yet", job=job.id, command=command, error=str(error))
            self._keeping.kick()

    def _folder(self, job_id: str) -> JobFolder:
        return JobFolder(self._settings.storage_dir, self._store.get(job_id).id)


def _node(view: ClusterView, node_id: str) -> NodeView:
    """The node, if it can be drained."""
    details = {"node_id": node_id[:80]}
    node = next((node for node in view.nodes if node.id == node_id), None)
    if node is None:
        raise NotFound(f"the cluster has no node {node_id[:80]!r}", code="unknown_node", details=details)
    if not node.alive:
        raise WrongState(f"node {node_id} is gone already", code="node_gone", details=details)
    if node.head:
        raise WrongState(
            f"node {node_id} is the head of the Ray cluster, which ends with it: pause the jobs instead",
            code="head_node",
            details=details,
        )
    return node


def _check(ask: Callable[[], object]) -> str:
    try:
        ask()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "ok"


def _page(limit: int) -> int:
    if not 1 <= limit <= MAX_PAGE:
        raise InvalidRequest(f"limit {limit} must be between 1 and {MAX_PAGE}")
    return limit


def _bounded(text: str, what: str) -> str:
    if not 1 <= len(text) <= _MAX_NAME or not text.isprintable():
        raise InvalidRequest(f"{what} must be 1 to {_MAX_NAME} printable characters, not {text[:40]!r}")
    return text
