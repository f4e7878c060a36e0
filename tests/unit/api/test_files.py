"""The token's file and the record of the running service."""

import os
import stat
import threading
from pathlib import Path

import pytest

from api import server_file
from api.server_file import ServerRecord
from api.token_file import TokenFileError, ensure_token, read_token


def test_the_token_is_made_once_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token = ensure_token(path)
    assert len(token) >= 40
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert ensure_token(path) == token == read_token(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["token"]


def test_all_that_start_together_get_the_same_token(tmp_path: Path) -> None:
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(ensure_token(tmp_path / "token"))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o620])
def test_a_token_open_to_others_is_not_used(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    ensure_token(path)
    path.chmod(mode)
    with pytest.raises(TokenFileError, match="chmod 600"):
        ensure_token(path)


def test_no_token_an_empty_one_and_a_link_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(TokenFileError, match="no token at"):
        read_token(tmp_path / "token")
    empty = tmp_path / "empty"
    empty.touch(mode=0o600)
    with pytest.raises(TokenFileError, match="is empty"):
        read_token(empty)
    (tmp_path / "link").symlink_to(empty)
    with pytest.raises(TokenFileError, match="cannot read"):
        read_token(tmp_path / "link")


def test_the_record_names_this_very_process(tmp_path: Path) -> None:
    assert server_file.read(tmp_path) is None
    server_file.write(tmp_path, "http://127.0.0.1:1")
    record = server_file.read(tmp_path)
    assert record is not None
    assert (record.url, record.pid) == ("http://127.0.0.1:1", os.getpid())
    assert record.alive
    # The same id, another process: ids are used again.
    assert not ServerRecord(record.url, record.pid, record.started - 60).alive
    assert not ServerRecord(record.url, 2**22 + 1, record.started).alive
    server_file.remove(tmp_path)
    server_file.remove(tmp_path)
    assert server_file.read(tmp_path) is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"url": 1}'])
def test_a_broken_record_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "server.json").write_text(content)
    assert server_file.read(tmp_path) is None
