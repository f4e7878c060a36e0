"""Which state a new group goes on from, and which ranges move from whom to whom.

Owns the arithmetic of a handover: what a rank of the old group holds, what one of the new group needs,
which state all of them together still cover, and who sends which elements. A range that a rank holds itself,
as its own part or as a replica of a neighbour's, is copied where it is; nothing is sent twice. Every
participant computes the same plan from the same accounts.

Plain integers: knows neither torch nor a process group, nor where a replica lies.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zero_core.config import ITEM_BYTES
from zero_core.errors import NothingHeldError, ReshardError
from zero_core.layout import Layout
from zero_core.residency import item_bytes

WHOLE = "whole"
"""Kind of the whole parameters that stages 1 and 2 hold in 16 bits beside the owned masters."""

MODEL = "model"
"""Kind of frozen units: parameters without any other state."""

_LEAST_SHARE = 1 << 14
"""Elements below which a range that several hold is not divided among them."""

Key = tuple[int, str]
"""A unit, by index, and a kind of state."""

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Form:
    """What the states of one group look like.

    layout   units, and the cut at its N
    kinds    the kinds of state of a trainable unit: "master" and the optimizer's moments
    buffers  name and bytes of each persistent buffer, in order
    """

    layout: Layout
    stage: int
    precision: str
    kinds: tuple[str, ...]
    buffers: tuple[tuple[str, int], ...] = ()

    @property
    def buffer_bytes(self) -> int:
        return sum(size for _, size in self.buffers)


@dataclass(frozen=True, slots=True, order=True)
class StateId:
    """Names one state of training. Parts are only put together where all of it agrees.

    step        finished steps
    generation  of the group that computed the step: two that did may differ in bits
    revision    edits from outside since that group was formed
    """

    step: int
    generation: int
    revision: int = 0


@dataclass(frozen=True, slots=True)
class Meta:
    """One snapshot as others see it.

    rank     whose part it is, in the group of `form`
    whole    stages 1 and 2: whether the whole parameters are those of this state, too
    replica  a copy, kept by another rank than `rank`
    updates, gate  the optimizer's count and the state of the loss scale
    """

    form: Form
    state: StateId
    rank: int
    whole: bool
    replica: bool
    updates: int
    gate: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Transfer:
    """Elements [start, stop) of a unit, of one kind, from snapshot `held` of participant `source`.

    target  a rank of the new group, which is the participant of that number; equal to `source`: a copy
    """

    unit: int
    kind: str
    start: int
    stop: int
    source: int
    held: int
    target: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What is taken over, and how.

    state, updates, gate  where training stands
    whole         stages 1 and 2: parameters move as they are; False: they are gathered afterwards
    transfers     in an order that is the same for all
    buffers_from  participant, and the number of its snapshot, whose buffers all take
    replica_ranks  old ranks of which only replicas are left
    bytes_moved   by the transfers that are no copies, buffers and gathering included
    bytes_needed  what ranks of the new group do not hold of what they need: the least that can be moved
    """

    state: StateId
    updates: int
    gate: Mapping[str, Any] | None
    whole: bool
    transfers: tuple[Transfer, ...]
    buffers_from: tuple[int, int]
    replica_ranks: tuple[int, ...]
    bytes_moved: int
    bytes_needed: int


@dataclass(frozen=True, slots=True)
class _Holding:
    start: int
    stop: int
    participant: int
    held: int
    replica: bool


def holds(meta: Meta) -> dict[Key, Range]:
    """The range of each unit and kind that a snapshot has."""
    form = meta.form
    found: dict[Key, Range] = {}
    for index, unit in enumerate(form.layout.units):
        own, everything = form.layout.owned(index, meta.rank), (0, unit.numel)
        if not unit.trainable:
            if form.stage == 3 or not meta.replica:  # below stage 3 every rank has them
                found[index, MODEL] = own if form.stage == 3 else everything
            continue
        for kind in form.kinds:
            found[index, kind] = everything if form.stage == 0 else own
        if meta.whole and form.stage in (1, 2):
            # In fp32 masters are the parameters themselves.
            found[index, "master" if form.precision == "fp32" else WHOLE] = everything
    return {key: (start, stop) for key, (start, stop) in found.items() if start < stop}


def needs(form: Form, rank: int, *, whole: bool) -> dict[Key, list[Range]]:
    """The ranges that a rank of the new group must get; parameters only where they move `whole`."""
    found: dict[Key, list[Range]] = {}
    for index, unit in enumerate(form.layout.units):
        own, everything = form.layout.owned(index, rank), (0, unit.numel)
        if not unit.trainable:
            found[index, MODEL] = [own if form.stage == 3 else everything]
            continue
        for kind in form.kinds:
            found[index, kind] = [everything if form.stage == 0 else own]
        if whole and form.stage in (1, 2):
            if form.precision == "fp32":
                found[index, "master"] = [everything]
            else:  # the rank's own part is its masters, rounded
                found[index, WHOLE] = [(0, own[0]), (own[1], unit.numel)]
    return {key: [(a, b) for a, b in ranges if a < b] for key, ranges in found.items()}


def plan(held: Sequence[Sequence[Meta]], new: Form, *, floor_step: int = 0) -> Plan:
    """How the first `new.layout.world_size` participants take over the newest state that all hold together.

    held  every participant's snapshots, in its own order

    Raises ReshardError where snapshots are of another model, precision or optimizer; NothingHeldError where
    no state of `floor_step` or a later step is covered.
    """
    _check_alike(held, new)
    states = sorted({meta.state for metas in held for meta in metas}, reverse=True)
    for state in states:
        if state.step >= floor_step:
            holdings = _holdings(held, state)
            if all(_covers(holdings.get(key, []), ranges) for key, ranges in _everything(new).items()):
                return _plan(held, new, state, holdings)
    raise NothingHeldError(_nothing_held(held, states, floor_step))


def _plan(
    held: Sequence[Sequence[Meta]], new: Form, state: StateId, holdings: Mapping[Key, list[_Holding]]
) -> Plan:
    world = new.layout.world_size
    whole = new.stage in (1, 2) and all(
        _covers(holdings.get(key, []), ranges)
        for rank in range(world)
        for key, ranges in needs(new, rank, whole=True).items()
    )
    transfers: list[Transfer] = []
    loads: Counter[int] = Counter()
    needed = moved = 0
    for target in range(world):
        for key, ranges in needs(new, target, whole=whole).items():
            size = _item_bytes(new, key)
            for start, stop in ranges:
                for transfer in _cut(key, start, stop, target, holdings[key], loads, size):
                    transfers.append(transfer)
                    if transfer.source != target:
                        moved += (transfer.stop - transfer.start) * size
                needed += _lacking(start, stop, target, holdings[key]) * size
    source = _lowest(held, state)
    elsewhere = world - (source[0] < world)
    also = elsewhere * new.buffer_bytes
    if new.stage in (1, 2) and not whole:
        also += (world - 1) * new.layout.numel(trainable=True) * ITEM_BYTES[new.precision]
    chosen = held[source[0]][source[1]]
    return Plan(
        state=state,
        updates=chosen.updates,
        gate=chosen.gate,
        whole=whole,
        transfers=tuple(transfers),
        buffers_from=source,
        replica_ranks=_only_replicas(held, state),
        bytes_moved=moved + also,
        bytes_needed=needed + also,
    )


def _cut(
    key: Key, start: int, stop: int, target: int, holdings: Sequence[_Holding], loads: Counter[int], size: int
) -> Iterator[Transfer]:
    """Elements [start, stop), cut by whom `target` has each part from: itself, an owner, or a replica."""
    while start < stop:
        ranked: dict[int, list[_Holding]] = {}
        end = stop
        for holding in holdings:
            rank = 0 if holding.participant == target else 2 if holding.replica else 1
            if holding.start <= start < holding.stop:
                ranked.setdefault(rank, []).append(holding)
            elif start < holding.start and rank < 2:
                end = min(end, holding.start)  # from there on a better one may do
        best = ranked[min(ranked)]
        if best[0].participant == target:
            chosen = max(best, key=lambda holding: (holding.stop, not holding.replica))
        else:
            chosen = min(best, key=lambda holding: (loads[holding.participant], holding.participant))
            sharers = len({holding.participant for holding in best})
            end = min(end, start + max(_LEAST_SHARE, -(-(stop - start) // sharers)))
        end = min(end, chosen.stop)
        if chosen.participant != target:
            loads[chosen.participant] += (end - start) * size
        yield Transfer(*key, start, end, chosen.participant, chosen.held, target)
        start = end


def _holdings(held: Sequence[Sequence[Meta]], state: StateId) -> dict[Key, list[_Holding]]:
    """Who holds which ranges of the state."""
    found: dict[Key, list[_Holding]] = {}
    for participant, metas in enumerate(held):
        for number, meta in enumerate(metas):
            if meta.state == state:
                for key, (start, stop) in holds(meta).items():
                    holding = _Holding(start, stop, participant, number, meta.replica)
                    found.setdefault(key, []).append(holding)
    return found


def _everything(form: Form) -> dict[Key, list[Range]]:
    """All elements of all kinds that a group cannot do without."""
    return {
        (index, kind): [(0, unit.numel)] if unit.numel else []
        for index, unit in enumerate(form.layout.units)
        for kind in (form.kinds if unit.trainable else (MODEL,))
    }


def _covers(holdings: Sequence[_Holding], ranges: Sequence[Range]) -> bool:
    """Whether all of `ranges` are held, by whomever."""
    merged = _union((holding.start, holding.stop) for holding in holdings)
    return all(any(a <= start and stop <= b for a, b in merged) for start, stop in ranges)


def _lacking(start: int, stop: int, target: int, holdings: Sequence[_Holding]) -> int:
    """Elements of [start, stop) that the target does not hold."""
    own = _union((h.start, h.stop) for h in holdings if h.participant == target)
    return stop - start - sum(max(0, min(b, stop) - max(a, start)) for a, b in own)


def _union(ranges: Iterator[Range]) -> list[Range]:
    """Sorted, disjoint ranges that do not touch."""
    merged: list[Range] = []
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged


def _lowest(held: Sequence[Sequence[Meta]], state: StateId) -> tuple[int, int]:
    """Whose buffers count: the lowest old rank's, as in a checkpoint."""
    order = (
        (meta.rank, meta.replica, participant, number)
        for participant, metas in enumerate(held)
        for number, meta in enumerate(metas)
        if meta.state == state
    )
    _, _, participant, number = min(order)
    return participant, number


def _only_replicas(held: Sequence[Sequence[Meta]], state: StateId) -> tuple[int, ...]:
    metas = [meta for theirs in held for meta in theirs if meta.state == state]
    living = {meta.rank for meta in metas if not meta.replica}
    return tuple(sorted({meta.rank for meta in metas} - living))


def _item_bytes(form: Form, key: Key) -> int:
    unit, kind = key
    if kind == MODEL:
        return item_bytes(form.layout.units[unit].dtype, form.precision)
    return ITEM_BYTES[form.precision] if kind == WHOLE else 4


def _check_alike(held: Sequence[Sequence[Meta]], new: Form) -> None:
    for participant, metas in enumerate(held):
        for meta in metas:
            difference = _difference(meta.form, new)
            if difference:
                raise ReshardError(
                    f"participant {participant} holds the part of rank {meta.rank} of generation "
                    f"{meta.state.generation} after step {meta.state.step}, of {difference}: a state goes on "
                    "only in the same model, precision and kind of optimizer"
                )


def _difference(old: Form, new: Form) -> str | None:
    if old.precision != new.precision:
        return f"precision {old.precision}, and the new group's is {new.precision}"
    if old.kinds != new.kinds:
        return f"states {', '.join(old.kinds)}, and the new group's are {', '.join(new.kinds)}"
    if old.buffers != new.buffers:
        names = sorted({name for name, _ in set(old.buffers) ^ set(new.buffers)})
        return f"buffers that differ from the new group's: {', '.join(names[:5])}"
    if old.layout.units == new.layout.units:
        return None
    theirs = {(s.name, s.shape, u.trainable) for u in old.layout.units for s in u.slots}
    ours = {(s.name, s.shape, u.trainable) for u in new.layout.units for s in u.slots}
    return (
        f"another model (name, shape, trainable): only there {sorted(theirs - ours)[:3]}, only in the new "
        f"group's {sorted(ours - theirs)[:3]}, or grouped into other units"
    )


def _nothing_held(held: Sequence[Sequence[Meta]], states: Sequence[StateId], floor_step: int) -> str:
    told = []
    for state in states[:3]:
        found = {
            (meta.replica, meta.rank, meta.form.layout.world_size)
            for metas in held
            for meta in metas
            if meta.state == state
        }
        parts = [f"{rank} of {n}{' (replica)' if replica else ''}" for replica, rank, n in sorted(found)]
        told.append(f"step {state.step} of generation {state.generation}: ranks {', '.join(parts)}")
    there = "; ".join(told) or "nothing"
    return (
        f"{len(held)} participants hold no whole state of step {floor_step} or later. There is {there}. "
        "Go on from a checkpoint"
    )
