"""What ranks must agree on about frozen parameters, and what the optimizer leaves out."""

from hypothesis import given
from hypothesis import strategies as st

from zero_core.agreement import pack, unpack
from zero_core.config import ZeroConfig
from zero_core.freezing import objection
from zero_core.groups import runs
from zero_core.layout import ParameterSpec, build_layout


def test_objections_name_parameter_and_ranks() -> None:
    names, steppable = ["a", "b", "c"], [True, False, True]
    assert objection(names, steppable, [[True, False, False]] * 3) is None
    differing = objection(names, steppable, [[True, False, True], [False, False, True]])
    assert differing is not None
    assert "parameter a is frozen on rank(s) [1] and trained on rank(s) [0]" in differing
    unfrozen = objection(names, steppable, [[True, False, True], [True, True, True]])
    assert unfrozen is not None
    assert "parameter b was frozen when the engine was built" in unfrozen
    assert "rank(s) [1]" in unfrozen
    assert "freeze it right after" in unfrozen


def test_runs_leave_out_what_is_frozen_for_now() -> None:
    parameters = [ParameterSpec(n, shape) for n, shape in (("a", (8, 8)), ("b", (8, 8)), ("c", (8, 8)))]
    unit = build_layout(parameters, lambda _: "", tile=64, world_size=1).units[0]

    def kept(start: int, stop: int, trained: frozenset[str] | None) -> list[tuple[int, int]]:
        return [(a, b) for a, b, _ in runs(ZeroConfig(), unit, start, stop, trained)]

    assert kept(0, 192, None) == [(0, 192)]
    assert kept(0, 192, frozenset("ac")) == [(0, 64), (128, 192)]
    assert kept(32, 160, frozenset("ac")) == [(0, 32), (96, 128)]
    assert kept(0, 192, frozenset()) == []


@given(st.lists(st.booleans(), max_size=200))
def test_bits_travel_as_numbers(bits: list[bool]) -> None:
    packed = pack(bits)
    assert unpack(packed, len(bits)) == bits
    assert len(packed) == -(-len(bits) // 48)
    assert all(0 <= number < 2**53 for number in packed)
