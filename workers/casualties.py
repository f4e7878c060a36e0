"""The dead and the unfit of an attempt: noted, counted against its budgets, and retired.

Acts on the group when it is told to; what a loss means for the job is decided by who asks.
"""

from collections.abc import Callable
from typing import Any

from workers.changes import Change
from workers.group import Group, Handle
from workers.losses import Losses
from workers.policies import Broken, GivenUp


class Casualties:
    """Of one group and its joiners."""

    def __init__(
        self,
        group: Group,
        losses: Losses,
        *,
        least: int,
        clock: Callable[[], float],
        lost: Callable[[dict[str, Any]], None],
        say: Callable[[str], None],
    ) -> None:
        """least: members the job cannot do without. lost, say: take a loss's particulars, and a remark."""
        self._group = group
        self._losses = losses
        self._least = least
        self._clock = clock
        self._lost = lost
        self._say = say

    @property
    def hold_off_s(self) -> float:
        """How much longer nobody is to be sought; 0 or less: not at all."""
        return self._losses.hold_off_s(self._clock())

    def bury(self, change: Change | None) -> Broken | GivenUp | None:
        """Retire dead workers, noting each, as causes of `change` too. Says so if the job cannot go on."""
        group = self._group
        ranks = {handle.name: rank for rank, handle in enumerate(group.participants)}
        for handle in [*group.participants]:
            if handle.death is not None:
                rank = ranks[handle.name]
                self.note(handle, rank=rank, cause=handle.death)
                if change:
                    change.add_cause(f"rank {rank} ({handle.name}): {handle.death}")
                group.retire([handle])
        if len(group.participants) >= self._least:
            self.drop_the_unfit()  # the job does not depend on them
            return self._losses.spent()
        for handle in [*group.joiners]:
            if handle.death is not None:
                self.note(handle, rank=None, cause=handle.death)
                group.retire([handle])
        broken = next((handle.fault for handle in group.joiners if handle.fault is not None), None)
        if broken:
            return Broken(None, broken)
        return self._losses.spent()

    def note(self, handle: Handle | None, *, rank: int | None, cause: str) -> None:
        """A worker was lost, or nobody knows which: None."""
        node = handle.readiness.node if handle and handle.readiness else None
        budget = "node" if handle and handle.node_died and node else "worker"
        self._losses.lose(node if budget == "node" else None, now=self._clock())
        worker = handle.name if handle else None
        self._lost({"rank": rank, "worker": worker, "node": node, "budget": budget, "cause": cause})

    def drop_the_unfit(self) -> None:
        """Joiners that cannot join, and that the job can do without: others are sought, but less hastily."""
        for handle in list(self._group.joiners):
            if handle.fault is not None or handle.death is not None:
                why = handle.fault.message if handle.fault else handle.death
                self._losses.incident(self._clock())
                self._group.retire([handle])
                self._say(f"new worker {handle.name} could not join: {why}")

    def joiner_fault(self) -> str | None:
        """Why one of those that are to join never will."""
        for handle in self._group.joiners:
            if handle.fault is not None:
                return f"new worker {handle.name} cannot run the job: {handle.fault.message}"
            if handle.death is not None:
                return f"new worker {handle.name} was lost before it joined: {handle.death}"
        return None
