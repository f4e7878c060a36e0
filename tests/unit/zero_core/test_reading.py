"""What is read of a checkpoint: every wanted byte once, few others, each block once and verified."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.zero_core.written import States, data_of, make, random_states, write
from zero_core.checkpoint import manifest as manifests
from zero_core.checkpoint.container import (
    BLOCK_BYTES,
    CHUNK_BYTES,
    DIGEST_DIGITS,
    item_bytes,
    kind_dtype,
    rank_contents,
)
from zero_core.checkpoint.manifest import Manifest
from zero_core.checkpoint.reading import (
    FileRead,
    Piece,
    Places,
    Reader,
    Stretch,
    Want,
    plan,
    stretches,
    wants_of,
)
from zero_core.checkpoint.store import Fill, LocalStore
from zero_core.errors import DamagedError
from zero_core.layout import Layout, ParameterSpec, build_layout, module_units

KINDS = ("master", "momentum", "variance")
PRIMES = (1, 2, 3, 7, 13, 31, 61, 127, 251)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """0-d, empty and prime sizes, trained and frozen, integers; often fewer elements than ranks."""
    parameters = []
    for index in range(draw(st.integers(1, 7))):
        shape = draw(st.one_of(st.just(()), st.just((0, 3)), st.sampled_from(PRIMES).map(lambda n: (n,))))
        dtype = draw(st.sampled_from(["compute", "compute", "uint8", "int64"]))
        trained = dtype == "compute" and draw(st.booleans())
        parameters.append(ParameterSpec(f"{draw(st.sampled_from('abc'))}.{index}", shape, trained, dtype))
    return build_layout(
        parameters, module_units({"a", "b"}), tile=draw(st.sampled_from([1, 4, 64])), world_size=1
    )


def at(layout: Layout, world_size: int, kinds: tuple[str, ...] = KINDS) -> Manifest:
    return make(layout.at(world_size), kinds=kinds)


def item(manifest: Manifest, kind: str, unit: int) -> int:
    return item_bytes(kind_dtype(manifest, unit, kind))


def files(manifest: Manifest, states: States) -> list[bytes]:
    return [data_of(manifest, states, rank) for rank in range(manifest.world_size)]


def carry_out(old: Manifest, wants: Sequence[Want], data: Sequence[bytes], block_bytes: int) -> list[bytes]:
    """What the plan brings, with all that must hold of it checked on the way."""
    place = Places(old)
    for rank, data_section in enumerate(data):
        assert place.data_bytes(rank) == len(data_section)
        for entry in rank_contents(old, rank).entries:
            kind, _, unit = entry.name.partition("/")
            assert place(rank, kind, int(unit)) == (entry.start, item_bytes(entry.dtype))
    targets = [bytearray((w.stop - w.start) * item(old, w.kind, w.unit)) for w in wants]
    written = [np.zeros(len(target), dtype=int) for target in targets]
    for file, pieces in plan(old.layout, wants, place).items():
        found: list[Stretch] = list(stretches(pieces, block_bytes, len(data[file])))
        assert all(a.stop < b.start for a, b in pairwise(found)), "no block is read twice"
        runs = 1 + sum(a.stop != b.start for a, b in pairwise(pieces))
        wanted = sum(piece.stop - piece.start for piece in pieces)
        assert sum(s.stop - s.start for s in found) <= wanted + 2 * block_bytes * runs
        for stretch in found:
            strips = list(stretch.strips(3 * block_bytes))
            assert [s.start for s in strips] == list(range(stretch.start, stretch.stop, 3 * block_bytes))
            assert [*(s.start for s in strips[1:]), stretch.stop] == [s.stop for s in strips]
            assert stretch.start % block_bytes == 0
            assert stretch.stop % block_bytes == 0 or stretch.stop == len(data[file])
            for strip in strips:
                for piece in strip.pieces:
                    assert strip.start <= piece.start < piece.stop <= strip.stop
                    end = piece.offset + piece.stop - piece.start
                    targets[piece.want][piece.offset : end] = data[file][piece.start : piece.stop]
                    written[piece.want][piece.offset : end] += 1
    assert all((counts == 1).all() for counts in written), "every wanted byte exactly once"
    return [bytes(target) for target in targets]


@settings(max_examples=15, deadline=None)
@given(layouts(), st.sampled_from([8, 24, 64, 1 << 22]))
def test_every_rank_of_any_m_gets_its_bytes_from_any_n_each_once(layout: Layout, block_bytes: int) -> None:
    """K3, K4, K5: all (N, M) in 1..9 squared; prime totals, longer tails, empty and 0-d parameters."""
    states = random_states(at(layout, 1))
    for n in range(1, 10):
        old = at(layout, n)
        data = files(old, states)
        for m in range(1, 10):
            new = layout.at(m)
            for rank in range(m):
                wants = wants_of(old, new, stage=3, rank=rank)
                for want, got in zip(wants, carry_out(old, wants, data, block_bytes), strict=True):
                    size = item(old, want.kind, want.unit)
                    expected = states[want.kind, want.unit][want.start * size : want.stop * size]
                    assert got == expected, (n, m, rank, want)


@settings(max_examples=60, deadline=None)
@given(layouts(), st.integers(1, 9), st.sampled_from([8, 64]), st.data())
def test_any_ranges_are_read_exactly(layout: Layout, n: int, block_bytes: int, data: st.DataObject) -> None:
    old = at(layout, n)
    states = random_states(old)
    wants = []
    for kind, unit in states:
        stop = data.draw(st.integers(0, layout.units[unit].numel))
        wants.append(Want(kind, unit, data.draw(st.integers(0, stop)), stop))
    for want, got in zip(wants, carry_out(old, wants, files(old, states), block_bytes), strict=True):
        size = item(old, want.kind, want.unit)
        assert got == states[want.kind, want.unit][want.start * size : want.stop * size]


@pytest.mark.parametrize("m", [1, 64, 1023, 2047, 2048, 4096])
def test_planning_takes_as_much_as_is_read_whatever_n(m: int) -> None:
    """K14 (PyTorch 163548): counted, not timed: one question for each piece, and few pieces."""
    parameters = [ParameterSpec(f"blocks.{i // 10}.p{i}", (1009, 1 + i % 97)) for i in range(1000)]
    units = module_units({f"blocks.{block}" for block in range(100)})
    layout = build_layout(parameters, units, tile=64, world_size=2048)
    new = layout.at(m)
    manifest = at(layout, 2048)
    asked: list[int] = []
    places = Places(manifest)

    def place(rank: int, kind: str, unit: int) -> tuple[int, int]:
        asked.append(rank)
        return places(rank, kind, unit)

    for rank in {0, m // 2, m - 1}:
        asked.clear()
        wants = wants_of(manifest, new, stage=3, rank=rank)
        found = plan(layout, wants, place)
        runs = sum(len(list(stretches(pieces, BLOCK_BYTES, 1 << 60))) for pieces in found.values())
        # Each range of a unit touches the owners it overlaps and no other.
        overlaps = sum(
            -(-(want.stop - want.start) // layout.chunk(want.unit)) + 1
            for want in wants
            if want.stop > want.start
        )
        assert len(asked) == sum(len(pieces) for pieces in found.values()) <= overlaps
        assert runs <= len(asked)


def test_blocks_that_follow_each_other_are_one_stretch() -> None:
    pieces = [Piece(12, 50, 0, 0), Piece(60, 70, 1, 0), Piece(200, 3960, 2, 8), Piece(3970, 3970, 3, 0)]
    first, second = stretches(pieces, 64, 4000)
    assert (first.start, first.stop, first.pieces) == (0, 128, tuple(pieces[:2]))
    assert (second.start, second.stop, second.pieces) == (192, 3968, tuple(pieces[2:3]))
    assert list(first.strips(64)) == [
        Stretch(0, 64, (pieces[0], Piece(60, 64, 1, 0))),
        Stretch(64, 128, (Piece(64, 70, 1, 4),)),
    ]
    assert [strip.stop for strip in second.strips(1280)] == [1472, 2752, 3968]
    (whole,) = stretches([Piece(3, 3990, 0, 0)], 64, 4000)
    assert (whole.start, whole.stop) == (0, 4000), "the last block is short"


def test_damage_is_told_of_by_its_block(tmp_path: Path) -> None:
    layout = build_layout([ParameterSpec("w", (3 << 20,))], lambda _: "", tile=64, world_size=1)
    manifest = make(layout, kinds=("master",))
    folder = write(tmp_path, manifest, random_states(manifest))
    path, head = folder / manifests.shard_name(0), rank_contents(manifest, 0).header_bytes
    data = bytearray(path.read_bytes())
    data[head + CHUNK_BYTES + 5 * BLOCK_BYTES + 1] ^= 1
    path.write_bytes(data)
    reader, target = Reader(folder), bytearray(12 << 20)
    reads = reader.plan([Want("master", 0, 0, 3 << 20)])
    start = head + CHUNK_BYTES + 5 * BLOCK_BYTES
    with pytest.raises(DamagedError, match=f"bytes {start} to {start + BLOCK_BYTES}"):
        list(reader.read(reads, [memoryview(target)]))
    assert [(found.start, found.stop) for found in reader.damage(0)] == [(start, start + BLOCK_BYTES)]


@pytest.mark.parametrize("block_bytes", [4096, 1 << 18, CHUNK_BYTES])
def test_blocks_are_as_large_as_the_manifest_says(tmp_path: Path, block_bytes: int) -> None:
    layout = build_layout([ParameterSpec("w", (2_000_003,))], lambda _: "", tile=64, world_size=2)
    manifest = make(layout, kinds=("master",), block_bytes=block_bytes)
    states = random_states(manifest)
    folder = write(tmp_path, manifest, states)
    reader = Reader(folder)
    assert reader.manifest.block_bytes == block_bytes
    wanted = Want("master", 0, 17, 1_900_000)
    reads, target = reader.plan([wanted]), bytearray(4 * (wanted.stop - wanted.start))
    list(reader.read(reads, [memoryview(target)]))
    assert target == states["master", 0][4 * wanted.start : 4 * wanted.stop]
    assert reader.fetch([wanted]) == [target]
    path, head = folder / manifests.shard_name(1), reader.contents(1).header_bytes
    data = bytearray(path.read_bytes())
    data[head + 70_000] ^= 1
    path.write_bytes(data)
    begin = head + 70_000 // block_bytes * block_bytes
    (found,) = Reader(folder).damage(1)
    assert (found.start, found.stop) == (begin, min(begin + block_bytes, len(data)))
    with pytest.raises(DamagedError, match=f"bytes {found.start} to {found.stop}"):
        list(Reader(folder).read(reads, [memoryview(target)]))


def test_a_chunk_that_its_digest_belies_is_damage_even_if_its_blocks_are_right(tmp_path: Path) -> None:
    """Loads look at blocks: only going through a whole file shows that digests of chunks are wrong."""
    layout = build_layout([ParameterSpec("w", (3 << 20,))], lambda _: "", tile=64, world_size=1)
    manifest = make(layout, kinds=("master",))
    folder = write(tmp_path, manifest, random_states(manifest))
    contents = rank_contents(manifest, 0)
    reader = Reader(folder)
    right = reader._digests_of(0)
    wrong = right.chunks[: 2 * DIGEST_DIGITS] + "0" * DIGEST_DIGITS
    reader._digests[0] = right._replace(chunks=wrong)
    (found,) = reader.damage(0)
    assert (found.start, found.stop) == tuple(contents.header_bytes + at for at in contents.chunk(2))


class Counting(LocalStore):
    """Notes every read: file, first byte, bytes."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads: list[tuple[str, int, int]] = []

    @contextmanager
    def reading(self, path: str) -> Iterator[Fill]:
        with super().reading(path) as real:

            def fill(offset: int, buffers: Sequence[memoryview]) -> None:
                self.reads.append((path, offset, sum(map(len, buffers))))
                real(offset, buffers)

            yield fill


def big(root: Path, n: int) -> tuple[Path, Manifest, States]:
    """About three blocks for each rank at n = 3, prime sizes."""
    parameters = [
        ParameterSpec(f"p{i}", (numel,)) for i, numel in enumerate((1_000_003, 3_000_017, 1, 250_007))
    ]
    layout = build_layout(parameters, lambda name: name, tile=64, world_size=n)
    manifest = make(layout, kinds=("master", "momentum"))
    states = random_states(manifest)
    return write(root, manifest, states), manifest, states


@pytest.mark.parametrize(("n", "m"), [(3, 3), (3, 2), (2, 5), (1, 4)])
def test_a_reader_reads_straight_into_targets_each_block_once(tmp_path: Path, n: int, m: int) -> None:
    """K5: no more than the slice, the headers and the blocks that ranges begin and end in."""
    folder, manifest, states = big(tmp_path, n)
    for rank in range(m):
        store = Counting(folder)
        reader = Reader(store)
        wants = wants_of(manifest, manifest.layout.at(m), stage=1, rank=rank)
        targets = [bytearray(4 * (want.stop - want.start)) for want in wants]
        reads = reader.plan(wants)
        told = sum(reader.read(reads, [memoryview(target) for target in targets]))
        for want, target in zip(wants, targets, strict=True):
            assert target == states[want.kind, want.unit][4 * want.start : 4 * want.stop]
        heads = sum(reader.contents(read.file).header_bytes for read in reads)
        assert sum(size for _, _, size in store.reads) == told + heads
        assert len(set(store.reads)) == len(store.reads)
        ranges = sum(1 + sum(a.stop != b.start for a, b in pairwise(_pieces(read))) for read in reads)
        assert told <= sum(map(len, targets)) + 2 * BLOCK_BYTES * ranges
        if n == m:
            assert told == sum(map(len, targets)), "its own file, and no byte more"


def _pieces(read: FileRead) -> list[Piece]:
    return [piece for stretch in read.stretches for piece in stretch.pieces]


@pytest.mark.parametrize("remote", [False, True])
def test_functions_and_many_small_pieces_get_verified_bytes(tmp_path: Path, remote: bool) -> None:
    folder, manifest, states = big(tmp_path, 2)
    wants = [Want("master", 1, 7 * i, 7 * i + 3) for i in range(300)] + [Want("momentum", 1, 10, 2_900_000)]
    found = [bytearray(4 * (want.stop - want.start)) for want in wants]

    def put(offset: int, view: memoryview) -> None:
        assert offset % 4 == len(view) % 4 == 0, "whole elements"
        found[-1][offset : offset + len(view)] = view

    reader = Reader(f"file://{folder}" if remote else folder, manifest=None)
    targets = [*(memoryview(target) for target in found[:-1]), put]
    assert sum(reader.read(reader.plan(wants), targets)) > 0
    for want, target in zip(wants, found, strict=True):
        assert target == states[want.kind, want.unit][4 * want.start : 4 * want.stop]
    path = folder / "rank-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    reader = Reader(folder, manifest=reader.manifest)
    numel = manifest.layout.units[3].numel
    with pytest.raises(DamagedError, match=r"rank-00001.safetensors, bytes .* not what was written"):
        reader.fetch([Want("momentum", 3, numel - 1, numel)])
