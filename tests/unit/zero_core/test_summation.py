"""Sums whose value does not depend on who adds what."""

import math
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zero_core.summation import EXPANSION, PairwiseTree, RankOrderSum, collect, exact_square_sum, expand

finite = st.floats(allow_nan=False, allow_infinity=False, width=32)


@given(st.lists(finite, max_size=300), st.lists(st.integers(0, 5), max_size=4))
def test_exact_square_sum_ignores_where_whole_tiles_are_cut(values: list[float], cuts: list[int]) -> None:
    whole = torch.tensor(values, dtype=torch.float32)
    edges = sorted({0, *(min(64 * cut, len(values)) for cut in cuts), len(values)})
    parts = [whole[a:b] for a, b in pairwise(edges)]
    want = exact_square_sum([whole])
    assert want is not None
    assert sum((exact_square_sum([part]) or Fraction(0) for part in parts), Fraction(0)) == want
    assert float(want) == pytest.approx(math.fsum(v * v for v in values), rel=1e-12, abs=1e-300)


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False, max_value=1e300, min_value=-1e300), max_size=20)
)
def test_expansions_add_up_exactly(values: list[float]) -> None:
    want = sum(map(Fraction, values), Fraction(0))
    expansion = expand(want)
    assert len(expansion) == EXPANSION
    assert collect([expansion, expand(Fraction(1))]) == want + 1
    assert collect([values]) == want


def test_what_is_not_finite_is_none_and_stays_so() -> None:
    assert exact_square_sum([torch.tensor([1.0, math.inf])]) is None
    assert collect([expand(None), expand(Fraction(1))]) is None


@given(st.integers(1, 20), st.integers(1, 7))
def test_the_tree_depends_on_the_number_of_leaves_alone(leaves: int, per_exchange: int) -> None:
    parts = torch.randn(leaves, 5, generator=torch.Generator().manual_seed(leaves))

    def added(step: int) -> torch.Tensor:
        tree = PairwiseTree(5, leaves=leaves, device=torch.device("cpu"))
        for first in range(0, leaves, step):
            group = list(parts[first : first + step])
            tree.absorb(0, [part[:3] for part in group])
            tree.absorb(3, [part[3:] for part in group])
            tree.end_exchange(len(group))
        tree.finish()
        return tree.owned.clone()

    assert torch.equal(added(per_exchange), added(1))
    torch.testing.assert_close(added(1), parts.sum(0))


def test_a_thousand_ones_in_bf16_are_a_thousand() -> None:
    """bf16 itself stops counting at 256 (DeepSpeed issue 1800)."""
    ones = torch.ones(3, dtype=torch.bfloat16)
    plain = RankOrderSum(torch.zeros(3), counted_elsewhere=False, rounds=1)
    tree = PairwiseTree(3, leaves=1000, device=torch.device("cpu"))
    for total in (plain, tree):
        for _ in range(500):
            total.absorb(0, [ones, ones])
            total.end_exchange(2)
        total.finish()
        assert total.owned.tolist() == [1000.0] * 3
