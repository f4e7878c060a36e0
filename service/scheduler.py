"""Which queued jobs start now: a pure decision over values, and nothing that acts on it.

The rule: first come, first served, all wanted workers at once, no overtaking. One exception: a job that is
larger than the whole cluster as it is now waits for the cluster to grow and holds no one back. What a live
job may still take (it is starting, or growing) counts as taken.

Where an autoscaler adds nodes, a queued job is seen by it only once its places are asked for. So there the
first job without room is started all the same, larger than the cluster or not, and waits in Ray. One at a
time: two that each hold a part of what they need could wait for each other for ever.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import floor

from service.cluster import ClusterView, NodeView
from service.jobs import Job, JobState
from workers.spec import JobSpec, Resources

_EPSILON = 1e-6
"""Ray counts CPUs in ten-thousandths; sums of them in floats are off by less than this."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Jobs to start, in order, and for each other queued job what it waits for."""

    start: tuple[str, ...]
    waiting: dict[str, str]


@dataclass(frozen=True, slots=True)
class Room:
    """What a node can give, or has: CPUs, GPUs, bytes of memory."""

    cpus: float
    gpus: float
    memory_bytes: float

    def workers(self, resources: Resources) -> int:
        """How many workers of this size find place in it."""
        fits = [(self.cpus + _EPSILON) / resources.cpus]
        if resources.gpus:
            fits.append((self.gpus + _EPSILON) / resources.gpus)
        if resources.memory_bytes:
            fits.append(self.memory_bytes / resources.memory_bytes)
        return max(0, floor(min(fits)))

    def less(self, resources: Resources, workers: int) -> "Room":
        """What is left beside so many workers."""
        return Room(
            self.cpus - workers * resources.cpus,
            self.gpus - workers * resources.gpus,
            self.memory_bytes - workers * (resources.memory_bytes or 0),
        )


def total_room(view: ClusterView) -> list[Room]:
    """What each node that takes work has."""
    return [Room(node.cpus, node.gpus, node.memory_bytes) for node in view.alive]


def decide(queued: Sequence[Job], live: Iterable[Job], view: ClusterView, *, grows: bool = False) -> Decision:
    """What to do with the queue (`queued`: longest waiting first) on the cluster as `view` shows it.

    grows: an autoscaler adds nodes for what is asked of the cluster.
    """
    live = list(live)
    free = [_free(node) for node in view.alive]
    total = total_room(view)
    unclaimed = _sum(total)
    for job in live:
        unclaimed = unclaimed.less(job.spec.resources, max(job.wanted_workers, job.workers))
    start: list[str] = []
    waiting: dict[str, str] = {}
    blocked_by: str | None = None
    asking = any(job.state is JobState.STARTING for job in live)
    for job in queued:
        resources, workers = job.spec.resources, job.wanted_workers
        capacity = sum(room.workers(resources) for room in total)
        if workers > capacity and not grows:
            waiting[job.id] = (
                f"waiting for the cluster to grow: {describe(job.spec, workers)}; "
                f"it has place for {capacity} in all"
            )
        elif blocked_by is not None:
            waiting[job.id] = f"waiting behind job {blocked_by}"
        elif workers > (now := min(sum(r.workers(resources) for r in free), unclaimed.workers(resources))):
            blocked_by = job.id
            if grows and not asking and not start:
                start.append(job.id)
                continue
            waiting[job.id] = f"waiting for {describe(job.spec, workers)}; there is place for {now} now"
        else:
            start.append(job.id)
            free = _placed(free, resources, workers)
            unclaimed = unclaimed.less(resources, workers)
    return Decision(tuple(start), waiting)


def describe(spec: JobSpec, workers: int) -> str:
    """A wish for workers in words."""
    resources = spec.resources
    parts = [f"{resources.cpus:g} CPUs"]
    if resources.gpus:
        parts.append(f"{resources.gpus} GPU")
    if resources.memory_bytes:
        parts.append(f"{resources.memory_bytes:,} bytes of memory")
    return f"{workers} workers with {' and '.join(parts)} each"


def _free(node: NodeView) -> Room:
    return Room(node.cpus_free, node.gpus_free, node.memory_free_bytes)


def _sum(rooms: Iterable[Room]) -> Room:
    rooms = list(rooms)
    return Room(sum(r.cpus for r in rooms), sum(r.gpus for r in rooms), sum(r.memory_bytes for r in rooms))


def _placed(free: list[Room], resources: Resources, workers: int) -> list[Room]:
    """The free room after workers took the first places they find."""
    left = []
    for room in free:
        here = min(workers, room.workers(resources))
        workers -= here
        left.append(room.less(resources, here))
    return left
