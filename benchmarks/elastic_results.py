"""What a run of the elastic benchmark yields. Plain values: knows neither torch nor Ray."""

from dataclasses import dataclass, field

from benchmarks.elastic_timeline import Change

OURS, PEER = "elastic-zero", "Ray Train"


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One contestant's changes in one round, by kind. busy_cores: those that others kept busy before it."""

    changes: dict[str, Change]
    busy_cores: float


@dataclass(frozen=True, slots=True)
class SizeResult:
    """All rounds on one model, by contestant. One that failed keeps what it had, and a reason.

    bytes_needed  of a grow and a shrink by kind, from the layout; empty where that is not worked out
    """

    size: str
    rounds: dict[str, list[Round]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    bytes_needed: dict[str, int] = field(default_factory=dict)

    def changes(self, name: str, kind: str) -> list[Change]:
        """Those of a kind, one for each round."""
        return [r.changes[kind] for r in self.rounds.get(name, ()) if kind in r.changes]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaResult:
    """Step times with a replica after every step, and with none, of engines that took turns.

    with_s, without_s  seconds of a step, one for each turn; turns of one place ran right after each other
    seconds            of a step spent on replicas, mean over ranks, where they are on
    bytes_sent         by all ranks in a step, where they are on
    held_bytes         of replicas at all ranks, where they are on
    off                the same three where they are off
    """

    size: str
    with_s: list[float]
    without_s: list[float]
    seconds: float
    bytes_sent: float
    held_bytes: int
    off: tuple[float, float, int]
