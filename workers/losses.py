"""What an attempt has lost so far: against its budgets, and how hasty a replacement may be. Pure.

Each cause has a budget of its own; a wanted resize and the job's own faults touch none of them.
"""

from workers import policies
from workers.policies import GivenUp
from workers.spec import Recovery


class Losses:
    """Counts of one attempt. Times are seconds of one clock."""

    def __init__(self, recovery: Recovery, *, workers: int = 0, nodes: frozenset[str] = frozenset()) -> None:
        """workers, nodes: what was lost before this process began."""
        self._recovery = recovery
        self._workers = workers
        self._nodes = set(nodes)
        self._in_a_row = 0
        self._last: float | None = None

    def lose(self, node: str | None, *, now: float) -> None:
        """A worker was lost, or with `node` all of that node's, which count as one however many they were."""
        if node is None:
            self._workers += 1
        else:
            self._nodes.add(node)
        self.incident(now)

    def incident(self, now: float) -> None:
        """Something was lost; within `backoff_s` of the last it is the same incident, later one in a row."""
        since = now - self._last if self._last is not None else float("inf")
        if since > self._recovery.backoff_cap_s:
            self._in_a_row = 1
        elif since > self._recovery.backoff_s:
            self._in_a_row += 1
        self._last = now

    def hold_off_s(self, now: float) -> float:
        """How much longer nobody is to be sought; 0 or less: not at all."""
        if self._last is None:
            return 0.0
        whole = policies.hold_off_s(
            self._in_a_row, first_s=self._recovery.backoff_s, cap_s=self._recovery.backoff_cap_s
        )
        return whole - (now - self._last)

    def spent(self) -> GivenUp | None:
        """Whether a budget is used up."""
        return policies.losses_spent(
            workers=self._workers,
            most_workers=self._recovery.max_worker_losses,
            nodes=len(self._nodes),
            most_nodes=self._recovery.max_node_losses,
        )
