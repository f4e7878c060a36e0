"""What a run of the checkpoint benchmark yields. Plain values: knows neither torch nor files."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

OURS, PEER, PLAIN = "elastic-zero", "DCP", "plain"
"""The contestants; plain: the same bytes written and read with nothing around them."""

STATE_BYTES = 12
"""Of each parameter in fp32 training with AdamW: the parameter itself and two moments."""

SAVED_AT, LOADED_AT = 4, (4, 7)
"""The numbers of ranks of the timed save and of the timed loads."""

SAVE = f"save at {SAVED_AT}"


def load_title(ranks: int) -> str:
    """What the timed load by so many ranks is called."""
    return f"load {SAVED_AT} -> {ranks}"


LOADS = tuple(load_title(ranks) for ranks in LOADED_AT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What one load of a checkpoint of `saved_at` ranks by `loaded_at` ranks read, all ranks together.

    read      bytes, as the operating system counts them; the manifest and headers are among them
    needed    bytes of the state that the loading ranks hold
    rounding  bytes of the blocks that hold them, less `needed`; 0 for a format without blocks
    """

    saved_at: int
    loaded_at: int
    read: int
    needed: int
    rounding: int

    @property
    def ratio(self) -> float:
        return self.read / self.needed

    @property
    def rounded(self) -> float:
        """The ratio once the rounding to blocks is subtracted."""
        return (self.read - self.rounding) / self.needed

    @property
    def title(self) -> str:
        return f"{self.saved_at} -> {self.loaded_at}"


@dataclass(frozen=True, slots=True)
class BytesResult:
    """The cells that were measured, by contestant; one that failed has a reason instead."""

    size: str
    cells: dict[str, list[Grid]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One save or load of one contestant, in processes of its own.

    seconds      from the moment all ranks were ready to the end of the slowest
    moved_bytes  read by a load or written by a save, as the operating system counts them, all ranks
    extra_bytes  highest resident memory, less that before; the worst rank's
    busy_cores   those that others kept busy before it
    """

    seconds: float
    moved_bytes: int
    extra_bytes: int
    busy_cores: float


@dataclass(frozen=True, slots=True)
class SpeedResult:
    """The rounds of saves and loads by (contestant, action). One that failed keeps its rounds, and a reason.

    needed    bytes of the state
    rounding  bytes that a load reads beyond them for whole blocks, by action
    """

    size: str
    needed: int = 0
    rounding: Mapping[str, int] = field(default_factory=dict)
    rounds: dict[tuple[str, str], list[Timed]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def ratios(self, slower: str, faster: str, action: str) -> list[float]:
        """How many times as long `slower` took as `faster`, within each round that has both."""
        pairs = zip(
            self.rounds.get((slower, action), ()), self.rounds.get((faster, action), ()), strict=False
        )
        return [a.seconds / b.seconds for a, b in pairs]


@dataclass(frozen=True, slots=True, kw_only=True)
class StallRound:
    """Saves behind the training and plain copies of the same bytes, in turns, the slowest rank of each.

    first_s   the first save, which allocates what later ones use again
    stalls_s  how long each of the later ones kept the ranks, in the order of the turns
    copies_s  a copy of the state into memory already touched, one in each of the same turns
    writes_s  until each of the saves was on disk, from its begin
    shard_bytes  of the largest rank's state
    busy_cores   those that others kept busy before the round
    """

    first_s: float
    stalls_s: list[float]
    copies_s: list[float]
    writes_s: list[float]
    shard_bytes: int
    busy_cores: float

    @property
    def ratio(self) -> float:
        """Stall over copy, taken within each turn; their median."""
        pairs = zip(self.stalls_s, self.copies_s, strict=True)
        return statistics.median(stall / copy for stall, copy in pairs)


@dataclass(frozen=True, slots=True)
class StallResult:
    """The rounds, and the reason where one failed."""

    size: str
    world_size: int
    rounds: list[StallRound] = field(default_factory=list)
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """What it takes one rank to know what to read, where a checkpoint of `saved_at` ranks is loaded.

    reads_s  to parse and check the manifest, each time
    plans_s  from there to the blocks of files, each time, by the number of ranks that load
    """

    saved_at: int
    parameters: int
    manifest_bytes: int
    reads_s: list[float]
    plans_s: dict[int, list[float]]


@dataclass(slots=True)
class Results:
    """The parts of a run. None: not in it."""

    read: BytesResult | None = None
    speed: SpeedResult | None = None
    stall: StallResult | None = None
    plan: PlanResult | None = None

    @property
    def failed(self) -> bool:
        return bool(
            (self.read is not None and self.read.failures)
            or (self.speed is not None and self.speed.failures)
            or (self.stall is not None and self.stall.failure)
        )
