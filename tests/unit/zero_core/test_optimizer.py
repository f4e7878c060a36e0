"""Where the optimizer cuts a unit: the same places whoever owns the pieces."""

from hypothesis import given
from hypothesis import strategies as st

from zero_core.config import TILE_STEP
from zero_core.layout import ParameterSpec, build_layout
from zero_core.optimizer import decay_runs

shapes = st.lists(st.integers(0, 90), max_size=2).map(tuple)


@given(st.lists(shapes, min_size=1, max_size=8), st.integers(1, 9))
def test_cuts_lie_at_slots_or_at_fixed_steps(sizes: list[tuple[int, ...]], world_size: int) -> None:
    parameters = [ParameterSpec(str(index), shape) for index, shape in enumerate(sizes)]
    layout = build_layout(parameters, lambda _: "", tile=TILE_STEP, world_size=world_size)
    unit = layout.units[0]
    whole = {(a, b, d) for a, b, d in decay_runs(unit, 0, unit.numel)}
    edges = {edge for a, b, _ in whole for edge in (a, b)}
    covered = 0
    for rank in range(world_size):
        start, stop = layout.owned(0, rank)
        for a, b, decays in decay_runs(unit, start, stop):
            assert covered == start + a
            covered = start + b
            # An edge is one of the whole unit's, or falls on a step a vectorised kernel does not notice.
            assert all(edge in edges or edge % TILE_STEP == 0 for edge in (start + a, start + b))
            assert any(x <= start + a and start + b <= y and d == decays for x, y, d in whole)
    assert covered == unit.numel
