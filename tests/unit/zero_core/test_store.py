"""Where checkpoints lie: the same of a local folder and of what fsspec opens."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from zero_core.checkpoint import store as stores
from zero_core.checkpoint.store import Files, LocalStore, Store, open_store
from zero_core.errors import CheckpointError


@pytest.fixture(params=["local", "memory", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    scheme = "" if request.param == "local" else f"{request.param}://"
    return open_store(f"{scheme}{tmp_path}/root")


def filled(place: Store) -> Store:
    place.make_folder("a")
    with place.writing("a/x", 10) as out:
        out.write(0, [memoryview(b"0123"), memoryview(b""), memoryview(b"45")])
        out.write(6, [memoryview(b"6789")])
    place.write("a/y", b"")
    return place


def test_what_is_written_is_read_back(place: Store) -> None:
    assert place.names() == place.names("a") == []
    assert place.sizes("a") == {}
    assert place.size("a/x") is None
    filled(place)
    assert place.names() == ["a"]
    assert place.names("a") == ["x", "y"]
    assert place.sizes("a") == {"x": 10, "y": 0}
    assert (place.size("a/x"), place.size("a")) == (10, None)
    assert place.read("a/x") == b"0123456789"
    place.write("a/y", b"new")
    assert place.read("a/y") == b"new"
    assert open_store(place.location("a")).read("y") == b"new"
    with pytest.raises(OSError, match=r"z|No such"):
        place.read("a/z")


def test_ranges_are_read_straight_into_buffers(place: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_REMOTE_PART_BYTES", 3)
    monkeypatch.setattr(stores, "_MOST_BUFFERS", 2)
    filled(place)
    parts = [bytearray(1), bytearray(0), bytearray(4), bytearray(2)]
    place.read_into("a/x", 2, [memoryview(part) for part in parts])
    assert parts == [b"2", b"", b"3456", b"78"]
    place.read_into("a/x", 10, [])
    with pytest.raises(CheckpointError, match=r"a/x ends at byte 10, 1 bytes early"):
        place.read_into("a/x", 8, [memoryview(bytearray(3))])


def test_files_and_folders_go(place: Store) -> None:
    filled(place)
    place.write("a/b/c", b"deep") if not place.moves else place.make_folder("a/b")
    place.remove("a/y")
    place.remove("a/y")
    assert place.sizes("a") == {"x": 10}
    place.remove_tree("a")
    place.remove_tree("a")
    assert place.names() == []


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "a//b", "./a", "a\\b", "a/", "a\0"])
def test_no_path_leads_out(place: Store, path: str) -> None:
    """K11 (transformers 47176)."""
    for act in (place.read, place.size, place.names, place.sizes, place.remove, place.location):
        with pytest.raises(CheckpointError, match="stay within its folder"):
            act(path)


def test_a_failing_write_leaves_no_file(place: Store) -> None:
    filled(place)

    def fail() -> None:
        with place.writing("a/z", 8) as out:
            out.write(0, [memoryview(b"half")])
            raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        fail()
    assert place.names("a") == ["x", "y"]


def test_split_finds_the_folder_above() -> None:
    assert stores.split("/a/b/") == ("/a", "b")
    assert stores.split(Path("b")) == (".", "b")
    assert stores.split("/b") == ("/", "b")
    assert stores.split("s3://bucket/a/b") == ("s3://bucket/a", "b")


def test_what_fsspec_does_not_know_is_an_error_that_says_so() -> None:
    with pytest.raises(CheckpointError, match="cannot open nowhere://x"):
        open_store("nowhere://x")


class Short(Files):
    """Takes three bytes at a time, as a file system may; or none."""

    def __init__(self, most: int) -> None:
        self.most = most

    def pwrite(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwrite(descriptor, b"".join(buffers)[: self.most], offset)


def test_a_short_write_is_gone_on_with(tmp_path: Path) -> None:
    assert filled(LocalStore(tmp_path, Short(3))).read("a/x") == b"0123456789"
    with pytest.raises(OSError, match="took 0 of 6 bytes"):
        filled(LocalStore(tmp_path / "other", Short(0)))
    assert (tmp_path / "other" / "a").is_dir()
    assert list((tmp_path / "other" / "a").iterdir()) == []


def test_a_local_file_is_never_written_over(tmp_path: Path) -> None:
    place = filled(LocalStore(tmp_path))
    with pytest.raises(FileExistsError), place.writing("a/x", 1):
        pass
    assert place.read("a/x") == b"0123456789"
    with pytest.raises(FileExistsError):
        place.make_folder("a")
    with pytest.raises(FileNotFoundError):
        place.make_folder("b/c", parents=False)
    assert (place.free_bytes() or 0) > 0
    assert (LocalStore(tmp_path / "not" / "yet").free_bytes() or 0) > 0
