"""What Ray says of its nodes' draining, and how a node is drained: the one place that knows Ray's way.

A drained node gets no new work; what runs there runs on until it ends, and the node ends itself once nothing
does. Ray ends nothing at the deadline: that is left to whoever takes the machine away. A preemption notice
and `ray drain-node` make the same mark, so that both are seen here.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray
from ray._private.state import state
from ray.core.generated import autoscaler_pb2

from workers.draining import Nodes

INTERVAL_S = 1.0
_CALL_TIMEOUT_S = 5.0


class DrainRefusedError(Exception):
    """Ray does not drain the node."""


def draining() -> dict[str, float | None]:
    """The nodes that are drained, by their ids, with their deadlines in Unix seconds; None: no deadline."""
    found: dict[str, int] = state.get_draining_nodes()
    return {node: at_ms / 1000 if at_ms > 0 else None for node, at_ms in found.items()}


def drain(node_id: str, *, why: str, deadline: float | None) -> None:
    """Have Ray put no more work on a node. `deadline`: Unix seconds; a later call replaces it.

    Ray accepts ids that it does not know, so the caller looks first. Raises DrainRefusedError.
    """
    messages: Any = autoscaler_pb2
    reason = messages.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    at_ms = 0 if deadline is None else int(deadline * 1000)
    worker: Any = ray._private.worker.global_worker
    client = worker.gcs_client
    accepted, said = client.drain_node(node_id, reason, why, at_ms, timeout=_CALL_TIMEOUT_S)
    if not accepted:
        raise DrainRefusedError(f"Ray does not drain node {node_id}: {said}")


def look() -> Nodes:
    """The drained nodes, and those that take work."""
    drained = draining()
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]
    return Nodes(drained=drained, taking=frozenset(alive - drained.keys()))


class NodeWatch:
    """Looks again and again in a thread of its own: Ray may block the question while its head is away."""

    def __init__(self, look: Callable[[], Nodes] = look) -> None:
        self._look = look
        self._known = Nodes()
        threading.Thread(target=self._run, name="node-watch", daemon=True).start()

    def __call__(self) -> Nodes:
        """The nodes as they were a second or so ago."""
        return self._known

    def _run(self) -> None:
        while True:
            with suppress(Exception):  # the head is away: what was known stays, and it is looked again
                self._known = self._look()
            time.sleep(INTERVAL_S)
