"""A real web server around a control plane on the in-memory cluster: routes are tested over real HTTP."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from api.app import create_app
from api.auth import Auth
from api.client import Client
from service.control_plane import ControlPlane
from service.fake_cluster import FakeCluster
from service.settings import Settings
from service.store import Store

TOKEN = "test-token"
SPEC: dict[str, Any] = {
    "name": "tiny",
    "model": {"kind": "gpt", "layers": 2, "hidden": 32, "heads": 2},
    "data": {"kind": "synthetic"},
    "steps": 20,
    "global_batch": 4,
    "micro_batch": 1,
    "sequence_length": 32,
    "workers": {"wanted": 2, "max": 3},
}


@dataclass(slots=True)
class Running:
    """A service that answers, and the parts behind it."""

    url: str
    app: FastAPI
    plane: ControlPlane
    cluster: FakeCluster
    http: httpx.Client = field(repr=False)
    client: Client = field(repr=False)

    def submit_running(self, **changes: Any) -> str:
        """Id of a job that runs on the cluster."""
        job_id = self.client.submit(SPEC | changes).id
        until(lambda: self.client.job(job_id).state == "running")
        return job_id


@contextmanager
def serving(app: FastAPI, *, port: int = 0) -> Iterator[str]:
    """Serve `app` on loopback; yields its address."""
    with socket.create_server(("127.0.0.1", port)) as listener:
        config = uvicorn.Config(app, log_level="error", access_log=False, timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            until(lambda: server.started)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


@contextmanager
def running(
    data_dir: Path, *, cluster: FakeCluster | None = None, port: int = 0, max_streams: int = 8
) -> Iterator[Running]:
    """A service on `data_dir`, with a client that has its token and one that has none."""
    settings = Settings(data_dir=data_dir, poll_interval_s=0.02, reconcile_interval_s=0.1)
    cluster = cluster or FakeCluster()
    plane = ControlPlane(settings, Store(settings.store_url), cluster)
    app = create_app(plane, Auth(token=TOKEN), max_streams=max_streams)
    with (
        serving(app, port=port) as url,
        httpx.Client(base_url=url, trust_env=False) as http,
        Client(url, TOKEN, who="tester") as client,
    ):
        yield Running(url, app, plane, cluster, http, client)


def until(holds: Callable[[], bool], *, timeout_s: float = 10.0) -> None:
    """Wait until it holds; fail where it does not come to that."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.01)
