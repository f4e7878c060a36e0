"""How a group moves off nodes that are drained: values in, a decision out. Knows neither Ray nor a clock.

Replacements are sought on other nodes while the group trains, and the group is only stopped once they are
ready. If there is no room for all of them, it goes on with those that stay and the ones that are ready, where
the job accepts so few; else it stays where it is until there is room, or until the node goes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from workers.policies import Drop, Joiners, Proceed, Seek, Wait

_PART_OF_THE_REST = 0.5
"""Of the time until the deadline, what may be spent on waiting for room: the move itself takes some, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """The cluster's nodes by id, as far as it matters here."""

    drained: Mapping[str, float | None] = field(default_factory=dict)
    """Those that are drained, with their deadlines in Unix seconds; None: no deadline."""
    taking: frozenset[str] = frozenset()
    """Those that take work."""


@dataclass(frozen=True, slots=True)
class Stay:
    """Nothing can be done for now. `reason`: for people."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """Stop the group now and go on with `workers`, none of whom is among `without`."""

    workers: int
    without: frozenset[str]
    nodes: list[str]


@dataclass(frozen=True, slots=True)
class Relocation:
    """Save the job now and go on from another node: this process's own is drained. `reason`: for people."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """A node that is drained, and those of the job's workers that are on it."""

    node: str
    deadline: float | None
    """Unix seconds; None: whenever they are gone."""
    workers: tuple[str, ...]
    ranks: tuple[int, ...]


def leaving(nodes: Sequence[tuple[str, str | None]], drained: Mapping[str, float | None]) -> list[Leaving]:
    """The drained nodes that the group is on. `nodes`: each rank's (worker, node), by rank."""
    found = []
    for node, deadline in sorted(drained.items()):
        here = [(rank, worker) for rank, (worker, at) in enumerate(nodes) if at == node]
        if here:
            ranks, workers = zip(*here, strict=True)
            found.append(Leaving(node=node, deadline=deadline, workers=workers, ranks=ranks))
    return found


def move_off(
    *,
    staying: int,
    target: int,
    least: int,
    joiners: Joiners,
    joiner_fault: str | None,
    waited_s: float,
    patience_s: float,
    left_s: float | None,
) -> Wait | Seek | Drop | Proceed | Stay:
    """What to do for a group of which `staying` members are on nodes that remain.

    target      workers that the group is to have after the move
    least       fewest that the job accepts
    waited_s    since replacements were sought; `patience_s` of it at most, and half of the time that is left
    left_s      until the earliest deadline; None: there is none
    """
    need = max(0, target - staying)
    if joiners.total > need:
        return Drop(joiners.total - need)
    if joiners.ready == need:
        return Proceed(target)
    if joiner_fault is None:
        if joiners.total < need:
            return Seek(need - joiners.total)
        patience = patience_s if left_s is None else min(patience_s, max(0.0, left_s) * _PART_OF_THE_REST)
        if joiners.warming or waited_s < patience:
            return Wait()
    have = staying + joiners.ready
    why = joiner_fault or f"the other nodes had room for {joiners.ready} of {need} replacements"
    if have >= max(1, least):
        return Proceed(have, why)
    return Stay(f"{why}, and {have} workers are fewer than the job's minimum of {least}")
