"""Starting the service where something is in the way, and what its address is."""

import fcntl
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from api import server
from api.server import ServeError, serve
from service.settings import Settings

said: list[str] = []


def test_a_taken_port_is_told_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServeError, match=rf"port {port} of .* is taken.*--port"):
            serve(Settings(data_dir=tmp_path, port=port), announce=said.append)
    assert not (tmp_path / "ray.json").exists()
    assert not (tmp_path / "server.json").exists()


def test_an_address_that_is_not_ours(tmp_path: Path) -> None:
    with pytest.raises(ServeError, match=r"cannot listen on 192\.0\.2\.1"):
        serve(Settings(data_dir=tmp_path, host="192.0.2.1", port=0), announce=said.append)


def test_one_service_for_one_folder(tmp_path: Path) -> None:
    with (tmp_path / "serve.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ServeError, match=r"already runs on the data folder.*elastic-zero down"):
            serve(Settings(data_dir=tmp_path, port=0), announce=said.append)


@pytest.mark.parametrize(
    ("host", "url", "names"),
    [
        ("127.0.0.1", "http://127.0.0.1", ("127.0.0.1", "localhost", "::1")),
        ("0.0.0.0", "http://127.0.0.1", ("127.0.0.1", "localhost", "::1")),
        ("127.0.0.2", "http://127.0.0.2", ("127.0.0.1", "localhost", "::1", "127.0.0.2")),
    ],
)
def test_the_address_and_the_names_that_are_answered(
    tmp_path: Path, host: str, url: str, names: tuple[str, ...]
) -> None:
    with server._bound(host, 0) as listener:
        assert server._url(listener, host) == f"{url}:{listener.getsockname()[1]}"
    assert server._host_names(Settings(data_dir=tmp_path, host=host)) == names


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_ends_and_later_ones_do_not_disturb(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    cleaned = False

    def run(kill: Callable[[], None]) -> None:
        nonlocal cleaned
        with server._ending_signals():
            try:
                kill()
            finally:
                kill()
                cleaned = True

    with pytest.raises(server._Ended):
        run(lambda: os.kill(os.getpid(), number))
    assert cleaned
    assert signal.getsignal(number) is before
