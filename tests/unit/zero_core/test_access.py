"""Fingerprints of tensors, and the verdict over all ranks' edits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zero_core.access import fingerprint, verdict


@given(st.integers(1, 300), st.data())
def test_any_changed_element_changes_the_fingerprint(numel: int, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8]))
    tensor = torch.arange(numel).to(dtype)
    same = tensor.clone()
    assert fingerprint(tensor) == fingerprint(same)
    at = data.draw(st.integers(0, numel - 1))
    same[at] = data.draw(st.integers(0, 255).filter(lambda v: torch.tensor(v).to(dtype) != tensor[at]))
    assert fingerprint(tensor) != fingerprint(same)


def test_fingerprints_look_at_bits_and_places() -> None:
    assert fingerprint(torch.tensor([0.0])) != fingerprint(torch.tensor([-0.0]))
    assert fingerprint(torch.tensor([torch.nan])) == fingerprint(torch.tensor([torch.nan]))
    assert fingerprint(torch.tensor([1.0, 2.0])) != fingerprint(torch.tensor([2.0, 1.0]))
    assert fingerprint(torch.empty(0)) != fingerprint(torch.zeros(1))
    long = torch.zeros(200_000)
    swapped = long.clone()
    long[3], swapped[3 + (1 << 16)] = 1, 1  # the same place of two runs
    assert fingerprint(long) != fingerprint(swapped)


OK = [0.0, 0.0]


@pytest.mark.parametrize(
    ("rows", "write", "says"),
    [
        ([[*OK, 0, 1, 2], [*OK, 0, 1, 2]], False, None),
        ([[*OK, 1, 1, 3], [*OK, 1, 1, 3]], True, None),
        ([[*OK, 1, 1, 3], [*OK, 0, 1, 2]], True, "parameter w holds other values on rank(s) [1]"),
        ([[*OK, 0, 1, 2], [*OK, 1, 1, 3]], False, "parameter w was modified on rank(s) [1]"),
        ([[0.0, 0.0, 1, 1, 3], [1.0, 0.0, 1, 1, 3]], True, "rank(s) [1] failed"),
        ([[0.0, 1.0, 0, 1, 2], [*OK, 0, 1, 2]], True, "rank(s) [0] gave a parameter another shape"),
    ],
)
def test_verdicts(rows: list[list[float]], write: bool, says: str | None) -> None:
    found = verdict(["w"], rows, write=write)
    assert (found is None) if says is None else (found is not None and says in found)
