"""Whether a checkpoint is whole, how two differ, what a new number of ranks would read."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from tests.unit.zero_core.written import States, make, random_states, write
from zero_core.checkpoint import manifest as manifests
from zero_core.checkpoint.container import CHUNK_BYTES, rank_contents
from zero_core.checkpoint.inspection import Damage, Difference, diff, dry_run, verify
from zero_core.checkpoint.manifest import Manifest
from zero_core.checkpoint.reading import Reader, Want
from zero_core.errors import CheckpointError, DamagedError
from zero_core.layout import Layout, ParameterSpec, build_layout, module_units

BUFFERS = {"calls": (7).to_bytes(8, "little"), "mean": np.arange(3, dtype=np.float32).tobytes()}
TOLD = (("calls", "I64", ()), ("mean", "F32", (3,)))


def layout(world_size: int, *, wide: int = 13) -> Layout:
    parameters = [
        ParameterSpec("embed", (31, wide)),
        ParameterSpec("a.scale", ()),
        ParameterSpec("a.empty", (0, 4)),
        ParameterSpec("a.bias", (7,)),
        ParameterSpec("a.frozen", (11,), trainable=False),
        ParameterSpec("a.table", (5,), trainable=False, dtype="int64"),
    ]
    return build_layout(parameters, module_units({"a"}), tile=64, world_size=world_size)


def small(root: Path, world_size: int = 3) -> tuple[Path, Manifest, States]:
    manifest = make(layout(world_size), buffers=TOLD)
    states = random_states(manifest)
    return write(root, manifest, states, BUFFERS), manifest, states


def test_a_whole_checkpoint_has_nothing_wrong_and_standard_tools_open_it(tmp_path: Path) -> None:
    folder, manifest, _ = small(tmp_path)
    assert verify(folder) == verify(str(folder)) == verify(f"file://{folder}") == []
    for rank in range(3):
        with safe_open(folder / manifests.shard_name(rank), framework="np") as file:
            names = {entry.name for entry in rank_contents(manifest, rank).entries}
            assert set(file.keys()) == names


@pytest.mark.parametrize("name", [*manifests.expected_files(3), manifests.MANIFEST])
def test_a_flipped_bit_anywhere_is_found(tmp_path: Path, name: str) -> None:
    """K15: every byte of every file, header and manifest included."""
    folder, _, _ = small(tmp_path)
    path = folder / name
    whole = path.read_bytes()
    # Headers are padded to a page: all of their text, some of their padding, all of the data.
    text = whole.rstrip(b" ") if name == manifests.MANIFEST else whole[: whole.index(b"     ")]
    padding_ends = whole.rindex(b"     ") if b"     " in whole else len(text)
    places = [
        *range(0, len(text), 7),
        *range(len(text), padding_ends, 501),
        *range(padding_ends, len(whole), 5),
    ]
    for number, place in enumerate(places):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << number % 8
        path.write_bytes(flipped)
        (damage,) = verify(folder)
        assert damage.file == name
        assert damage.start <= place < damage.stop
    path.write_bytes(whole)
    assert verify(folder) == []


def test_damage_in_several_chunks_is_told_for_each(tmp_path: Path) -> None:
    numel = 3 * CHUNK_BYTES // 4 + 5
    manifest = make(
        build_layout([ParameterSpec("w", (numel,))], lambda _: "", tile=64, world_size=1), kinds=("master",)
    )
    folder = write(tmp_path, manifest, random_states(manifest))
    path, head = folder / manifests.shard_name(0), rank_contents(manifest, 0).header_bytes
    data = bytearray(path.read_bytes())
    for place in (head + 1, head + 2 * CHUNK_BYTES + 9, len(data) - 1):
        data[place] ^= 4
    path.write_bytes(data)
    found = verify(folder)
    starts = [head, head + 2 * CHUNK_BYTES, head + 3 * CHUNK_BYTES]
    assert [(d.start, d.stop) for d in found] == [
        (starts[0], starts[0] + CHUNK_BYTES),
        (starts[1], starts[1] + CHUNK_BYTES),
        (starts[2], len(data)),
    ]
    reader = Reader(folder)
    undamaged = reader.fetch([Want("master", 0, CHUNK_BYTES // 4, 2 * CHUNK_BYTES // 4)])[0]
    assert undamaged == bytes(data[head + CHUNK_BYTES : head + 2 * CHUNK_BYTES]), (
        "only what is read is checked"
    )
    with pytest.raises(
        DamagedError, match=rf"rank-00000.safetensors, bytes {starts[0]} to {starts[0] + CHUNK_BYTES}"
    ):
        reader.fetch([Want("master", 0, 5, 6)])


def test_files_that_are_gone_cut_short_or_too_long(tmp_path: Path) -> None:
    folder, _, _ = small(tmp_path)
    first, second, third = (folder / manifests.shard_name(rank) for rank in range(3))
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    third.write_bytes(third.read_bytes() + b"xy")
    found = verify(folder)
    assert [d.file for d in found] == [first.name, second.name, third.name]
    assert "missing" in found[0].what
    assert "ends at byte" in found[1].what
    assert found[2].what == "2 bytes too many"
    (folder / manifests.MANIFEST).unlink()
    (only,) = verify(folder)
    assert only.file == manifests.MANIFEST
    assert isinstance(only, Damage)


def test_old_metadata_over_new_data_is_found(tmp_path: Path) -> None:
    """K15 (DCP, tried): files of another save under a manifest that fits them in size."""
    folder, manifest, _ = small(tmp_path / "a")
    other = write(
        tmp_path / "b", make(manifest.layout, buffers=TOLD), random_states(manifest, seed=6), BUFFERS
    )
    name = manifests.shard_name(1)
    (folder / name).write_bytes((other / name).read_bytes())
    (damage,) = verify(folder)
    assert (damage.file, damage.start) == (name, 0)


def test_a_manifest_of_another_format_says_what_to_do(tmp_path: Path) -> None:
    folder, _, _ = small(tmp_path)
    (folder / manifests.MANIFEST).write_text('{"format": "elastic-zero/1"}')
    (damage,) = verify(folder)
    assert "is of format 'elastic-zero/1'" in damage.what


@pytest.mark.parametrize("worlds", [(3, 3), (3, 5), (1, 7)])
def test_equal_checkpoints_have_no_difference_whatever_n(tmp_path: Path, worlds: tuple[int, int]) -> None:
    folders = [small(tmp_path / str(i), world)[0] for i, world in enumerate(worlds)]
    assert diff(*folders) == []


def test_differences_are_told_by_parameter_and_kind(tmp_path: Path) -> None:
    first, manifest, states = small(tmp_path / "a")
    changed = {key: bytearray(value) for key, value in states.items()}
    units = manifest.layout.units
    where = {s.name: (i, s) for i, unit in enumerate(units) for s in unit.slots}
    for name, kind, size in (("embed", "momentum", 4), ("a.scale", "master", 4), ("a.table", "model", 8)):
        unit, slot = where[name]
        value = changed[kind, unit]
        value[slot.offset * size : slot.offset * size + 4] = np.float32(1.5).tobytes()
        if name == "a.scale":
            base = bytearray(states[kind, unit])
            base[slot.offset * 4 : slot.offset * 4 + 4] = np.float32(1.0).tobytes()
            states[kind, unit] = bytes(base)
    first = write(tmp_path / "c", manifest, states, BUFFERS)
    second = write(
        tmp_path / "b",
        make(layout(2), buffers=TOLD),
        {key: bytes(value) for key, value in changed.items()},
        {**BUFFERS, "calls": (8).to_bytes(8, "little")},
    )
    found = {(d.name, d.kind): d for d in diff(first, second)}
    assert set(found) == {
        ("embed", "momentum"),
        ("a.scale", "master"),
        ("a.table", "model"),
        ("calls", "buffer"),
    }
    assert found["a.scale", "master"] == Difference("a.scale", "master", "values differ", 1, 0.5)
    assert found["a.table", "model"].largest is None
    assert found["calls", "buffer"].elements == 1


def test_other_shapes_kinds_and_names_are_differences(tmp_path: Path) -> None:
    first, _, _ = small(tmp_path / "a")
    other = make(layout(2, wide=11), kinds=("master",), precision="fp32")
    second = write(tmp_path / "b", other, random_states(other), {})
    found = {(d.name, d.kind): d.what for d in diff(first, second)}
    assert found["embed", "master"] == "[31, 13] of F32 in the first, [31, 11] of F32 in the second"
    assert found["embed", "variance"] == "only in the first"
    assert found["a.frozen", "model"] == "[11] of BF16 in the first, [11] of F32 in the second"
    assert found["mean", "buffer"] == "only in the first"


def test_a_dry_run_counts_what_each_rank_would_read(tmp_path: Path) -> None:
    folder, manifest, _ = small(tmp_path)
    all_bytes = sum(size for size, _ in Reader(folder).manifest.files)
    assert dry_run(folder, 1) == [all_bytes]
    assert dry_run(folder, 4, stage=0) == [all_bytes] * 4
    same = dry_run(folder, 3, stage=3)
    # Small files are one chunk: a rank reads its own whole, and the buffers'.
    sizes = [size for size, _ in Reader(folder).manifest.files]
    assert same == [size + sizes[-1] for size in sizes[:-1]]
    with pytest.raises(CheckpointError, match="world_size 0"):
        dry_run(folder, 0)
    assert manifest.world_size == 3


def test_looking_into_a_checkpoint_needs_no_torch() -> None:
    code = "import sys, zero_core.checkpoint.inspection; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
