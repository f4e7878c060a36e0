"""Which folders count as checkpoints, what a manifest may say, and what deletion leaves."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zero_core.checkpoint import manifest
from zero_core.checkpoint.container import digest
from zero_core.checkpoint.manifest import Manifest
from zero_core.errors import CheckpointError, FencedError
from zero_core.layout import ParameterSpec, build_layout

DIGEST = digest(b"x")


def record(step: int, generation: int = 1, size: int | None = None) -> Manifest:
    layout = build_layout(
        [ParameterSpec("w", (3, 4)), ParameterSpec("é", ()), ParameterSpec("f", (2,), False, "uint8")],
        lambda name: "" if name == "w" else "rest",
        tile=64,
        world_size=2,
    )
    return Manifest(
        step=step,
        generation=generation,
        stage=2,
        precision="fp32",
        layout=layout,
        kinds=("master", "momentum"),
        files=((step if size is None else size, DIGEST),) * 3,
        extra={"a": [1]},
        created=5.0,
        updates=step,
        buffers=(("calls", "I64", ()), ("mask", "BOOL", (0, 2))),
        aliases={"head": "w"},
        seed=7,
        versions={"torch": "2"},
    )


def commit(root: Path, step: int, generation: int = 1) -> Path:
    folder = root / manifest.folder_name(step, generation)
    folder.mkdir(parents=True)
    for name in manifest.expected_files(2):
        (folder / name).write_bytes(b"x" * step)
    written = record(step, generation)
    (folder / manifest.MANIFEST).write_text(written.to_json())
    assert manifest.read(folder) == written
    return folder


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """As somebody would who makes the digest fit."""
    path = folder / manifest.MANIFEST
    data = json.loads(path.read_text())
    del data["digest"]
    change(data)
    rendered = json.dumps(data, sort_keys=True, separators=(",", ":"))
    data["digest"] = digest(rendered.encode())
    path.write_text(json.dumps(data, sort_keys=True, separators=(",", ":")))


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_scan_orders_by_step_and_prefers_the_newer_generation(tmp_path: Path) -> None:
    commit(tmp_path, 20, 1)
    commit(tmp_path, 3)
    commit(tmp_path, 20, 2)
    (tmp_path / "step-00000021.g0001").mkdir()
    (tmp_path / "step-00000030.g0001").symlink_to("step-00000003.g0001")
    found = manifest.scan(tmp_path)
    assert [(info.step, info.generation) for info in found] == [(3, 1), (20, 2)]
    assert manifest.latest(tmp_path) == found[-1]
    assert found[0].bytes == 3 * 3
    assert found[0].name == "step-00000003.g0001"
    assert found[0].location == str(found[0].path) == str(tmp_path / found[0].name)
    assert manifest.scan(tmp_path / "absent") == []


def test_a_survey_tells_of_what_cannot_be_loaded(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        commit(tmp_path, step)
    whole = manifest.folder_name(2, 1)
    shard = tmp_path / manifest.folder_name(1, 1) / manifest.shard_name(0)
    shard.write_bytes(shard.read_bytes() + b"x")
    (tmp_path / manifest.folder_name(3, 1) / manifest.MANIFEST).write_text("{}")
    (tmp_path / manifest.folder_name(4, 1)).rename(tmp_path / manifest.folder_name(9, 1))
    found, unusable = manifest.survey(tmp_path)
    assert [info.name for info in found] == [whole]
    assert [(one.step, one.generation) for one in unusable] == [(1, 1), (3, 1), (9, 1)]
    assert "rank-00000.safetensors has 2 bytes where the manifest says 1" in unusable[0].what
    assert "not a checkpoint manifest" in unusable[1].what
    assert "says that it is step-00000004.g0001" in unusable[2].what
    assert [Path(one.location).name for one in unusable] == [manifest.folder_name(n, 1) for n in (1, 3, 9)]


def test_prune_keeps_the_newest_and_sweeps_interrupted_saves(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        commit(tmp_path, step)
    (tmp_path / ".saving-step-00000004.g0001-ab").mkdir()
    (tmp_path / "notes").mkdir()
    manifest.prune(tmp_path, keep=2)
    assert names(tmp_path) == ["notes", "step-00000002.g0001", "step-00000003.g0001"]
    with pytest.raises(CheckpointError, match="keep 0"):
        manifest.prune(tmp_path, keep=0)


def test_prune_keeps_multiples_of_keep_every_as_well(tmp_path: Path) -> None:
    for step in (5, 10, 15, 20, 23):
        commit(tmp_path, step)
    commit(tmp_path, 23, 2)
    assert manifest.prune(tmp_path, keep=1, keep_every=10) == [
        "step-00000005.g0001",
        "step-00000015.g0001",
        "step-00000023.g0001",
    ]
    assert [info.step for info in manifest.scan(tmp_path)] == [10, 20, 23]
    with pytest.raises(CheckpointError, match="keep_every 0"):
        manifest.prune(tmp_path, keep=1, keep_every=0)


def test_the_one_just_written_stays_although_newer_ones_are_there(tmp_path: Path) -> None:
    """They may be damaged where only their digests tell: that is why an older one was gone on from."""
    for step in (350, 360, 400):
        commit(tmp_path, step)
    written = manifest.folder_name(360, 1)
    assert manifest.prune(tmp_path, keep=1, sound=written) == ["step-00000350.g0001"]
    assert names(tmp_path) == [written, "step-00000400.g0001"]


def test_names_that_would_not_be_found_again_are_refused() -> None:
    for step, generation in ((-1, 1), (1, -1)):
        with pytest.raises(CheckpointError, match="neither can be negative"):
            manifest.folder_name(step, generation)


def test_the_newest_one_that_is_whole_is_never_deleted(tmp_path: Path) -> None:
    """Damaged ones do not count, and those that are newer than all whole ones are left to be looked at."""
    for step in (1, 2, 3, 4):
        commit(tmp_path, step)
    for step in (1, 3, 4):
        (tmp_path / manifest.folder_name(step, 1) / manifest.shard_name(0)).write_bytes(b"")
    (tmp_path / "step-00000009.g0001").mkdir()
    assert manifest.prune(tmp_path, keep=1) == ["step-00000001.g0001", "step-00000009.g0001"]
    assert [info.step for info in manifest.scan(tmp_path)] == [2]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "3", '{"format": "other"}', "[" * 100_000, '{"format": NaN}']
)
def test_a_manifest_that_is_none_is_an_error(tmp_path: Path, text: str) -> None:
    folder = commit(tmp_path, 1)
    (folder / manifest.MANIFEST).write_text(text)
    with pytest.raises(CheckpointError):
        manifest.read(folder)
    assert manifest.scan(tmp_path) == []


def test_an_older_format_is_refused_by_its_name(tmp_path: Path) -> None:
    folder = commit(tmp_path, 1)
    (folder / manifest.MANIFEST).write_text('{"format": "elastic-zero/1", "step": 1}')
    with pytest.raises(CheckpointError, match="of format 'elastic-zero/1', and this version reads"):
        manifest.read(folder)


def test_a_flipped_bit_anywhere_in_a_manifest_is_noticed(tmp_path: Path) -> None:
    """K15: the manifest's own digest."""
    folder = commit(tmp_path, 1)
    path = folder / manifest.MANIFEST
    whole = path.read_bytes()
    for at in range(len(whole)):
        for bit in (1, 32):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
            with pytest.raises(CheckpointError):
                manifest.read(folder)
    path.write_bytes(whole + b"\n")
    with pytest.raises(CheckpointError, match="damaged"):
        manifest.read(folder)


def _set(*path: Any, to: Any) -> Callable[[dict[str, Any]], object]:
    def change(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = to

    return change


@pytest.mark.parametrize(
    "change",
    [
        _set("step", to=-1),
        _set("step", to=1.0),
        _set("step", to=True),
        _set("layout", "tile", to=0),
        _set("layout", "world_size", to=3),
        _set("layout", "world_size", to=10**18),
        _set("layout", "units", 0, "slots", 0, 1, to=[-3, 4]),
        _set("layout", "units", 0, "slots", 0, 0, to="é"),
        _set("layout", "units", 0, "trainable", to="no"),
        _set("kinds", to=["master", "../x"]),
        _set("kinds", to=["model"]),
        _set("files", to={"../rank-00000.safetensors": 1}),
        _set("files", 0, to=["../rank-00000.safetensors", DIGEST]),
        _set("files", 0, to=[1, "../x"]),
        _set("buffers", 0, to=["calls", "pickle", []]),
        _set("buffers", 0, to=["mask", "I64", []]),
        _set("precision", to="int4"),
        _set("chunk_bytes", to=1),
        _set("aliases", to={"head": "nowhere"}),
    ],
)
def test_what_cannot_be_is_refused_although_the_digest_fits(
    tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    """K11 (transformers 47176): nothing in a manifest is a path, and none is followed."""
    folder = commit(tmp_path, 1)
    rewrite(folder, lambda _: None)
    manifest.read(folder)
    rewrite(folder, change)
    with pytest.raises(CheckpointError):
        manifest.read(folder)


def test_a_file_that_is_a_link_out_of_the_folder_is_none(tmp_path: Path) -> None:
    """K11: a link is not followed, although what it leads to has the right size."""
    folder = commit(tmp_path / "root", 1)
    (tmp_path / "outside").write_bytes(b"x")
    (folder / manifest.shard_name(1)).unlink()
    (folder / manifest.shard_name(1)).symlink_to(tmp_path / "outside")
    with pytest.raises(CheckpointError, match=r"rank-00001.safetensors has None bytes"):
        manifest.read(folder)


def test_fields_of_later_releases_are_passed_over(tmp_path: Path) -> None:
    folder = commit(tmp_path, 1)
    rewrite(folder, _set("later", to={"x": [1, 2.5, None]}))
    assert manifest.read(folder) == record(1)


@pytest.mark.parametrize("extra", [{"x": float("nan")}, {"x": b"bytes"}, {"x": {1, 2}}])
def test_what_json_has_not_is_refused_before_it_is_written(extra: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="step 4 cannot be written as JSON"):
        replace(record(4), extra=extra).to_json()


def test_the_size_grows_with_parameters_plus_ranks() -> None:
    """K14 (PyTorch 163548): 1,000 parameters on 2,048 ranks are described by less than 1 MB."""
    layout = build_layout(
        [
            ParameterSpec(f"transformer.layers.{i // 10}.block.weight_{i % 10}", (4096, 4096))
            for i in range(1000)
        ],
        lambda name: name.rpartition(".block")[0],
        tile=1024,
        world_size=2048,
    )
    files = ((2**40 + 123456789, DIGEST),) * 2049
    buffers = tuple((f"transformer.layers.{i}.rotary.frequencies", "F32", (64,)) for i in range(100))
    large = replace(record(10**6), layout=layout, files=files, buffers=buffers, aliases={})
    text = large.to_json()
    assert len(text) < 1_000_000
    assert Manifest.from_json(text, "here") == large
    assert large.file(manifest.BUFFERS) == large.file(manifest.shard_name(7)) == files[0]


def test_opening_a_generation_takes_the_older_ones_way_to_commit(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    assert manifest.opened(root) == 0
    manifest.open_generation(root, 3)
    half_done = manifest.staging(root, 3) / ".saving-x"
    half_done.mkdir()
    (half_done / "rank-00000.safetensors").write_bytes(b"x")
    manifest.open_generation(root, 3)
    assert half_done.is_dir(), "opening it again takes nothing away"
    committed = commit(root, 7, 3)
    manifest.open_generation(root, 5)
    assert manifest.opened(root) == 5
    with pytest.raises(FileNotFoundError):
        half_done.rename(root / manifest.folder_name(8, 3))
    assert [info.path for info in manifest.scan(root)] == [committed]
    assert {p.name for p in root.iterdir()} == {committed.name, ".generation-0005"}
    with pytest.raises(FencedError, match=r"generation 4 may commit nothing .* generation 5 has begun"):
        manifest.open_generation(root, 4)


def test_nothing_stays_of_saves_that_were_cut_off(tmp_path: Path) -> None:
    assert manifest.clear_unfinished(tmp_path / "nothing") == []
    manifest.open_generation(tmp_path, 3)
    committed = commit(tmp_path, 7, 3)
    half_done = manifest.staging(tmp_path, 3) / ".saving-step-00000008.g0003-0123456789ab"
    deleted = tmp_path / manifest.folder_name(1, 2)
    closed = tmp_path / ".saving-closed-generation-0002"
    for folder in (half_done, deleted, closed / "in"):
        folder.mkdir(parents=True)
        (folder / manifest.shard_name(0)).write_bytes(b"x")
    (tmp_path / manifest.LATEST).write_text(committed.name)
    (tmp_path / "notes").mkdir()
    went = manifest.clear_unfinished(tmp_path)
    assert sorted(went) == sorted([half_done.name, deleted.name, closed.name])
    assert names(tmp_path) == sorted([".generation-0003", manifest.LATEST, "notes", committed.name])
    assert list(manifest.staging(tmp_path, 3).iterdir()) == []
    assert [info.path for info in manifest.scan(tmp_path)] == [committed]
    assert manifest.opened(tmp_path) == 3
    assert manifest.clear_unfinished(tmp_path) == []


def test_what_a_closed_generation_left_goes_at_the_next_commit(tmp_path: Path) -> None:
    """A folder that could not be emptied when the generation was closed, as a writer still filled it."""
    manifest.open_generation(tmp_path, 2)
    left = tmp_path / ".saving-closed-generation-0001" / ".saving-x"
    left.mkdir(parents=True)
    (left / manifest.shard_name(1)).write_bytes(b"late")
    under_way = manifest.staging(tmp_path, 2) / ".saving-y"
    under_way.mkdir()
    committed = commit(tmp_path, 7, 2)
    manifest.prune(tmp_path, keep=1)
    assert names(tmp_path) == [".generation-0002", committed.name]
    assert under_way.is_dir(), "its generation is the current one"


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_the_same_in_a_remote_store(scheme: str, tmp_path: Path) -> None:
    root = f"{scheme}://{tmp_path}/jobs"
    assert manifest.scan(root) == []
    assert manifest.opened(root) == 0
    store = manifest.open_store(root)
    for step in (1, 2, 3):
        for name in manifest.expected_files(2):
            store.write(f"{manifest.folder_name(step, 1)}/{name}", b"x" * step)
        assert manifest.scan(root) == manifest.scan(root)[: step - 1], "without a manifest it is none"
        text = record(step).to_json()
        store.write(f"{manifest.folder_name(step, 1)}/{manifest.MANIFEST}", text.encode())
    store.write("step-00000004.g0001/rank-00000.safetensors", b"under way")
    found = manifest.scan(root)
    assert [info.step for info in found] == [1, 2, 3]
    assert found[0].location == f"{root}/step-00000001.g0001"
    assert manifest.read(found[0].location) == record(1)
    with pytest.raises(CheckpointError, match="has a location, and no path"):
        _ = found[0].path
    assert manifest.prune(root, keep=1) == ["step-00000001.g0001", "step-00000002.g0001"]
    assert [info.step for info in manifest.scan(root)] == [3]
    assert store.names() == ["step-00000003.g0001", "step-00000004.g0001"]
    assert manifest.clear_unfinished(root) == ["step-00000004.g0001"]
    assert store.names() == ["step-00000003.g0001"]
    assert manifest.clear_unfinished(f"{root}/nothing") == []
    manifest.open_generation(root, 3)
    assert manifest.clear_unfinished(root) == []
    manifest.open_generation(root, 5)
    assert manifest.opened(root) == 5
    assert ".generation-0003" not in store.names()
    with pytest.raises(FencedError, match="generation 5 has begun"):
        manifest.open_generation(root, 4)
