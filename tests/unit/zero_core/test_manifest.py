"""Which folders count as checkpoints, and what deletion leaves."""

import json
from pathlib import Path

import pytest

from zero_core.checkpoint import manifest
from zero_core.errors import CheckpointError, FencedError
from zero_core.layout import ParameterSpec, build_layout


def commit(root: Path, step: int, generation: int = 1) -> Path:
    folder = root / manifest.folder_name(step, generation)
    folder.mkdir(parents=True)
    names = manifest.expected_files(2)
    for name in names:
        (folder / name).write_bytes(b"x" * step)
    layout = build_layout([ParameterSpec("w", (3, 4))], lambda _: "", tile=64, world_size=2)
    record = manifest.Manifest(
        step=step,
        generation=generation,
        stage=2,
        precision="fp32",
        layout=layout,
        files=dict.fromkeys(names, step),
        extra={"a": [1]},
        created=5.0,
    )
    (folder / manifest.MANIFEST).write_text(record.to_json())
    assert manifest.read(folder) == record
    return folder


def test_scan_orders_by_step_and_prefers_the_newer_generation(tmp_path: Path) -> None:
    commit(tmp_path, 20, 1)
    commit(tmp_path, 3)
    commit(tmp_path, 20, 2)
    found = manifest.scan(tmp_path)
    assert [(info.step, info.generation) for info in found] == [(3, 1), (20, 2)]
    assert manifest.latest(tmp_path) == found[-1]
    assert found[0].bytes == 3 * 3
    assert manifest.scan(tmp_path / "absent") == []


def test_a_manifest_from_before_there_were_other_optimizers_is_read(tmp_path: Path) -> None:
    path = commit(tmp_path, 20) / manifest.MANIFEST
    data = json.loads(path.read_text())
    for later in ("updates", "states", "loss_scale"):
        del data[later]
    path.write_text(json.dumps(data))
    found = manifest.read(path.parent)
    assert (found.updates, found.states, found.loss_scale) == (None, ("master", "momentum", "variance"), None)


def test_prune_keeps_the_newest_and_sweeps_interrupted_saves(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        commit(tmp_path, step)
    (tmp_path / ".saving-step-00000004.g0001-ab").mkdir()
    (tmp_path / "notes").mkdir()
    manifest.prune(tmp_path, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "notes",
        "step-00000002.g0001",
        "step-00000003.g0001",
    ]
    with pytest.raises(CheckpointError, match="keep 0"):
        manifest.prune(tmp_path, keep=0)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": "other"}', '{"format": "elastic-zero/1", "layout": 3}']
)
def test_a_manifest_that_is_none_is_an_error(tmp_path: Path, text: str) -> None:
    folder = commit(tmp_path, 1)
    (folder / manifest.MANIFEST).write_text(text)
    with pytest.raises(CheckpointError):
        manifest.read(folder)
    assert manifest.scan(tmp_path) == []


def test_file_names_in_a_manifest_are_never_followed(tmp_path: Path) -> None:
    folder = commit(tmp_path, 1)
    path = folder / manifest.MANIFEST
    path.write_text(path.read_text().replace("rank-00001", "../rank-00001"))
    with pytest.raises(CheckpointError, match="rank-00001"):
        manifest.read(folder)


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
