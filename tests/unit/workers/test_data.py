"""Data: windows, batches, fingerprints, and errors that say what to change."""

import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from workers.data import PYTHON, Batches, check_resume, go_on_from, open_batches
from workers.errors import DataError, ResumeError
from workers.order import Origin
from workers.spec import JobSpec


def _spec(data: dict[str, Any], **changes: Any) -> JobSpec:
    fields = {"steps": 5, "global_batch": 4, "micro_batch": 2, "sequence_length": 8, "seed": 3}
    return JobSpec.model_validate({"data": data, **fields, **changes})


def _text(path: Path, length: int = 200) -> dict[str, Any]:
    path.write_bytes(bytes(i % 251 for i in range(length)))
    return {"kind": "text", "paths": [str(path)]}


def test_windows_tile_the_text_and_targets_are_one_ahead(tmp_path: Path) -> None:
    batches = open_batches(_spec(_text(tmp_path / "a.txt", 33)), vocabulary=256)
    inputs, targets = batches.read(np.array([0, 3]))
    assert inputs.dtype == targets.dtype == np.int64
    assert inputs.tolist() == [list(range(8)), list(range(24, 32))]
    assert targets.tolist() == [list(range(1, 9)), list(range(25, 33))]


def test_a_step_reads_the_same_samples_however_it_is_cut(tmp_path: Path) -> None:
    data = _text(tmp_path / "a.txt", 2000)
    for step in (0, 7, 100):
        cut = []
        for micro_batch in (1, 2, 4):
            batches = open_batches(_spec(data, micro_batch=micro_batch), vocabulary=256)
            count = 4 // micro_batch
            cut.append(np.concatenate([batches.ids(step, m) for m in range(count)]).tolist())
        assert cut[0] == cut[1] == cut[2]


def test_an_epoch_sees_every_sample_once(tmp_path: Path) -> None:
    batches = open_batches(_spec(_text(tmp_path / "a.txt", 8 * 12 + 1)), vocabulary=256)
    seen = [int(i) for step in range(3) for m in range(2) for i in batches.ids(step, m)]
    assert sorted(seen) == list(range(12))


def test_files_folders_and_patterns_are_read_once_in_sorted_order(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    (tmp_path / "z.txt").write_bytes(b"z" * 10)
    (folder / "b.txt").write_bytes(b"b" * 10)
    (folder / "deep" / "a.txt").write_bytes(b"a" * 13)
    paths = [str(tmp_path / "z.txt"), str(folder), str(folder / "*.txt")]
    batches = open_batches(_spec({"kind": "text", "paths": paths}, sequence_length=4), vocabulary=256)
    inputs, _ = batches.read(np.arange(8))
    assert bytes(inputs.flatten().tolist()) == b"b" * 10 + b"a" * 13 + b"z" * 9
    assert batches.fingerprint["files"] == 3


def test_max_bytes_cuts_the_text(tmp_path: Path) -> None:
    data = {**_text(tmp_path / "a.txt", 500), "max_bytes": 65}
    assert open_batches(_spec(data), vocabulary=256).fingerprint["tokens"] == 65


def test_pythons_own_sources_are_real_text() -> None:
    batches = open_batches(_spec({"kind": "text", "paths": [PYTHON], "max_bytes": 300_000}), vocabulary=256)
    assert batches.fingerprint["tokens"] == 300_000
    first = sorted(p for p in Path(sysconfig.get_path("stdlib")).glob("*.py"))
    assert first, "the standard library lies where sysconfig says"


def test_tokens_are_mapped_from_a_flat_file(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    np.arange(1000, dtype="<u4").tofile(path)
    data = {"kind": "tokens", "path": str(path), "dtype": "uint32"}
    inputs, _ = open_batches(_spec(data), vocabulary=1000).read(np.array([5]))
    assert inputs.tolist() == [list(range(40, 48))]


def test_synthetic_samples_depend_on_seed_and_id_only() -> None:
    data = {"kind": "synthetic", "samples": 10}
    batches = open_batches(_spec(data), vocabulary=17)
    again = open_batches(_spec(data), vocabulary=17)
    one, _ = batches.read(np.array([4]))
    two, _ = again.read(np.array([9, 4]))
    other, _ = open_batches(_spec(data, seed=4), vocabulary=17).read(np.array([4]))
    assert one[0].tolist() == two[1].tolist() != other[0].tolist()
    assert 0 <= int(two.min()) <= int(two.max()) < 17


@pytest.mark.parametrize("length", [0, 1, 32])
def test_too_little_data_is_an_error_with_the_numbers(tmp_path: Path, length: int) -> None:
    with pytest.raises(DataError, match=r"hold \d samples of 8 .* the 4 of one step"):
        open_batches(_spec(_text(tmp_path / "a.txt", length)), vocabulary=256)


def test_a_missing_path_is_an_error_naming_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere"):
        open_batches(_spec({"kind": "text", "paths": [str(tmp_path / "nowhere*")]}), vocabulary=256)
    with pytest.raises(DataError, match=r"nowhere\.bin"):
        open_batches(_spec({"kind": "tokens", "path": str(tmp_path / "nowhere.bin")}), vocabulary=256)


def test_a_file_of_odd_size_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    path.write_bytes(b"x" * 1001)
    with pytest.raises(DataError, match="1001 bytes"):
        open_batches(_spec({"kind": "tokens", "path": str(path)}), vocabulary=256)


def test_a_token_outside_of_the_vocabulary_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    np.array([*range(40), -1], dtype="<i4").tofile(path)
    data = {"kind": "tokens", "path": str(path), "dtype": "int32"}
    batches = open_batches(_spec(data), vocabulary=39)
    batches.read(np.array([0]))
    with pytest.raises(DataError, match="token id -1"):
        batches.read(np.array([4]))
    text = open_batches(_spec(_text(tmp_path / "b.txt", 49)), vocabulary=48)
    text.read(np.array([4]))
    with pytest.raises(DataError, match=r"token id 48 .*vocabulary of 48"):
        text.read(np.array([5]))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"seed": 4}, "seed"),
        ({"sequence_length": 9}, "sequence_length"),
        ({"global_batch": 6}, "global_batch"),
    ],
)
def test_resuming_with_other_settings_is_refused(tmp_path: Path, change: dict[str, Any], field: str) -> None:
    """L5 (VeOmni 853): other samples than before the restart, silently."""
    data = _text(tmp_path / "a.txt")
    saved = open_batches(_spec(data), vocabulary=256).fingerprint
    check_resume(saved, open_batches(_spec(data), vocabulary=256).fingerprint)
    with pytest.raises(ResumeError, match=field):
        check_resume(saved, open_batches(_spec(data, **change), vocabulary=256).fingerprint)


def test_resuming_with_other_data_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    saved = open_batches(_spec(_text(path)), vocabulary=256).fingerprint
    longer = open_batches(_spec(_text(path, 201)), vocabulary=256).fingerprint
    with pytest.raises(ResumeError, match="tokens: 200 then, 201 now"):
        check_resume(saved, longer)
    content = bytearray(path.read_bytes()[:200])
    content[100] ^= 1
    path.write_bytes(bytes(content))
    changed = open_batches(_spec({"kind": "text", "paths": [str(path)]}), vocabulary=256).fingerprint
    with pytest.raises(ResumeError, match="digest"):
        check_resume(saved, changed)


def _places(batches: Batches, steps: range) -> list[int]:
    """Ids of what these steps read, in order."""
    count = batches._spec.micro_batches
    return [int(i) for step in steps for m in range(count) for i in batches.ids(step, m)]


@pytest.mark.parametrize(("before", "after"), [(4, 8), (8, 4), (4, 4), (4, 6)])
def test_another_global_batch_goes_on_where_the_samples_end(tmp_path: Path, before: int, after: int) -> None:
    """K13: the position is what was consumed: a job with another batch skips none and repeats none."""
    data = _text(tmp_path / "a.txt", 8 * 50 + 1)
    first = open_batches(_spec(data, global_batch=before), vocabulary=256)
    second = open_batches(_spec(data, global_batch=after), vocabulary=256)
    extra = {"data": first.fingerprint, "consumed": first.consumed(5)}
    origin, why = go_on_from(extra, second, step=5)
    assert why is None
    second.origin = origin
    read = _places(first, range(5)) + _places(second, range(5, 12))
    whole = open_batches(_spec(data, global_batch=2), vocabulary=256)
    assert read == _places(whole, range(len(read) // 2))
    assert second.consumed(12) == len(read)
    # And a third one, of that checkpoint.
    third = open_batches(_spec(data, global_batch=2), vocabulary=256)
    third.origin, why = go_on_from({"data": second.fingerprint, "consumed": len(read)}, third, step=12)
    assert why is None
    assert third.ids(12, 0).tolist() == whole.ids(len(read) // 2, 0).tolist()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seed": 4}, "seed: 3 then, 4 now"),
        ({"sequence_length": 4}, "sequence_length: 8 then, 4 now"),
        ({"data": {"kind": "synthetic", "samples": 99}}, "kind: 'text' then, 'synthetic' now"),
    ],
)
def test_other_data_begin_at_their_start_and_it_is_said_why(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    data = _text(tmp_path / "a.txt", 8 * 50 + 1)
    first = open_batches(_spec(data), vocabulary=256)
    fields = {"data": data, "steps": 5, "global_batch": 4, "micro_batch": 2, "sequence_length": 8, "seed": 3}
    second = open_batches(JobSpec.model_validate(fields | changes), vocabulary=256)
    fresh = second.ids(0, 0).tolist()
    second.origin, why = go_on_from(
        {"data": first.fingerprint, "consumed": first.consumed(5)}, second, step=5
    )
    assert why is not None
    assert said in why
    assert second.ids(5, 0).tolist() == fresh


def test_a_checkpoint_that_tells_nothing_of_data_begins_them_anew(tmp_path: Path) -> None:
    batches = open_batches(_spec(_text(tmp_path / "a.txt", 401)), vocabulary=256)
    origin, why = go_on_from({}, batches, step=7)
    assert (origin, why) == (Origin(7, 0), "the checkpoint does not tell how far its job had read")
    # An older one, which tells the batch only.
    origin, why = go_on_from({"data": batches.fingerprint}, batches, step=7)
    assert (origin, why) == (Origin(7, 28), None)
