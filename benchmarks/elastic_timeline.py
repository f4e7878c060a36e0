"""What a change of a worker group cost, told from the times of steps that its ranks wrote down. Pure.

One definition for every contestant. A *generation* is one incarnation of a group, whatever its maker calls
it; numbers grow. A pause lasts from the end of the old group's last step to the start of the new group's
first; a recovery from the signal that killed a worker to the end of the first step that had not been
completed before. Where ranks differ, the latest counts.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

GROW, SHRINK, KILL = "grow", "shrink", "kill"
CHANGES = (SHRINK, GROW, KILL)
"""In the order in which a round makes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One rank's step, or what it did right after it (a checkpoint, say: then step and rank are the same).

    began_s, ended_s  Unix seconds
    step              finished steps, so the first is 1
    """

    generation: int
    step: int
    rank: int
    world_size: int
    began_s: float
    ended_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What one change of a group cost.

    generation      the one that follows
    seconds         the pause, or from the kill to the next completed new step
    steps_repeated  steps that had been completed and were done again
    event           what the contestant itself says of it; empty where it says nothing
    """

    kind: str
    generation: int
    seconds: float
    steps_repeated: int
    old_workers: int
    new_workers: int
    event: dict[str, Any] = field(default_factory=dict)


def newest(rows: Iterable[StepRow]) -> int | None:
    """The newest generation that has done a step."""
    return max((row.generation for row in rows), default=None)


def steps_done(rows: Iterable[StepRow], *, generation: int) -> int:
    """How many steps that generation has completed on every rank."""
    return len(_completed([row for row in rows if row.generation == generation]))


def resized(rows: Sequence[StepRow], *, old: int) -> Change | None:
    """What the resize of generation `old` cost; None until every rank of the next has done a step."""
    before = [row for row in rows if row.generation == old]
    after = _next_generation(rows, old)
    if not before or not _completed(after):
        return None
    first = min(row.step for row in after)
    pause = max(r.began_s for r in after if r.step == first) - max(r.ended_s for r in before)
    old_workers, new_workers = before[0].world_size, after[0].world_size
    return Change(
        kind=GROW if new_workers > old_workers else SHRINK,
        generation=after[0].generation,
        seconds=pause,
        steps_repeated=max(0, max(row.step for row in before) - first + 1),
        old_workers=old_workers,
        new_workers=new_workers,
    )


def recovered(rows: Sequence[StepRow], *, old: int, killed_at_s: float) -> Change | None:
    """What the loss of a worker of generation `old` cost; None until a new step is completed.

    A step that any rank of the old group has finished counts as completed before, also after the kill.
    """
    before = [row for row in rows if row.generation <= old]
    later = [row for row in rows if row.generation > old]
    if not before or not later:
        return None
    highest = max(row.step for row in before)
    ends = [
        max(row.ended_s for row in later if (row.generation, row.step) == step)
        for step in _completed([row for row in later if row.step > highest])
    ]
    if not ends:
        return None
    after = _next_generation(rows, old)
    return Change(
        kind=KILL,
        generation=after[0].generation,
        seconds=min(ends) - killed_at_s,
        steps_repeated=max(0, highest - min(row.step for row in later) + 1),
        old_workers=next(row.world_size for row in before if row.generation == old),
        new_workers=after[0].world_size,
    )


def _next_generation(rows: Sequence[StepRow], old: int) -> list[StepRow]:
    number = min((row.generation for row in rows if row.generation > old), default=None)
    return [row for row in rows if row.generation == number]


def _completed(rows: Iterable[StepRow]) -> list[tuple[int, int]]:
    """The (generation, step) that every rank has finished."""
    ranks: dict[tuple[int, int], set[int]] = {}
    sizes: Counter[tuple[int, int]] = Counter()
    for row in rows:
        ranks.setdefault((row.generation, row.step), set()).add(row.rank)
        sizes[row.generation, row.step] = row.world_size
    return [step for step, found in ranks.items() if len(found) == sizes[step]]
