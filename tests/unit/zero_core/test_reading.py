"""What is read of a checkpoint: every wanted byte once, few others, each chunk once and verified."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_core.checkpoint.container import MODEL, item_bytes, kinds_of, rank_contents, tensor_name
from zero_core.checkpoint.reading import ChunkRead, Want, chunk_reads, plan
from zero_core.layout import Layout, ParameterSpec, build_layout, module_units

KINDS = ("master", "momentum", "variance")
PRIMES = (1, 2, 3, 7, 13, 31, 61, 127, 251)


@dataclass(frozen=True)
class Described:
    layout: Layout
    kinds: tuple[str, ...] = KINDS
    precision: str = "bf16"


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """0-d, empty and prime sizes, trained and frozen, a table of integers; often fewer elements than ranks."""
    parameters = []
    for index in range(draw(st.integers(1, 7))):
        shape = draw(st.one_of(st.just(()), st.just((0, 3)), st.sampled_from(PRIMES).map(lambda n: (n,))))
        dtype = draw(st.sampled_from(["compute", "compute", "uint8", "int64"]))
        trained = dtype == "compute" and draw(st.booleans())
        parameters.append(ParameterSpec(f"{draw(st.sampled_from('abc'))}.{index}", shape, trained, dtype))
    return build_layout(
        parameters, module_units({"a", "b"}), tile=draw(st.sampled_from([1, 4, 64])), world_size=1
    )


def wants_of(described: Described, rank: int) -> list[Want]:
    """What a rank of `described.layout` will hold."""
    layout = described.layout
    return [
        Want(kind, unit, *layout.owned(unit, rank))
        for unit in range(len(layout.units))
        for kind in kinds_of(described, unit)
    ]


def item(described: Described, kind: str, unit: int) -> int:
    if kind != MODEL:
        return 4
    return {"compute": 2, "uint8": 1, "int64": 8}[described.layout.units[unit].dtype]


def whole(described: Described) -> dict[tuple[str, int], bytes]:
    """Bytes of every kind of every unit, all of them different from their neighbours."""
    rng = np.random.default_rng(5)
    return {
        (kind, unit): rng.bytes(described.layout.units[unit].numel * item(described, kind, unit))
        for unit in range(len(described.layout.units))
        for kind in kinds_of(described, unit)
    }


def files(described: Described, states: dict[tuple[str, int], bytes]) -> list[bytes]:
    """The data sections of all ranks' files."""
    found = []
    for rank in range(described.layout.world_size):
        data = b""
        for entry in rank_contents(described, rank).entries:
            kind, _, unit = entry.name.partition("/")
            start, stop = described.layout.owned(int(unit), rank)
            size = item_bytes(entry.dtype)
            assert entry.start == len(data)
            data += states[kind, int(unit)][start * size : stop * size]
        found.append(data)
    return found


def carry_out(old: Described, wants: Sequence[Want], data: Sequence[bytes], chunk_bytes: int) -> list[bytes]:
    """What the plan brings, with all that must hold of it checked on the way."""
    entries = [rank_contents(old, rank).by_name for rank in range(old.layout.world_size)]

    def place(rank: int, kind: str, unit: int) -> tuple[int, int]:
        entry = entries[rank][tensor_name(kind, unit)]
        return entry.start, item_bytes(entry.dtype)

    targets = [bytearray((w.stop - w.start) * item(old, w.kind, w.unit)) for w in wants]
    written = [np.zeros(len(target), dtype=int) for target in targets]
    for file, pieces in plan(old.layout, wants, place).items():
        chunks: list[ChunkRead] = list(chunk_reads(pieces, chunk_bytes, len(data[file])))
        assert all(a.index < b.index for a, b in pairwise(chunks)), "no chunk is read twice"
        runs = 1 + sum(a.stop != b.start for a, b in pairwise(pieces))
        wanted = sum(piece.stop - piece.start for piece in pieces)
        assert sum(c.stop - c.start for c in chunks) <= wanted + 2 * chunk_bytes * runs
        for chunk in chunks:
            assert chunk.start == chunk.index * chunk_bytes
            assert chunk.stop == min(chunk.start + chunk_bytes, len(data[file]))
            for piece in chunk.pieces:
                assert chunk.start <= piece.start < piece.stop <= chunk.stop
                end = piece.offset + piece.stop - piece.start
                targets[piece.want][piece.offset : end] = data[file][piece.start : piece.stop]
                written[piece.want][piece.offset : end] += 1
    assert all((counts == 1).all() for counts in written), "every wanted byte exactly once"
    return [bytes(target) for target in targets]


@settings(max_examples=8, deadline=None)
@given(layouts(), st.sampled_from([8, 24, 64, 1 << 22]))
def test_every_rank_of_any_m_gets_its_bytes_from_any_n_each_once(layout: Layout, chunk_bytes: int) -> None:
    """K3, K4, K5: all (N, M) in 1..9 squared; prime totals, longer tails, empty and 0-d parameters."""
    states = whole(Described(layout))
    for n in range(1, 10):
        old = Described(layout.at(n))
        data = files(old, states)
        for m in range(1, 10):
            new = Described(layout.at(m))
            for rank in range(m):
                wants = wants_of(new, rank)
                for want, got in zip(wants, carry_out(old, wants, data, chunk_bytes), strict=True):
                    size = item(old, want.kind, want.unit)
                    expected = states[want.kind, want.unit][want.start * size : want.stop * size]
                    assert got == expected, (n, m, rank, want)


@settings(max_examples=60, deadline=None)
@given(layouts(), st.integers(1, 9), st.sampled_from([8, 64]), st.data())
def test_any_ranges_are_read_exactly(layout: Layout, n: int, chunk_bytes: int, data: st.DataObject) -> None:
    old = Described(layout.at(n))
    states = whole(old)
    wants = []
    for kind, unit in states:
        stop = data.draw(st.integers(0, layout.units[unit].numel))
        wants.append(Want(kind, unit, data.draw(st.integers(0, stop)), stop))
    for want, got in zip(wants, carry_out(old, wants, files(old, states), chunk_bytes), strict=True):
        size = item(old, want.kind, want.unit)
        assert got == states[want.kind, want.unit][want.start * size : want.stop * size]


@pytest.mark.parametrize("m", [1, 2, 1023, 2047, 2048, 4096])
def test_planning_takes_as_much_as_is_read_whatever_n(m: int) -> None:
    """K14 (PyTorch 163548): counted, not timed: one question for each piece, and few pieces."""
    parameters = [ParameterSpec(f"blocks.{i // 10}.p{i}", (1009, 1 + i % 97)) for i in range(1000)]
    units = module_units({f"blocks.{block}" for block in range(100)})
    layout = build_layout(parameters, units, tile=64, world_size=2048)
    new = Described(layout.at(m))
    asked: list[int] = []

    def place(rank: int, kind: str, unit: int) -> tuple[int, int]:
        asked.append(rank)
        start, _ = layout.owned(unit, rank)
        return 4 * (start + layout.units[unit].numel * KINDS.index(kind)) + (unit << 40), 4

    for rank in {0, m // 2, m - 1}:
        asked.clear()
        wants = wants_of(new, rank)
        found = plan(layout, wants, place)
        chunks = sum(len(list(chunk_reads(pieces, 1 << 22, 1 << 60))) for pieces in found.values())
        # Each range of a unit touches the owners it overlaps and no other.
        overlaps = sum(
            -(-(want.stop - want.start) // layout.chunk(want.unit)) + 1
            for want in wants
            if want.stop > want.start
        )
        assert len(asked) == sum(len(pieces) for pieces in found.values()) <= overlaps
        assert chunks <= 2 * len(asked)


def test_a_piece_of_many_chunks_touches_each_once() -> None:
    old = Described(
        build_layout([ParameterSpec("w", (1000,))], lambda _: "", tile=1, world_size=1), ("master",)
    )
    found = plan(old.layout, [Want("master", 0, 3, 990)], lambda *_: (0, 4))
    chunks = list(chunk_reads(found[0], 64, 4000))
    assert [chunk.index for chunk in chunks] == list(range(62))
    assert (chunks[0].start, chunks[0].stop, chunks[0].pieces[0].start) == (0, 64, 12)
    assert chunks[-1].stop == 3968
    assert chunks[-1].pieces[0].stop == 3960
