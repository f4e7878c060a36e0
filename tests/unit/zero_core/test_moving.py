"""The plan of a handover: every needed element once, none that is there already, from whom it is whole."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_core.errors import NothingHeldError, ReshardError
from zero_core.layout import ParameterSpec, build_layout, module_units
from zero_core.moving import Form, Meta, StateId, holds, needs, plan

NOW = StateId(7, 2)
KINDS = ("master", "momentum", "variance")


def form(
    sizes: list[int], world: int, stage: int, precision: str = "fp32", frozen: frozenset[int] = frozenset()
) -> Form:
    """One unit for each size; those in `frozen` are not trained."""
    parameters = [
        ParameterSpec(f"u{i}.w", (size,), trainable=i not in frozen) for i, size in enumerate(sizes)
    ]
    names = [f"u{i}" for i in range(len(sizes))]
    layout = build_layout(parameters, module_units(names), tile=64, world_size=world)
    return Form(layout, stage, precision, KINDS, (("b", 8),))


def live(old: Form, rank: int, *, state: StateId = NOW, whole: bool = True) -> Meta:
    return Meta(old, state, rank, whole and old.stage in (1, 2), False, state.step, None)


def replica(old: Form, rank: int, *, state: StateId = NOW) -> Meta:
    return Meta(old, state, rank, False, True, state.step, None)


@st.composite
def handovers(draw: st.DrawFn) -> tuple[list[list[Meta]], Form, set[int]]:
    """Old ranks in any places among the participants; one may be lost, its replica with the next one."""
    sizes = draw(st.lists(st.integers(0, 700) | st.integers(40_000, 60_000), min_size=1, max_size=4))
    frozen = frozenset(draw(st.sets(st.integers(0, len(sizes) - 1), max_size=1)))
    stage, precision = draw(st.integers(0, 3)), draw(st.sampled_from(["fp32", "bf16"]))
    before, after = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    old = form(sizes, before, stage, precision, frozen)
    replicated = draw(st.booleans()) and before > 1 and stage > 0
    whole = draw(st.booleans())
    lost = {draw(st.integers(0, before - 1))} if replicated and draw(st.booleans()) else set()
    participants = max(after, before - len(lost)) + draw(st.integers(0, 2))
    places = draw(st.permutations(range(participants)))
    held: list[list[Meta]] = [[] for _ in range(participants)]
    for place, rank in zip(places, [r for r in range(before) if r not in lost], strict=False):
        held[place].append(live(old, rank, whole=whole))
        if replicated:
            held[place] += [live(old, rank, whole=False), replica(old, (rank - 1) % before)]
    return held, form(sizes, after, stage, precision, frozen), lost


@settings(max_examples=300, deadline=None)
@given(handovers())
def test_every_needed_element_comes_once_and_from_where_it_is(
    case: tuple[list[list[Meta]], Form, set[int]],
) -> None:
    held, new, lost = case
    chosen = plan(held, new)
    assert set(chosen.replica_ranks) == lost
    moved = 0
    for target in range(new.layout.world_size):
        mine = [holds(meta) for meta in held[target]]
        for key, ranges in needs(new, target, whole=chosen.whole).items():
            wanted = Counter(element for a, b in ranges for element in range(a, b, 32))
            came: Counter[int] = Counter()
            for t in chosen.transfers:
                if t.target != target or (t.unit, t.kind) != key:
                    continue
                assert 0 <= t.start < t.stop
                start, stop = holds(held[t.source][t.held])[key]
                assert start <= t.start < t.stop <= stop, "from where it is"
                came.update(e for e in range(-(-t.start // 32) * 32, t.stop, 32))
                if t.source != target:
                    there = [own[key] for own in mine if key in own]
                    assert not any(a < t.stop and t.start < b for a, b in there), "it holds that itself"
                    size = 2 if key[1] == "whole" or (key[1] == "model" and new.precision == "bf16") else 4
                    moved += (t.stop - t.start) * size
            assert came == wanted
            total = sum(
                t.stop - t.start for t in chosen.transfers if t.target == target and (t.unit, t.kind) == key
            )
            assert total == sum(b - a for a, b in ranges)
    source, number = chosen.buffers_from
    assert held[source][number].rank == min(meta.rank for metas in held for meta in metas)
    assert chosen.bytes_needed <= chosen.bytes_moved <= 1.05 * chosen.bytes_needed
    assert chosen.bytes_moved >= moved


def test_of_what_several_hold_each_gives_a_share() -> None:
    old = form([400_000], 3, 0)
    chosen = plan([[live(old, rank)] for rank in range(3)] + [[]], form([400_000], 4, 0))
    given_by = Counter[int]()
    for t in chosen.transfers:
        if t.source != t.target:
            assert t.target == 3
            given_by[t.source] += t.stop - t.start
    assert set(given_by) == {0, 1, 2}
    assert max(given_by.values()) <= 1.2 * min(given_by.values())


def test_the_newest_state_that_is_covered_is_taken() -> None:
    old, new = form([1000], 3, 2, "bf16"), form([1000], 2, 2, "bf16")
    before = StateId(6, 2)
    slots = [live(old, rank, state=before, whole=False) for rank in (0, 1)]
    survivors = [
        [live(old, 0), slots[0], replica(old, 2, state=before)],
        [slots[1], replica(old, 0, state=before)],
    ]
    chosen = plan(survivors, new)
    assert chosen.state == before, "of step 7 rank 1 has nothing, and rank 2 is lost"
    assert chosen.replica_ranks == (2,)
    assert not chosen.whole, "nobody has the parameters of step 6 in 16 bits any more"
    with pytest.raises(NothingHeldError, match="no whole state of step 7 or later"):
        plan(survivors, new, floor_step=7)


def test_two_neighbours_lost_is_nothing_held() -> None:
    old = form([1000], 4, 2)
    held = [[live(old, 0), replica(old, 3)], [live(old, 1), replica(old, 0)]]
    with pytest.raises(NothingHeldError, match=r"ranks 0 of 4, 1 of 4, 0 of 4 \(replica\), 3 of 4"):
        plan(held, form([1000], 2, 2))


def test_histories_of_one_step_are_not_mixed() -> None:
    old = form([1000], 2, 2)
    held = [[live(old, 0)], [live(old, 1, state=replace(NOW, generation=1))]]
    with pytest.raises(NothingHeldError):
        plan(held, form([1000], 2, 2))


def test_parts_of_two_cuts_are_put_together() -> None:
    """A rank whose handover was complete has dropped its old part; another still holds only that."""
    old, newer = form([1280], 2, 3), form([1280], 4, 3)
    held = [[live(old, 1)], [live(newer, 1)], [live(newer, 0)]]
    chosen = plan(held, form([1280], 3, 3))
    assert chosen.state == NOW


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"precision": "bf16"}, "precision bf16"),
        ({"kinds": ("master", "momentum")}, "states master, momentum"),
        ({"buffers": ()}, "buffers that differ from the new group's: b"),
        ({"layout": form([5], 2, 2).layout}, r"another model .*u0\.w"),
    ],
)
def test_another_kind_of_state_is_refused(change: dict[str, object], said: str) -> None:
    old = form([1000], 2, 2)
    held = [[live(old, 0)], [live(replace(old, **change), 1)]]
    with pytest.raises(ReshardError, match=f"participant 1 holds the part of rank 1 .*{said}"):
        plan(held, old)
