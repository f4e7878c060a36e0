"""The order of samples: a permutation for each epoch, the same wherever it is computed."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.order import Permutation, SampleOrder, mix


@settings(deadline=None)
@given(size=st.integers(1, 3000), key=st.integers(0, 2**63 - 1))
def test_every_position_has_its_own_image(size: int, key: int) -> None:
    images = Permutation(size, key)(np.arange(size, dtype=np.uint64))
    assert sorted(images.tolist()) == list(range(size))


@settings(deadline=None, max_examples=40)
@given(
    samples=st.integers(1, 200),
    seed=st.integers(0, 2**63 - 1),
    start=st.integers(0, 1000),
    count=st.integers(1, 60),
)
def test_a_range_is_the_same_in_one_piece_or_in_many(samples: int, seed: int, start: int, count: int) -> None:
    order = SampleOrder(samples, seed)
    pieces = [int(order.ids(start + i, 1)[0]) for i in range(count)]
    assert order.ids(start, count).tolist() == pieces


def test_each_epoch_reads_every_sample_once_in_an_order_of_its_own() -> None:
    order = SampleOrder(100, seed=7)
    epochs = [order.ids(epoch * 100, 100).tolist() for epoch in range(3)]
    assert all(sorted(epoch) == list(range(100)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert SampleOrder(100, seed=8).ids(0, 100).tolist() != epochs[0]


def test_places_are_spread_over_the_whole_range() -> None:
    """Neighbouring places read unrelated samples: in a random order they are a third of the range apart."""
    ids = SampleOrder(10_000, seed=1).ids(0, 10_000)
    distance = np.abs(np.diff(ids)).mean()
    assert distance == pytest.approx(10_000 / 3, rel=0.05)
    assert abs(np.corrcoef(ids[:-1], ids[1:])[0, 1]) < 0.05


def test_a_trillion_samples_cost_no_more_than_a_thousand() -> None:
    order = SampleOrder(10**12 + 7, seed=3)
    began = time.perf_counter()
    ids = order.ids(10**12, 4096)  # over the end of the first epoch
    assert time.perf_counter() - began < 30
    assert ids.min() >= 0
    assert ids.max() < 10**12 + 7
    assert len(set(ids[:7].tolist())) == 7


def test_mix_is_a_fixed_function() -> None:
    """Checkpoints outlive versions of Python and numpy: the order may never change under them."""
    assert mix(0, 0) == mix(0, 0)
    assert len({mix(1, 2), mix(2, 1), mix(1, 2, 0), mix(1 << 64, 2)}) == 4
    assert SampleOrder(10, seed=42).ids(0, 10).tolist() == [5, 9, 3, 8, 7, 0, 6, 2, 4, 1]
