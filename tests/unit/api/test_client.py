"""The client: what it says when it is not answered, refused, or asked for something ambiguous."""

import socket
from pathlib import Path

import pytest

from api import server_file
from api.client import Ambiguous, Client, Refused, Unreachable
from api.connection import NoService, connect
from api.token_file import TokenFileError, ensure_token
from service.settings import Settings
from tests.unit.api.running import SPEC, TOKEN, Running


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def test_nothing_answers() -> None:
    with Client(f"http://127.0.0.1:{_free_port()}", TOKEN) as client:
        with pytest.raises(Unreachable, match="no answer"):
            client.job("x")
        with pytest.raises(Unreachable):
            list(client.follow("x", patience_s=0.1))


def test_a_refusal_has_the_code_and_the_numbers(shared: Running) -> None:
    with pytest.raises(Refused) as caught:
        shared.client.submit(SPEC | {"steps": 0})
    assert (caught.value.status, caught.value.code) == (422, "invalid_spec")
    assert caught.value.members["errors"][0]["field"] == "steps"
    with Client(shared.url, "wrong") as stranger, pytest.raises(Refused) as caught:
        stranger.nodes()
    assert caught.value.code == "unauthorized"
    with pytest.raises(Refused) as caught:
        list(shared.client.follow("unknown"))
    assert caught.value.code == "unknown_job"


def test_the_beginning_of_an_id_is_enough_while_it_is_unique(service: Running) -> None:
    jobs = [service.client.submit(SPEC) for _ in range(17)]
    first = jobs[0]
    assert service.client.find(first.id).id == first.id
    shared_start = next(job.id[0] for job in jobs if sum(other.id[0] == job.id[0] for other in jobs) > 1)
    with pytest.raises(Ambiguous, match="give more of the id"):
        service.client.find(shared_start)
    unique = next(
        first.id[:n] for n in range(1, 13) if sum(job.id.startswith(first.id[:n]) for job in jobs) == 1
    )
    assert service.client.find(unique).id == first.id
    for unknown in ("zz", ""):
        with pytest.raises(Refused):
            service.client.find(unknown)


def test_the_service_is_found_by_its_folder(tmp_path: Path, shared: Running) -> None:
    settings = Settings(data_dir=tmp_path)
    with pytest.raises(NoService, match="elastic-zero serve"):
        connect(settings)
    server_file.write(tmp_path, shared.url)
    with pytest.raises(TokenFileError):
        connect(settings)
    ensure_token(settings.token_file)
    with connect(settings) as client, pytest.raises(Refused, match="token"):
        client.nodes()
    settings.token_file.write_text(TOKEN)
    with connect(settings) as client:
        assert client.ready().ok
        assert client.submit(SPEC).submitted_by.startswith("cli:")
    with connect(settings, url=shared.url, token_file=settings.token_file) as client:
        assert client.nodes()


def test_a_service_that_is_gone_is_not_asked(tmp_path: Path) -> None:
    server_file.write(tmp_path, "http://127.0.0.1:1")
    record = server_file.read(tmp_path)
    assert record is not None
    text = (tmp_path / "server.json").read_text().replace(str(record.pid), str(2**22 + 1))
    (tmp_path / "server.json").write_text(text)
    with pytest.raises(NoService):
        connect(Settings(data_dir=tmp_path))
