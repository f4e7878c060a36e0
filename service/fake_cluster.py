"""A cluster in memory, for tests and for trying the API without Ray: controllers that follow a script.

Held to the contract suite that `RayCluster` passes. A started job says `starting`, then `running`; it makes
progress when the test calls `train`, and obeys commands at once. Each job's log outlives its controller, as
the real one's file does, and its numbers go on with the next attempt. Knows no tensors and no threads.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from service.cluster import ClusterView, ControllerStatus, NodeView, WorkerPlace
from service.errors import ClusterUnavailable, ControllerGone
from workers.spec import JobSpec

_FINAL = frozenset({"paused", "succeeded", "failed", "cancelled"})
_MEMORY = {
    "parameters": 4000,
    "gradients": 2000,
    "optimizer_states": 8000,
    "communication_buffers": 1000,
    "activations": 3000,
}


@dataclass(slots=True)
class _Controller:
    """One attempt of one job."""

    spec: JobSpec
    attempt: int
    wanted: int
    phase: str = "starting"
    world_size: int = 0
    places: list[str] = field(default_factory=list)
    """Each worker's node, by rank."""


@dataclass(slots=True)
class _Log:
    """What outlives the controllers of a job."""

    entries: list[dict[str, Any]] = field(default_factory=list)
    generation: int = 0
    step: int = 0


class FakeCluster:
    """A `service.cluster.Cluster`. `nodes` is what it has; `available = False` makes every call fail."""

    def __init__(self, *, cpus: float = 4.0, nodes: int = 1, memory_bytes: int = 8 << 30) -> None:
        self.available = True
        self.started: list[tuple[str, int, int]] = []
        """Each (job id, attempt, wanted workers) that a controller was made for."""
        self.drains: list[tuple[str, str]] = []
        """Each (node id, reason) that was asked for."""
        self.no_place: str | None = None
        """Where set, the reason for which every resize is refused."""
        self.commands: list[tuple[str, dict[str, Any]]] = []
        self._cpus, self._nodes, self._memory_bytes = cpus, nodes, memory_bytes
        self._lock = threading.RLock()
        self._controllers: dict[str, _Controller] = {}
        self._logs: dict[str, _Log] = {}
        self._drained: dict[str, float | None] = {}
        self._clock = 1_000_000.0

    # The protocol.

    def connect(self) -> None:
        """Nothing to do."""
        self._check()

    def close(self) -> None:
        """Nothing to do."""

    def view(self) -> ClusterView:
        """Equal nodes, the first one the head; workers are on the first that had room for them."""
        self._check()
        with self._lock:
            return ClusterView(tuple(self._node(f"node-{number}") for number in range(self._nodes)))

    def drain(self, node_id: str, *, why: str, deadline: float | None) -> None:
        """Jobs move off the node at once, where there is room."""
        self._check()
        with self._lock:
            self.drains.append((node_id, why))
            self._drained[node_id] = deadline
            for job_id, controller in self._controllers.items():
                if node_id in controller.places:
                    self._move_off(job_id, node_id)

    def start_job(self, job_id: str, spec: JobSpec, *, attempt: int, wanted: int) -> None:
        """A new attempt begins and runs at once."""
        self._check()
        with self._lock:
            existing = self._controllers.get(job_id)
            if existing is not None and existing.attempt == attempt:
                return
            controller = self._controllers[job_id] = _Controller(spec, attempt, wanted)
            self._logs.setdefault(job_id, _Log())
            self.started.append((job_id, attempt, wanted))
            self._enter(job_id, "starting")
            self._seat(controller, wanted)
            self._logs[job_id].generation += 1
            self._enter(job_id, "running")

    def command(self, job_id: str, command: Mapping[str, Any]) -> None:
        """Obey at once."""
        controller = self._controller(job_id)
        with self._lock:
            self.commands.append((job_id, dict(command)))
            self._event(job_id, "command", dict(command))
            if controller.phase in _FINAL:
                return
            match command["kind"]:
                case "cancel":
                    self._end(job_id, "cancelled")
                case "pause":
                    self._enter(job_id, "pausing")
                    self._end(job_id, "paused")
                case "resize":
                    self._resize(job_id, command["workers"], command["who"])
                case "checkpoint":
                    self._checkpoint(job_id, "demand")

    def read(self, job_id: str, *, after: int, limit: int) -> list[dict[str, Any]]:
        """Entries of the log."""
        self._controller(job_id)
        with self._lock:
            return self._logs[job_id].entries[after : after + limit]

    def status(self, job_id: str) -> ControllerStatus:
        """Where the attempt stands."""
        controller = self._controller(job_id)
        with self._lock:
            log = self._logs[job_id]
            return ControllerStatus(
                phase=controller.phase,
                generation=log.generation,
                world_size=controller.world_size,
                wanted=controller.wanted,
                step=log.step,
                last_seq=len(log.entries),
                attempt=controller.attempt,
                node="node-0",
                workers=tuple(
                    WorkerPlace(f"w{rank}", rank, node) for rank, node in enumerate(controller.places)
                ),
            )

    def running_jobs(self) -> set[str]:
        """Jobs that have a controller, whatever its phase."""
        self._check()
        with self._lock:
            return set(self._controllers)

    def release(self, job_id: str) -> None:
        """Forget the controller; its log stays."""
        self._check()
        with self._lock:
            self._controllers.pop(job_id, None)

    # The script.

    def train(self, job_id: str, steps: int = 1) -> None:
        """Finish so many steps, each rank reporting; after the last of the job it succeeds."""
        with self._lock:
            controller, log = self._controllers[job_id], self._logs[job_id]
            for _ in range(steps):
                log.step += 1
                for rank in range(controller.world_size):
                    self._report(job_id, rank)
                if log.step == controller.spec.steps:
                    self._checkpoint(job_id, "final")
                    self._end(job_id, "succeeded")
                    return

    def fail(self, job_id: str, message: str) -> None:
        """The job's own code raises."""
        with self._lock:
            self._event(job_id, "error", {"rank": 0, "message": message, "traceback": message})
            self._end(job_id, "failed", message)

    def lose_controller(self, job_id: str) -> None:
        """The controller vanishes, as when the head is lost."""
        with self._lock:
            del self._controllers[job_id]

    def log_of(self, job_id: str) -> list[dict[str, Any]]:
        """All entries ever logged for the job."""
        with self._lock:
            return list(self._logs[job_id].entries)

    # Shared steps.

    def _check(self) -> None:
        if not self.available:
            raise ClusterUnavailable("the cluster was made unavailable")

    def _controller(self, job_id: str) -> _Controller:
        self._check()
        with self._lock:
            if job_id not in self._controllers:
                raise ControllerGone(f"job {job_id} has no controller on the cluster")
            return self._controllers[job_id]

    def _resize(self, job_id: str, workers: int, who: str) -> None:
        controller, log = self._controllers[job_id], self._logs[job_id]
        old = controller.world_size
        if self.no_place is not None:
            refusal = {"who": who, "wanted": workers, "workers": old, "reason": self.no_place}
            self._event(job_id, "resize_refused", refusal)
            return
        controller.wanted = workers
        if old == workers:
            return
        self._enter(job_id, "resizing")
        log.generation += 1
        self._seat(controller, workers)
        change = {"old_workers": old, "new_workers": workers, "generation": log.generation}
        seconds = {"stop": 0.1, "form": 0.1, "load": 0.1, "start": 0.1}
        cost = {"pause_s": 0.4, "seconds": seconds, "steps_lost": 0, "at_step": log.step}
        self._event(job_id, "resize", {"who": who, **change, **cost})
        self._enter(job_id, "running")

    def _node(self, node_id: str) -> NodeView:
        held = sum(
            controller.places.count(node_id) * controller.spec.resources.cpus
            for controller in self._controllers.values()
        )
        return NodeView(
            id=node_id,
            address="127.0.0.1",
            alive=True,
            cpus=self._cpus,
            cpus_free=self._cpus - held,
            gpus=0,
            gpus_free=0,
            memory_bytes=self._memory_bytes,
            memory_free_bytes=self._memory_bytes,
            draining=node_id in self._drained,
            deadline=self._drained.get(node_id),
            head=node_id == "node-0",
        )

    def _seat(self, controller: _Controller, workers: int) -> bool:
        """Give each worker the first place that there is; False, and the last node, where there is none."""
        controller.places, seated = [], True
        controller.world_size = workers
        for _ in range(workers):
            nodes = [self._node(f"node-{number}") for number in range(self._nodes)]
            need = controller.spec.resources.cpus
            free = [node.id for node in nodes if node.cpus_free >= need and not node.draining]
            seated = seated and bool(free)
            controller.places.append(free[0] if free else nodes[-1].id)
        return seated

    def _move_off(self, job_id: str, node_id: str) -> None:
        controller, log = self._controllers[job_id], self._logs[job_id]
        before = list(controller.places)
        ranks = [rank for rank, node in enumerate(before) if node == node_id]
        told: dict[str, Any] = {"node": node_id, "deadline": self._drained[node_id]}
        told |= {"workers": [f"w{rank}" for rank in ranks], "ranks": ranks}
        self._event(job_id, "drain", {**told, "said": "its workers are moved to other nodes"})
        if not self._seat(controller, controller.world_size):
            controller.places = before
            said = "its workers cannot be moved: the other nodes have no room"
            self._event(job_id, "drain", {**told, "said": said})
            return
        self._enter(job_id, "resizing")
        log.generation += 1
        size = controller.world_size
        change = {"old_workers": size, "new_workers": size, "generation": log.generation}
        seconds = {"stop": 0.05, "form": 0.1, "move": 0.05, "start": 0.1}
        cost = {"pause_s": 0.3, "seconds": seconds, "steps_lost": 0, "at_step": log.step}
        cause = {"who": "controller", "cause": "drain", "nodes": [node_id]}
        self._event(job_id, "resize", {**cause, **change, **cost})
        self._enter(job_id, "running")

    def _checkpoint(self, job_id: str, reason: str) -> None:
        log = self._logs[job_id]
        data = {
            "step": log.step,
            "bytes": 1000,
            "seconds": 0.1,
            "stall_s": 0.01,
            "generation": log.generation,
        }
        self._event(job_id, "checkpoint", {**data, "reason": reason})

    def _end(self, job_id: str, phase: str, reason: str | None = None) -> None:
        self._seat(self._controllers[job_id], 0)
        self._enter(job_id, phase, reason)

    def _enter(self, job_id: str, phase: str, reason: str | None = None) -> None:
        controller = self._controllers[job_id]
        controller.phase = phase
        data = {"phase": phase, "reason": reason, "attempt": controller.attempt}
        self._event(job_id, "phase", {**data, "wanted": controller.wanted, "workers": controller.world_size})

    def _event(self, job_id: str, kind: str, data: dict[str, Any]) -> None:
        self._append(job_id, {"type": "event", "kind": kind, "data": data})

    def _report(self, job_id: str, rank: int) -> None:
        controller, step = self._controllers[job_id], self._logs[job_id].step
        spec = controller.spec
        self._append(
            job_id,
            {
                "type": "report",
                "rank": rank,
                "world_size": controller.world_size,
                "worker": f"w{rank}",
                "step": step,
                "loss": 4.0 / step,
                "lr": spec.optimizer.lr,
                "grad_norm": 1.0,
                "tokens": spec.global_batch * spec.sequence_length // controller.world_size,
                "step_s": 0.1,
                "seconds": {"forward": 0.04, "backward": 0.06},
                "bytes_sent": {"reduce": 1000, "gather": 1000, "control": 10},
                "bytes_by_transport": {"shared": 1510, "network": 500},
                "memory": {**_MEMORY, "unattributed": 500},
                "predicted": {**_MEMORY, "unattributed": 0},
                "resident_bytes": 20_000,
                "samples": None,
            },
        )

    def _append(self, job_id: str, entry: dict[str, Any]) -> None:
        log = self._logs[job_id]
        self._clock += 0.1
        numbered = {"seq": len(log.entries) + 1, "time": self._clock, "generation": log.generation}
        log.entries.append({**numbered, **entry})
