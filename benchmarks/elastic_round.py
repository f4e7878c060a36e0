"""One round of one contestant: four workers become two, and four again, and one is lost; what each cost."""

import time
from collections.abc import Callable
from dataclasses import replace

from benchmarks.elastic_contestants import FEWEST, MOST, Contestant, Job, Ours, Peer, wait_for
from benchmarks.elastic_results import OURS
from benchmarks.elastic_timeline import (
    GROW,
    KILL,
    SHRINK,
    Change,
    StepRow,
    newest,
    recovered,
    resized,
    steps_done,
)


def run_round(name: str, job: Job, *, victim: int, after_loss: int | None) -> dict[str, Change]:
    """The changes by kind, in the order in which they were made. Raises ContestantError.

    victim      the rank that is killed
    after_loss  with how many workers the peer is to go on after that; None: with as many as before
    """
    contestant: Contestant
    contestant = Ours(job, job_id=f"bench-{time.time_ns()}") if name == OURS else Peer(job)
    try:
        changes = {}
        for kind, workers in ((SHRINK, FEWEST), (GROW, MOST)):
            old = _settle(contestant, job)
            contestant.order(workers)
            change = wait_for(contestant, _bound(resized, old=old), f"{name}'s {kind}")
            changes[kind] = _with_event(contestant, "resize", change)
        old = _settle(contestant, job)
        killed_at_s = contestant.kill(victim, after_loss=after_loss)
        change = wait_for(
            contestant,
            _bound(recovered, old=old, killed_at_s=killed_at_s),
            f"{name}'s next step after a kill",
        )
        changes[KILL] = _with_event(contestant, "recovery", change)
        return changes
    finally:
        contestant.close()


def _settle(contestant: Contestant, job: Job) -> int:
    """Wait until the newest group has done some steps, and for a good moment; the group's generation."""

    def settled(rows: list[StepRow]) -> int | None:
        generation = newest(rows)
        if generation is None or steps_done(rows, generation=generation) < job.settled_steps:
            return None
        return generation

    generation = wait_for(contestant, settled, f"{job.settled_steps} steps of a new group")
    contestant.settle()
    return generation


def _bound(
    measure: Callable[..., Change | None], **arguments: float
) -> Callable[[list[StepRow]], Change | None]:
    return lambda rows: measure(rows, **arguments)


def _with_event(contestant: Contestant, kind: str, change: Change) -> Change:
    return replace(change, event=contestant.event(kind, generation=change.generation))
