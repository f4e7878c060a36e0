"""What to do next, decided from values alone: no Ray, no clock, no waiting. The conductor acts on it.

assemble   which workers to start or recover a group with, or what to wait for
resize     how to get from the current number of workers to the one that was asked for
grow_back  how a group that lost workers gets its number back
hold_off_s how long nobody is sought after losses in a row
judge      what the ends and deaths of a group's workers mean
losses_spent  whether lost workers or nodes have used up the job's chances
outside    whether a number of workers is beyond the job's bounds
"""

from collections.abc import Sequence
from dataclasses import dataclass

from workers.protocol import Failure, Fault, Outcome, Wish


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to be done yet. `reason`: what is waited for, once that has lasted long enough to say so."""

    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Seek:
    """Ask the cluster for so many more workers."""

    count: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Let so many of the joiners go."""

    count: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """Do not resize; the group trains on."""

    reason: str


@dataclass(frozen=True, slots=True)
class Proceed:
    """Go on with so many workers now. `reason`: why there are fewer than were wanted."""

    workers: int
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The smallest and the largest number of workers of the job."""

    least: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Joiners:
    """Workers that are to join, by how far they are.

    placing  waiting for the cluster to have room
    warming  placed; the process starts and imports
    ready    can join at once
    """

    placing: int = 0
    warming: int = 0
    ready: int = 0

    @property
    def total(self) -> int:
        return self.placing + self.warming + self.ready


def assemble(
    *,
    wanted: int,
    bounds: Bounds,
    survivors: int,
    joiners: Joiners,
    hold_off_s: float,
    waited_s: float,
    patience_s: float,
) -> Wait | Seek | Proceed:
    """Gather a group where none trains: at the start, for a resize, or after a loss.

    Survivors do not wait for others as long as they are enough: they go on at once, and the group grows back
    while it trains. Where nobody holds anything, places of all that are wanted are waited for `patience_s`;
    then the job goes on with as many as there are, if it accepts so few. Those that are placed already are
    waited for: their start-up is bounded elsewhere. Nobody is sought for another `hold_off_s`.
    """
    have = survivors + joiners.ready
    if have >= wanted:
        return Proceed(wanted)
    if survivors and have >= bounds.least:
        return Proceed(have, f"{have} of {wanted} workers are there")
    if survivors + joiners.total < wanted:
        return Seek(wanted - survivors - joiners.total) if hold_off_s <= 0 else Wait()
    if joiners.warming or waited_s < patience_s:
        return Wait()
    places = f"places for {have} of {wanted} workers within {patience_s:g} s"
    if have >= bounds.least:
        return Proceed(have, f"the cluster had {places}")
    return Wait(f"the cluster had {places}, and at least {bounds.least} are needed; waiting for room")


def resize(  # noqa: PLR0911 - one return for each case
    *,
    current: int,
    wanted: int,
    joiners: Joiners,
    joiner_fault: str | None,
    waited_s: float,
    patience_s: float,
) -> Wait | Seek | Drop | Refuse | Proceed | None:
    """Bring a training group from `current` to `wanted` workers; None: there is nothing to do.

    Capacity comes first: Proceed, which stops the group at a step boundary, is only said when every joiner is
    ready. `joiner_fault` is why a joiner cannot work, if one has said so.
    """
    if wanted == current:
        return Drop(joiners.total) if joiners.total else None
    need = max(wanted - current, 0)
    if joiner_fault is not None:
        return Refuse(joiner_fault)
    if joiners.total < need:
        return Seek(need - joiners.total)
    if joiners.total > need:
        return Drop(joiners.total - need)
    if joiners.ready == need:
        return Proceed(wanted)
    if joiners.placing and waited_s >= patience_s:
        placed = need - joiners.placing
        return Refuse(
            f"the cluster had places for {placed} of {need} more workers within {patience_s:g} s; "
            f"the group trains on with {current}"
        )
    return Wait()


def grow_back(
    *,
    current: int,
    wanted: int,
    joiners: Joiners,
    hold_off_s: float,
    waited_s: float,
    patience_s: float,
) -> Wait | Seek | Drop | Proceed | None:
    """Bring a group that trains with fewer workers than wanted back to their number; None: it has it.

    Nothing is refused: places are waited for as long as it takes. If some are ready and no place was found
    for the others for `patience_s`, those that are ready join. Nobody is sought for another `hold_off_s`.
    """
    need = max(wanted - current, 0)
    if joiners.total > need:
        return Drop(joiners.total - need)
    if need == 0:
        return None
    if joiners.ready == need:
        return Proceed(wanted)
    if joiners.ready and not joiners.warming and waited_s >= patience_s:
        return Proceed(current + joiners.ready)
    if joiners.total < need and hold_off_s <= 0:
        return Seek(need - joiners.total)
    return Wait()


def hold_off_s(losses_in_a_row: int, *, first_s: float, cap_s: float) -> float:
    """How long after the last of so many losses nobody is sought: not at all after one, then doubling."""
    if losses_in_a_row < 2:
        return 0.0
    # The exponent is bounded: beyond it every sensible cap is reached, and a float would overflow.
    return float(min(cap_s, first_s * 2.0 ** min(losses_in_a_row - 2, 60)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A worker of the group as it stands."""

    rank: int
    worker: str
    death: str | None = None
    """How its process ended, if it has."""
    outcome: Outcome | None = None
    leaves: bool = False
    """Only there to hand over what it holds."""


@dataclass(frozen=True, slots=True)
class Finished:
    """All ranks have done all steps."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """All ranks have stopped at the same step: for a pause with its checkpoint committed."""

    reason: Wish
    step: int


@dataclass(frozen=True, slots=True)
class Broken:
    """The job's own fault, found by one rank; there is no point in trying again."""

    rank: int | None
    """None: a worker that had no rank yet."""
    failure: Failure


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The job cannot go on as it was asked to: it has spent all that it may on lost workers, say."""

    reason: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The group cannot go on. `ranks`: those whose process is gone; none if only the network broke."""

    ranks: tuple[int, ...]
    cause: str


Ending = Finished | Stopped | Broken | GivenUp | Lost


def judge(members: Sequence[Member], *, failing_s: float, grace_s: float) -> Ending | None:
    """What has become of a group; None while it trains or while that is not yet clear.

    A death explains the failures around it, so it comes first; then the job's own fault. A broken collective
    alone is a symptom: for `grace_s` after the first (`failing_s` ago) its cause may still come to light.
    """
    # One that has handed over what it held is needed no more.
    members = [m for m in members if not (m.leaves and m.outcome and m.outcome.left)]
    dead = [member for member in members if member.death is not None]
    if dead:
        cause = "; ".join(f"rank {member.rank} ({member.worker}): {member.death}" for member in dead)
        return Lost(tuple(member.rank for member in dead), cause)
    failed = [(m.rank, m.outcome.failure) for m in members if m.outcome and m.outcome.failure]
    for rank, failure in failed:
        if failure.fault is Fault.USER:
            return Broken(rank, failure)
    if failed:
        rank, failure = failed[0]
        return Lost((), f"rank {rank}: {failure.message}") if failing_s >= grace_s else None
    outcomes = [member.outcome for member in members]
    if any(outcome is None for outcome in outcomes):
        return None
    first = outcomes[0]
    assert first is not None
    assert all(outcome == first for outcome in outcomes), "all ranks stop at the boundary they agreed on"
    return Finished() if first.reason is None else Stopped(first.reason, first.step)


def losses_spent(*, workers: int, most_workers: int, nodes: int, most_nodes: int) -> GivenUp | None:
    """GivenUp after more lost workers or nodes in this attempt than allowed; None while the job may go on."""
    if workers > most_workers:
        return GivenUp(
            f"{workers} workers were lost, more than recovery.max_worker_losses {most_workers} allows"
        )
    if nodes > most_nodes:
        return GivenUp(f"{nodes} nodes were lost, more than recovery.max_node_losses {most_nodes} allows")
    return None


def outside(bounds: Bounds, wanted: int) -> str | None:
    """Why a job cannot have `wanted` workers, whatever the cluster has; None if it can."""
    if bounds.least <= wanted <= bounds.most:
        return None
    return f"{wanted} workers are outside of the job's bounds, {bounds.least} to {bounds.most}"
