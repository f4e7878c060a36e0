"""What a rank sent and how long it took, by kind, transport and phase, from one step to the next.

Knows numbers only.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class Ledger:
    """Bytes sent and seconds spent since the last `take`.

    sent       bytes by kind: reduce, gather, gather_backward, control, replica
    transport  the same bytes by the way they went: shared (read by a rank on this host), network
    seconds    by phase
    """

    sent: Counter[str] = field(default_factory=Counter)
    transport: Counter[str] = field(default_factory=Counter)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

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
    def timed(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - began
