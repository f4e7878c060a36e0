"""One block handed out in pieces: aligned, apart from each other, and bounded."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zero_core.arena import Arena
from zero_core.budget import ALIGNMENT_BYTES, aligned
from zero_core.errors import ArenaError

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.float64]
requests = st.lists(st.tuples(st.integers(0, 300), st.sampled_from(DTYPES)), max_size=12)


@given(requests)
def test_pieces_are_aligned_and_apart_and_fill_the_block(asked: list[tuple[int, torch.dtype]]) -> None:
    arena = Arena(sum(aligned(numel * dtype.itemsize) for numel, dtype in asked), CPU)
    pieces = [arena.take(numel, dtype) for numel, dtype in asked]
    for index, (piece, (numel, dtype)) in enumerate(zip(pieces, asked, strict=True)):
        assert (piece.shape, piece.dtype) == ((numel,), dtype)
        assert piece.data_ptr() % ALIGNMENT_BYTES == 0
        piece.fill_(index % 2)
    for index, piece in enumerate(pieces):  # nothing has been overwritten by a neighbour
        assert (piece == index % 2).all()
    assert len({piece.untyped_storage().data_ptr() for piece in pieces if piece.numel()}) <= 1
    assert arena.used_bytes == arena.reserved_bytes
    assert arena.padding_bytes == arena.used_bytes - sum(n * d.itemsize for n, d in asked)
    with pytest.raises(ArenaError, match="must be built for all"):
        arena.take(1, torch.uint8)


@given(requests, st.integers(0, 3000))
def test_what_has_no_room_is_refused_and_changes_nothing(asked: Any, total: int) -> None:
    arena = Arena(total, CPU)
    assert arena.reserved_bytes == aligned(total)
    for numel, dtype in asked:
        before, room = arena.used_bytes, arena.has_room(numel, dtype)
        assert room == (before + aligned(numel * dtype.itemsize) <= arena.reserved_bytes)
        if room:
            arena.take(numel, dtype)
        else:
            with pytest.raises(ArenaError, match=f"{numel:,} elements"):
                arena.take(numel, dtype)
            assert arena.used_bytes == before


def test_an_emptied_arena_hands_out_the_same_memory() -> None:
    arena = Arena(1000, CPU)
    first = arena.take(10, torch.float32)
    arena.take(7, torch.uint8)
    arena.empty()
    assert (arena.used_bytes, arena.padding_bytes) == (0, 0)
    assert arena.take(10, torch.float32).data_ptr() == first.data_ptr()


def test_a_write_to_one_piece_is_no_write_to_another() -> None:
    """Autograd counts writes by tensor: one that backward needs must not seem changed by its neighbour."""
    arena = Arena(1000, CPU)
    one, other = arena.take(4, torch.float32), arena.take(4, torch.float32)
    version = one._version
    other.fill_(1.0)
    assert one._version == version


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ArenaError, match="-1 bytes"):
        Arena(-1, CPU)
