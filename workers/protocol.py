"""What the controller and a worker say to each other: frozen values that Ray carries, and nothing that acts.

Everything about a group names its generation, the fencing token. Knows neither Ray nor torch.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from workers.order import FROM_THE_START, Origin


class Activity(StrEnum):
    """What a worker's training thread is doing."""

    IDLE = "idle"
    FORMING = "forming"
    STARTING = "starting"
    TRAINING = "training"


class Wish(StrEnum):
    """What a group may be asked for; all ranks agree on it in the small collective of a step.

    The order of the members is that of the step's ballot.
    """

    CHECKPOINT = "checkpoint"
    OWED = "owed"
    """A checkpoint again: one was cut off with the generation that took it."""
    RESIZE = "resize"
    PAUSE = "pause"


STOPS = (Wish.PAUSE, Wish.RESIZE)
"""The wishes that end a group at the step boundary where all have heard of them."""


class Fault(StrEnum):
    """Whose doing a failure is.

    user        the job's own: its model, its data, its numbers; not retried
    collective  the group's: a peer or the network went away; another generation may go on
    aborted     the controller's wish
    """

    USER = "user"
    COLLECTIVE = "collective"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A worker's place in one generation, and where its state may come from.

    All `participants` meet and move the state; those with a rank below `world_size` train then, the others
    are leaving.
    """

    generation: int
    rank: int
    world_size: int
    participants: int
    store: str
    """host:port of the key-value store at which they meet."""
    carries: bool
    """Whether some participant may hold state of an earlier generation."""
    checkpoint: str | None
    """Folder of the checkpoint to load where too little is held; None: step 0."""
    floor_step: int = 0
    """The checkpoint's step: no older state is gone on from."""

    @property
    def leaves(self) -> bool:
        return self.rank >= self.world_size


class Source(StrEnum):
    """Where a generation's state came from.

    live        from the parts that its participants held
    replica     the same, lost parts from their replicas
    checkpoint  from files
    start       from the seed, or from parameters that the job was given
    """

    LIVE = "live"
    REPLICA = "replica"
    CHECKPOINT = "checkpoint"
    START = "start"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An exception as data, so that nothing has to be unpickled where its class is unknown."""

    fault: Fault
    message: str
    traceback: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a worker's part in a generation ended: all steps done, unless something else is said."""

    step: int
    """Steps finished, over the life of the job."""
    reason: Wish | None = None
    """The agreed wish that stopped the group."""
    left: bool = False
    """It was leaving: the others have what they needed of it."""
    failure: Failure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A worker has begun to train in a generation."""

    step: int
    """Steps finished before."""
    time: float
    """Unix seconds."""
    seconds: dict[str, float]
    """How long it took to `form` the group, `start` the engine, `move` what was held, `load` a checkpoint."""
    source: Source
    bytes_moved: int = 0
    """Sent between all ranks, so that each has its part."""
    bytes_needed: int = 0
    """The same by arithmetic: what changed its owner."""
    replica_ranks: tuple[int, ...] = ()
    """Ranks of the generation before whose part came from a replica."""
    origin: Origin = FROM_THE_START
    """From where the job counts its samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """A worker's answer to being prepared: its process, or why the job cannot run there."""

    pid: int
    node: str
    store: str = ""
    """host:port at which this worker would host a meeting."""
    fingerprint: dict[str, Any] = field(default_factory=dict)
    samples: int = 0
    """Samples in the data."""
    failure: Failure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Where a worker's training thread is, as another of its threads saw it."""

    step: int
    """Steps finished."""
    phase: str
    """forward, backward, reduce, gather, control, optimizer, data, checkpoint; "training" between them."""
    collective: str
    """The last collective it has come to, in words; empty before the first."""
    moves: int
    """Grows with each beginning and end of a phase; while it stands still, so does the rank."""
    still_s: float
    """Seconds since it last moved, by the worker's own clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Poll:
    """A worker's account of itself, and its notices numbered (upto - len(notices) + 1) .. upto.

    `outcome` is only told in the answer that carries the last notice before it.
    """

    generation: int
    activity: Activity
    step: int
    news: int
    """To be given with the next poll, which is answered at once if there has been news since."""
    notices: tuple[dict[str, Any], ...]
    upto: int
    begun: Begun | None
    outcome: Outcome | None
    heartbeat: Heartbeat | None = None
    """None until it trains in the generation."""
