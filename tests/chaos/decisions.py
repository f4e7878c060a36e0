"""What happens to a job, and when: decided from a seed alone, before anything has happened.

A decision names no process and no host, only a share of those there will be; and it is due after a number of
steps of the job, not at a time. So one seed gives one list of decisions on every machine.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What may happen."""

    KILL_WORKER = "kill a worker"
    KILL_CONTROLLER = "kill the controller"
    RESIZE = "resize"
    PAUSE = "pause and resume"
    RESTART_SERVICE = "kill the service and start it again"
    CUT_LINK = "cut a host's link for a moment"
    LOSE_HOST = "cut a host's link until it is given up"
    KILL_HOST = "kill a host"
    DRAIN_HOST = "drain a host and switch it off"


ON_ONE_HOST = (
    Kind.KILL_WORKER,
    Kind.KILL_CONTROLLER,
    Kind.RESIZE,
    Kind.PAUSE,
    Kind.RESTART_SERVICE,
)
"""What needs no further host."""


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that happens.

    after_steps  new steps the job must have finished since the action before it
    kind         what happens
    whom         share in [0, 1): of n candidates it is the one numbered int(whom * n)
    workers      the number that a resize asks for
    hold_s       how long the service is away, or a link is cut for a moment, in seconds
    """

    after_steps: int
    kind: Kind
    whom: float
    workers: int
    hold_s: float

    def __str__(self) -> str:
        of = {
            Kind.RESIZE: f" to {self.workers}",
            Kind.CUT_LINK: f" {self.hold_s:g} s",
            Kind.RESTART_SERVICE: f" {self.hold_s:g} s",
        }
        return f"after {self.after_steps} steps: {self.kind}{of.get(self.kind, '')} ({self.whom:.2f})"


def decide(seed: int, *, kinds: Sequence[Kind], most_workers: int) -> Iterator[Action]:
    """The actions of a seed, without end. Of any len(kinds) * n first ones, each kind has n."""
    random_ = random.Random(seed)
    while True:
        for kind in random_.sample(kinds, len(kinds)):
            yield Action(
                after_steps=random_.randint(1, 6),
                kind=kind,
                whom=random_.random(),
                workers=random_.randint(1, most_workers),
                hold_s=round(random_.uniform(0.2, 2.0), 1),
            )
