"""The files of one save, without an engine: what ranks leave for each other, and what makes a checkpoint."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from tests.unit.zero_core.small_save import CONTENT, layout_of, reads_back, work_of
from tests.unit.zero_core.written import digests_of
from zero_core.checkpoint import manifest, writing
from zero_core.checkpoint.container import BLOCK_BYTES, CHUNK_BYTES, buffer_contents, digest, digests_in
from zero_core.checkpoint.store import Files, LocalStore, Store, open_store
from zero_core.checkpoint.writing import Payload, check_tiling, write_behind, write_file
from zero_core.errors import CheckpointError, FencedError


@pytest.fixture(params=["local", "memory", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    scheme = "" if request.param == "local" else f"{request.param}://"
    return open_store(f"{scheme}{tmp_path}/root")


@pytest.fixture(autouse=True)
def _short_farewell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_FAREWELL_S", 0.5)


def test_a_file_is_written_chunk_by_chunk_however_the_pieces_are_cut(place: Store) -> None:
    data = bytes(range(251)) * (2 * CHUNK_BYTES // 251 + 100)
    assert 2 * CHUNK_BYTES < len(data) < 3 * CHUNK_BYTES
    contents = buffer_contents([("a", "U8", (len(data),))])
    cuts = [0, 0, 1, 5000, BLOCK_BYTES + 3, CHUNK_BYTES - 1, 2 * CHUNK_BYTES, len(data), len(data)]
    pieces = [memoryview(data)[a:b] for a, b in pairwise(cuts)]
    place.make_folder("x")
    size, told = write_file(place, "x/a", Payload(contents, pieces))
    found = place.read("x/a")
    assert len(found) == size == contents.file_bytes
    assert found[contents.header_bytes :] == data
    assert told == digest(found[: contents.header_bytes])
    assert digests_in(found[: contents.header_bytes], contents) == digests_of(data)


def together(works: Sequence[writing.Work], act: Callable[[writing.Work], object]) -> list[object]:
    """Every rank in a thread of its own; what it returned or raised."""

    def one(work: writing.Work) -> object:
        try:
            return act(work)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(one, works))


def test_ranks_agree_by_receipts_alone(place: Store) -> None:
    works = work_of(place, world_size=3, step=5)
    sizes = together(works, write_behind)
    assert sizes == [manifest.scan(place)[0].bytes] * 3
    reads_back(place, 5)
    folder = manifest.folder_name(5, 1)
    assert place.names(folder) == sorted([*manifest.expected_files(3), "manifest.json"]), "no receipts"
    assert place.names() == sorted(["LATEST", folder])
    assert place.read("LATEST") == f"{folder}\n".encode()


@pytest.mark.parametrize("failing", [0, 2])
def test_what_one_rank_fails_in_all_fail_in_and_nothing_is_left(place: Store, failing: int) -> None:
    """K1 (PyTorch 191391): no space in one writer is no checkpoint, and every rank hears of it."""
    sizes = together(work_of(place, world_size=3, step=4), write_behind)
    assert all(isinstance(size, int) for size in sizes), sizes

    def act(work: writing.Work) -> int:
        if work.rank == failing:

            def ends() -> Iterator[memoryview]:
                raise OSError(28, "No space left on device")
                yield

            payloads = {n: Payload(p.contents, ends()) for n, p in work.payloads.items()}  # type: ignore[arg-type]
            work = replace(work, payloads=payloads)
        return write_behind(work)

    began = time.monotonic()
    errors = together(work_of(place, world_size=3, step=5), act)
    assert all(isinstance(error, CheckpointError) for error in errors), errors
    assert "No space left" in str(errors[failing])
    assert time.monotonic() - began < 15
    if place.moves or failing:
        assert "No space left" in str(errors[0])
    assert place.names() == ["LATEST", manifest.folder_name(4, 1)]
    reads_back(place, 4)
    sizes = together(work_of(place, world_size=3, step=5), write_behind)
    assert all(isinstance(size, int) for size in sizes), sizes
    reads_back(place, 5)


def test_a_rank_that_never_writes_is_not_waited_for_for_ever(place: Store) -> None:
    works = [replace(work, patience_s=0.2) for work in work_of(place, world_size=3, step=5)]
    errors = together(works[:2], write_behind)
    assert "have not written their parts in 0.2 s" in str(errors[0])
    assert isinstance(errors[1], CheckpointError)
    if place.moves:
        assert place.names() == []
        return
    # It may still come: then it finds out, and takes its own away again.
    (late,) = together(works[2:], write_behind)
    assert "have not written their parts" in str(late)
    assert not [name for name in place.names(works[0].final) if name.endswith(".safetensors")]
    assert manifest.scan(place) == []


def test_a_rank_that_cannot_even_say_that_it_failed_takes_the_folder_away(tmp_path: Path) -> None:
    class Dead(Files):
        def open(self, path: Path, flags: int) -> int:
            raise OSError(5, "Input/output error")

    works = work_of(LocalStore(tmp_path), world_size=2, step=5)
    works[1] = replace(works[1], store=LocalStore(tmp_path, Dead()))
    errors = together(works, write_behind)
    assert isinstance(errors[0], CheckpointError)
    assert "Input/output error" in str(errors[1])
    assert list(tmp_path.iterdir()) == []


def test_an_older_generation_commits_nothing(place: Store) -> None:
    manifest.open_generation(place, 1)
    works = [replace(work, patience_s=1.0) for work in work_of(place, world_size=2, step=5, fenced=True)]
    together(works, lambda work: work.write())
    manifest.open_generation(place, 2)
    errors = together(works, lambda w: w.commit(w.collect()) if w.rank == 0 else w.outcome())
    understood = [work.understood(error) for work, error in zip(works, errors, strict=True)]  # type: ignore[arg-type]
    assert isinstance(understood[0], FencedError)
    if place.moves:
        assert isinstance(understood[1], FencedError)
    else:
        assert isinstance(understood[1], CheckpointError)
    assert manifest.scan(place) == []


def test_the_folder_that_is_gone_is_noticed_while_waiting(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    manifest.open_generation(store, 1)
    works = work_of(store, world_size=2, step=5, fenced=True)
    later = threading.Timer(0.2, lambda: manifest.open_generation(store, 2))
    later.start()
    errors = together(works[:1], write_behind)  # rank 1 never comes
    later.join()
    assert isinstance(errors[0], FencedError)
    assert [path.name for path in tmp_path.iterdir()] == [".generation-0002"]


class Lying(Files):
    """A rename that has happened and reports that it has not, as on some network file systems."""

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        if target.name.startswith("step-"):
            raise FileNotFoundError(2, "No such file or directory")


def test_a_rename_that_reports_failure_is_looked_at_again(tmp_path: Path) -> None:
    """K12 (HPCC 18352)."""
    store = LocalStore(tmp_path, Lying())
    sizes = together(work_of(store, world_size=2, step=5), write_behind)
    assert sizes == [manifest.scan(store)[0].bytes] * 2
    reads_back(store, 5)


def test_a_rename_that_has_not_happened_is_a_failure(tmp_path: Path) -> None:
    class Refusing(Files):
        def rename(self, source: Path, target: Path) -> None:
            if target.name.startswith("step-"):
                raise OSError(5, "Input/output error")
            super().rename(source, target)

    errors = together(work_of(LocalStore(tmp_path, Refusing()), world_size=2, step=5), write_behind)
    assert all(isinstance(error, CheckpointError) for error in errors)
    assert list(tmp_path.iterdir()) == []


class Recording(Files):
    """What was synced and closed, in order, and what was renamed."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []
        self._open: dict[int, str] = {}

    def open(self, path: Path, flags: int) -> int:
        descriptor = super().open(path, flags)
        self._open[descriptor] = path.name
        return descriptor

    def fsync(self, descriptor: int) -> None:
        super().fsync(descriptor)
        self.told.append(("synced", self._open[descriptor]))

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self.told.append(("renamed", target.name))


def test_all_is_synced_before_the_rename_and_the_folders_after(tmp_path: Path) -> None:
    files = Recording()
    store = LocalStore(tmp_path, files)
    manifest.open_generation(tmp_path, 1)
    works = work_of(store, world_size=2, step=5, fenced=True)
    together(works, write_behind)
    commit = files.told.index(("renamed", manifest.folder_name(5, 1)))
    before, after = files.told[:commit], files.told[commit + 1 :]
    for name in [*manifest.expected_files(2), "manifest.json.part"]:
        assert ("synced", name) in before
    assert before[-1] == ("synced", works[0].temporary.rpartition("/")[2])
    assert after[:2] == [("synced", ".generation-0001"), ("synced", tmp_path.name)]


def test_a_receipt_of_another_save_is_none(place: Store) -> None:
    """Where a killed save left its files in the final folder, a new one does not take them for its own."""
    old = work_of(place, world_size=2, step=5, token="old")
    together(old, lambda work: work.write())
    new = [replace(work, patience_s=0.2) for work in work_of(place, world_size=2, step=5, token="new")]
    new[0].write() if place.moves else None
    errors = together(new[:1], lambda work: work.collect())
    assert "have not written" in str(errors[0])


def test_intervals_must_make_up_every_unit_once(tmp_path: Path) -> None:
    layout = layout_of(2)
    good = [work.parts for work in work_of(LocalStore(tmp_path), world_size=2, step=1)]
    described = work_of(LocalStore(tmp_path / "b"), world_size=2, step=1)[0].draft
    check_tiling(layout, described, good)
    with pytest.raises(CheckpointError, match="must follow each other"):
        check_tiling(layout, described, [good[1], good[0]])
    with pytest.raises(CheckpointError, match="must follow each other"):
        check_tiling(layout, described, [good[0], good[0], good[1]])
    with pytest.raises(CheckpointError, match="do not make up the whole"):
        check_tiling(layout, described, good[:1])
    with pytest.raises(CheckpointError, match="do not make up the whole"):
        check_tiling(layout, described, [good[0], (*good[1], ("other", 0, 0, 3))])


def test_a_rank_that_wrote_something_else_than_it_says_is_noticed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    works = work_of(store, world_size=2, step=5)
    together(works, lambda work: work.write())
    (tmp_path / works[1].temporary / manifest.shard_name(1)).write_bytes(b"short")
    with pytest.raises(CheckpointError, match=r"rank-00001.safetensors has 5 bytes after"):
        works[0].commit(works[0].receipts())
    receipt = tmp_path / works[1].temporary / f"receipt-{works[1].token}-00001.json"
    data = json.loads(receipt.read_text())
    data["parts"] = data["parts"][1:]
    receipt.write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match="do not make up the whole"):
        works[0].commit(works[0].receipts())
    assert CONTENT
