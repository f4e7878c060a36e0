"""The layout's arithmetic: every element has exactly one owner, before, after and in between."""

from hypothesis import given
from hypothesis import strategies as st

from zero_core.layout import Layout, ParameterSpec, build_layout, module_units, moves, pulls

shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
tiles = st.integers(1, 64)
worlds = st.integers(1, 1024)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Layouts of up to eight parameters: 0-d, empty, odd, trained and frozen, in a few units."""
    parameters = [
        ParameterSpec(f"{draw(st.sampled_from('abc'))}.{index}", draw(shapes), draw(st.booleans()))
        for index in range(draw(st.integers(1, 8)))
    ]
    return build_layout(parameters, module_units({"a", "b"}), tile=draw(tiles), world_size=draw(worlds))


@given(layouts())
def test_every_element_has_one_owner_and_parts_are_ordered(layout: Layout) -> None:
    for index, unit in enumerate(layout.units):
        reached = 0
        for rank in range(layout.world_size):
            start, stop = layout.owned(index, rank)
            assert start == reached
            assert stop - start <= layout.chunk(index)
            assert start % layout.tile == 0 or start == stop
            reached = stop
        assert reached == unit.numel <= layout.padded(index)


@given(layouts(), worlds)
def test_moves_tile_the_space_and_name_both_owners(old: Layout, world_size: int) -> None:
    new = old.at(world_size)
    reached = dict.fromkeys(range(len(old.units)), 0)
    for move in moves(old, new):
        assert move.start == reached[move.unit] < move.stop
        for layout, owner in ((old, move.source), (new, move.target)):
            start, stop = layout.owned(move.unit, owner)
            assert start <= move.start
            assert move.stop <= stop
        reached[move.unit] = move.stop
    assert reached == {index: unit.numel for index, unit in enumerate(old.units)}


@given(layouts())
def test_nothing_moves_between_equal_layouts(layout: Layout) -> None:
    assert all(move.source == move.target for move in moves(layout, layout))


@given(layouts(), st.data())
def test_pulls_cover_any_range(layout: Layout, data: st.DataObject) -> None:
    unit = data.draw(st.integers(0, len(layout.units) - 1))
    stop = data.draw(st.integers(0, layout.units[unit].numel))
    start = data.draw(st.integers(0, stop))
    reached = start
    for move in pulls(layout, unit=unit, start=start, stop=stop):
        assert move.start == reached
        assert layout.owned(unit, move.source)[0] <= move.start
        reached = move.stop
    assert reached == stop


def test_units_follow_boundaries_and_trainability() -> None:
    parameters = [
        ParameterSpec("embed.weight", (5, 2)),
        ParameterSpec("blocks.0.a", (3,)),
        ParameterSpec("blocks.0.b", (), trainable=False),
        ParameterSpec("blocks.10.a", (3,)),
        ParameterSpec("norm", (2,)),
    ]
    layout = build_layout(
        parameters, module_units({"blocks.0", "blocks.1", "blocks.10"}), tile=2, world_size=2
    )
    assert [(u.name, u.trainable, [s.name for s in u.slots]) for u in layout.units] == [
        ("", True, ["embed.weight", "norm"]),
        ("blocks.0", True, ["blocks.0.a"]),
        ("blocks.0", False, ["blocks.0.b"]),
        ("blocks.10", True, ["blocks.10.a"]),
    ]
    assert layout.units[0].slots[1].offset == 10


def test_planning_for_many_ranks_is_quick_arithmetic() -> None:
    """As many ranges as there are owners, not their product (PyTorch issue 163548)."""
    layout = Layout(
        build_layout([ParameterSpec("w", (10**9,))], lambda _: "", tile=256, world_size=1024).units, 256, 1024
    )
    assert sum(1 for _ in moves(layout, layout.at(1000))) <= 1024 + 1000
