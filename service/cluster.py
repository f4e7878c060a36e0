"""The seam to the cluster: what the control plane asks of it, and nothing about how it is done.

`ray_cluster.RayCluster` does it on Ray; `fake_cluster.FakeCluster` in memory, held to the same contract
suite. Knows neither the database nor any policy.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from workers.spec import JobSpec


@dataclass(frozen=True, slots=True)
class NodeView:
    """One machine of the cluster: what it has and what is free of it.

    draining  it gets no new work, and jobs move off it; `deadline` in Unix seconds, None where there is none
    head      the cluster ends with it
    """

    id: str
    address: str
    alive: bool
    cpus: float
    cpus_free: float
    gpus: float
    gpus_free: float
    memory_bytes: int
    memory_free_bytes: int
    draining: bool = False
    deadline: float | None = None
    head: bool = False


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The cluster at one moment."""

    nodes: tuple[NodeView, ...]

    @property
    def alive(self) -> tuple[NodeView, ...]:
        """The nodes that take work."""
        return tuple(node for node in self.nodes if node.alive and not node.draining)


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """A worker of a job, its rank, and the id of its node (None: not known yet)."""

    worker: str
    rank: int
    node: str | None


@dataclass(frozen=True, slots=True)
class ControllerStatus:
    """What a job's controller says of itself, and where it and the workers are.

    `last_seq` is the number of its newest log entry, `node` the id of its own node.
    """

    phase: str
    generation: int
    world_size: int
    wanted: int
    step: int
    last_seq: int
    attempt: int
    node: str = ""
    workers: tuple[WorkerPlace, ...] = ()


class Cluster(Protocol):
    """What the control plane asks. Safe for use from many threads; every call ends within a bounded time.

    Every method raises ClusterUnavailable where the cluster does not answer; those about one job raise
    ControllerGone where the cluster answers but the job has no controller on it.
    """

    def connect(self) -> None:
        """Make the cluster reachable, starting it where it is ours to start. At once where it is already."""

    def close(self) -> None:
        """Let go of the cluster. Jobs on it run on."""

    def view(self) -> ClusterView:
        """The nodes now."""

    def drain(self, node_id: str, *, why: str, deadline: float | None) -> None:
        """Have a node that lives get no new work, so that jobs move off it; `deadline` in Unix seconds.

        A later call replaces the deadline. Nobody ends the node but itself, once it has nothing to do.
        """

    def start_job(self, job_id: str, spec: JobSpec, *, attempt: int, wanted: int) -> None:
        """Create the job's controller and start it; nothing where this attempt's is there already.

        A controller of an earlier attempt is ended first.
        """

    def command(self, job_id: str, command: Mapping[str, Any]) -> None:
        """Hand a command to the job's controller."""

    def read(self, job_id: str, *, after: int, limit: int) -> list[dict[str, Any]]:
        """At most `limit` entries of the controller's log with seq > after, oldest first."""

    def status(self, job_id: str) -> ControllerStatus:
        """What the job's controller says of itself."""

    def running_jobs(self) -> set[str]:
        """Ids of the jobs that have a controller on the cluster."""

    def release(self, job_id: str) -> None:
        """End the job's controller, and with it whatever it still owns; return once its name is free.

        Nothing where there is none.
        """
