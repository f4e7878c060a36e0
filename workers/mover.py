"""Takes a training group off nodes that are drained: carries out what `workers.draining` decides.

Seeks replacements while the group trains, tells of each drained node once, and says when the group is to
stop. The group, the nodes, the clocks and the way to tell are arguments. Stopping and going on is the
conductor's.
"""

from collections.abc import Callable
from typing import Any, Protocol

from workers.draining import Departure, Leaving, Nodes, Relocation, Stay, leaving, move_off
from workers.policies import Drop, Joiners, Proceed, Seek, Wait


class _Group(Protocol):
    """What is needed of `workers.group.Group`."""

    @property
    def node(self) -> str: ...
    def places(self) -> list[tuple[str, str | None]]: ...
    def counts(self) -> Joiners: ...
    def seek(self, count: int) -> None: ...
    def drop(self, count: int) -> None: ...
    def drop_from(self, nodes: frozenset[str]) -> None: ...


class Mover:
    """For one attempt of a job. `look` is to be called at every tick while the group trains."""

    def __init__(
        self,
        *,
        group: _Group,
        least: int,
        nodes: Callable[[], Nodes],
        tell: Callable[[dict[str, Any]], None],
        clock: Callable[[], float],
        wall: Callable[[], float],
        patience_s: float,
        relocates: bool,
    ) -> None:
        """tell: logs the event `drain`; patience_s: for room elsewhere; wall: Unix seconds.

        relocates: whether this process can go on on another node.
        """
        self._group = group
        self._least = least
        self._nodes = nodes
        self._tell = tell
        self._clock = clock
        self._wall = wall
        self._patience_s = patience_s
        self._relocates = relocates
        self._since: float | None = None
        self._told: set[str] = set()
        self._told_reason: str | None = None

    def look(self, *, target: int, joiner_fault: str | None) -> Departure | Relocation | Wait | None:
        """None: no member is on a drained node; Wait: the move is being prepared, or cannot be done now.

        target: the number of workers that is wanted.
        """
        nodes = self._nodes()
        if not nodes.drained:
            self._told.clear()
            return None
        found = leaving(self._group.places(), nodes.drained)
        for one in found:
            self._tell_once(one)
        if not found:
            self._since = self._told_reason = None
            return self._relocation(nodes)
        self._group.drop_from(frozenset(nodes.drained))
        now = self._clock()
        deadlines = [one.deadline for one in found if one.deadline is not None]
        members = len(self._group.places())
        decision = move_off(
            staying=members - sum(len(one.workers) for one in found),
            target=target,
            least=self._least,
            joiners=self._group.counts(),
            joiner_fault=joiner_fault,
            waited_s=now - (now if self._since is None else self._since),
            patience_s=self._patience_s,
            left_s=min(deadlines) - self._wall() if deadlines else None,
        )
        match decision:
            case Seek(count=count):
                self._since = now
                self._group.seek(count)
            case Drop(count=count):
                self._group.drop(count)
            case Stay(reason=reason):
                return self._stay(reason, found)
            case Proceed(workers=workers):
                without = frozenset(name for one in found for name in one.workers)
                return Departure(workers=workers, without=without, nodes=[one.node for one in found])
        return Wait()

    def _relocation(self, nodes: Nodes) -> Relocation | None:
        """This process's own node is drained and no worker is left there: go on on another, once."""
        own = self._group.node
        if not self._relocates or own not in nodes.drained or not nodes.taking:
            return None
        self._relocates = False
        said = (
            f"the job's controller is on node {own}, which is drained: the job is saved and starts on another"
        )
        self._tell({"node": own, "workers": [], "ranks": [], "deadline": nodes.drained[own], "said": said})
        return Relocation(said)

    def _stay(self, reason: str, found: list[Leaving]) -> Wait:
        if reason != self._told_reason:
            self._told_reason = reason
            for one in found:
                self._tell(_event(one, f"its workers cannot be moved: {reason}"))
        return Wait()

    def _tell_once(self, one: Leaving) -> None:
        if one.node not in self._told:
            self._told.add(one.node)
            self._tell(_event(one, "its workers are moved to other nodes"))


def _event(one: Leaving, said: str) -> dict[str, Any]:
    return {
        "node": one.node,
        "workers": list(one.workers),
        "ranks": list(one.ranks),
        "deadline": one.deadline,
        "said": said,
    }
