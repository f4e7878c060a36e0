"""A change of the group while it happens, and what its event says in the end. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from workers.protocol import Begun

PHASES = ("form", "start", "move", "load")
"""What a worker times while it begins."""


@dataclass(slots=True)
class Change:
    """What the next generation is for. Times are Unix seconds."""

    event: Literal["resize", "recovery"] | None = None
    """None for the start of an attempt."""
    details: dict[str, Any] = field(default_factory=dict)
    """Who and why."""
    old_workers: int = 0
    target: int | None = None
    """World size that was decided on; None: whatever is wanted at the time."""
    patience_s: float = 0.0
    asked_at: float | None = None
    """When the group was asked to stop."""
    trained_until: float = 0.0
    """When the last step before the change ended."""
    last_step: int = 0
    met_at: float = 0.0
    """When the new generation was told to form."""

    def add_cause(self, cause: str) -> None:
        """Something else had part in it."""
        known = self.details.get("cause", "")
        if cause not in known:
            self.details["cause"] = f"{known}; {cause}" if known else cause

    def data(self, begun: Sequence[Begun]) -> dict[str, Any]:
        """What the event says, once all ranks have begun: the last of them ends the pause.

        seconds  wait (from the wish to the end of the last step before; no part of the pause), stop (from
                 there until all were out and the next group was told to form), and the longest of any rank
                 for each of form, start, move and load
        """
        first = begun[0]
        repeated = max(0, self.last_step - first.step)
        seconds = {name: max(b.seconds.get(name, 0.0) for b in begun) for name in PHASES}
        seconds["stop"] = max(0.0, self.met_at - self.trained_until)
        if self.asked_at is not None:
            seconds["wait"] = max(0.0, self.trained_until - self.asked_at)
        return {
            **self.details,
            "old_workers": self.old_workers,
            "new_workers": len(begun),
            "at_step": first.step,
            "steps_lost": repeated,
            "steps_repeated": repeated,
            "pause_s": max(0.0, max(b.time for b in begun) - self.trained_until),
            "seconds": seconds,
            "source": first.source.value,
            "bytes_moved": first.bytes_moved,
            "bytes_needed": first.bytes_needed,
            "replica_ranks": list(first.replica_ranks),
        }
