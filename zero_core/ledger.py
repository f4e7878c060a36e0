"""What a rank sent, how long it took by phase, and where it is now.

Figures go from one step to the next; the whereabouts are for another thread to look at while the rank trains.
Knows numbers and names only.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

WAITING = frozenset({"reduce", "gather", "control", "broadcast"})
"""Phases in which a rank has come to a collective and may be waiting for others."""


@dataclass(slots=True)
class Whereabouts:
    """What a rank is doing. The thread that trains writes it, any other may read it: there is no lock.

    phase       the innermost one it is in; "" between two of them
    collective  the last collective it has come to, by phase, and `unit`: the index of its unit, -1 for none
    moves       grows with each beginning and end of a phase; while it stands still, so does the rank
    moved_at    when it last grew, in seconds of `time.perf_counter`
    """

    phase: str = ""
    collective: str = ""
    unit: int = -1
    moves: int = 0
    moved_at: float = field(default_factory=time.perf_counter)

    def enter(self, phase: str, now: float) -> None:
        self.phase = phase
        self.moves += 1
        self.moved_at = now


@dataclass(slots=True)
class Ledger:
    """Bytes sent and seconds spent since the last `take`, and where the rank is.

    sent       bytes by kind: reduce, gather, gather_backward, control, replica
    transport  the same bytes by the way they went: shared (read by a rank on this host), network
    seconds    by phase
    """

    sent: Counter[str] = field(default_factory=Counter)
    transport: Counter[str] = field(default_factory=Counter)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    whereabouts: Whereabouts = field(default_factory=Whereabouts)

    def count(self, kind: str, transport: str, size: int) -> None:
        self.sent[kind] += size
        self.transport[transport] += size

    def take(self) -> tuple[dict[str, int], dict[str, int], dict[str, float]]:
        """Hand over the figures and start again from zero."""
        taken = dict(self.sent), dict(self.transport), dict(self.seconds)
        self.sent.clear()
        self.transport.clear()
        self.seconds.clear()
        return taken

    @contextmanager
    def timed(self, phase: str, unit: int = -1) -> Iterator[None]:
        """Count the time as that of a phase. `unit`: the index of the unit that a collective is about."""
        began = time.perf_counter()
        outer = self._enter(phase, unit, began)
        try:
            yield
        finally:
            ended = time.perf_counter()
            self.seconds[phase] += ended - began
            self.whereabouts.enter(outer, ended)

    @contextmanager
    def within(self, phase: str, unit: int = -1) -> Iterator[None]:
        """Be in a phase, without counting its time."""
        outer = self._enter(phase, unit, time.perf_counter())
        try:
            yield
        finally:
            self.whereabouts.enter(outer, time.perf_counter())

    @contextmanager
    def net(self, phase: str) -> Iterator[None]:
        """Count the time as that of a phase, less that of the reductions and gathers inside it."""
        inside = self.seconds["reduce"] + self.seconds["gather"]
        began = time.perf_counter()
        try:
            with self.within(phase):
                yield
        finally:
            spent = self.seconds["reduce"] + self.seconds["gather"] - inside
            self.seconds[phase] += time.perf_counter() - began - spent

    def _enter(self, phase: str, unit: int, now: float) -> str:
        """Enter a phase; returns the one around it."""
        here = self.whereabouts
        outer = here.phase
        if phase in WAITING and (unit >= 0 or phase != here.collective):  # the end of one keeps its unit
            here.collective, here.unit = phase, unit
        here.enter(phase, now)
        return outer
