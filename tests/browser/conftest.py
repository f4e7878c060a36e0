"""A real Chromium before a real service: uvicorn, the app, control plane and SQLite over a cluster in memory.

The browser is the system's own (Debian: `apt install chromium`); without one the tests here are skipped.
"""

import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from playwright.sync_api import Browser, Page, expect, sync_playwright

from api.app import create_app
from api.auth import SESSION_COOKIE, Auth
from service.control_plane import ControlPlane
from service.fake_cluster import FakeCluster
from service.jobs import Job, submitted
from service.settings import Settings
from service.store import Store
from workers.spec import JobSpec

TOKEN = "a-token-for-the-browser"
AUTH = Auth(token=TOKEN)
WAIT_MS = 20_000
"""Longest wait for the page; the machine may be busy."""
_START_TIMEOUT_S = 15.0
_STOP_TIMEOUT_S = 15.0
_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_ARGUMENTS = [
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--disable-quic",
]


def spec_of(**changes: Any) -> JobSpec:
    """A job of 8 micro-batches and 256 tokens a step that wants 2 workers and may have 6."""
    fields: dict[str, Any] = {
        "name": "browser job",
        "data": {"kind": "synthetic"},
        "steps": 100,
        "global_batch": 8,
        "micro_batch": 1,
        "sequence_length": 32,
        "workers": {"wanted": 2, "min": 1, "max": 6},
    }
    return JobSpec(**(fields | changes))


@dataclass
class Service:
    """The service on one port; `stop` and `start` restart it there, on the same database and cluster."""

    settings: Settings
    cluster: FakeCluster
    store: Store
    port: int
    _server: uvicorn.Server | None = None
    _thread: threading.Thread | None = None
    _listener: socket.socket = field(init=False)
    plane: ControlPlane = field(init=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.plane = ControlPlane(self.settings, self.store, self.cluster)
        app = create_app(self.plane, AUTH)
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        listener = socket.create_server(("127.0.0.1", self.port))
        self._listener = listener
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, daemon=True)
        self._thread.start()
        wait_until(lambda: self._server is not None and self._server.started, _START_TIMEOUT_S)

    def stop(self) -> None:
        if self._server is None or self._thread is None:
            return
        self._server.should_exit = True
        self._thread.join(_STOP_TIMEOUT_S)
        assert not self._thread.is_alive(), f"uvicorn did not end within {_STOP_TIMEOUT_S} s"
        # While it listens, the kernel takes connections that nobody answers.
        self._listener.close()
        self._server = self._thread = None

    def submit(self, **changes: Any) -> Job:
        """Submit a job and wait until it runs."""
        job = self.plane.submit(spec_of(**changes), who="test")
        wait_until(lambda: self.plane.get(job.id).state == "running")
        return self.plane.get(job.id)

    def train(self, job: Job, steps: int) -> None:
        """Have the job finish so many steps and wait until the service knows."""
        before = self.plane.get(job.id).step
        self.cluster.train(job.id, steps)
        wait_until(lambda: self.plane.get(job.id).step == before + steps)

    def store_named(self, job_id: str, name: str) -> None:
        """Store a queued job under a name that no specification may have."""
        outcome = submitted(job_id, spec_of(workers={"wanted": 6, "max": 6}), who="test", now=time.time())
        self.store.create(replace(outcome, job=replace(outcome.job, name=name)))


def wait_until(true: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait for a condition of the service, not of the page."""
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, f"not so within {timeout_s} s"
        time.sleep(0.01)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(_NAMES)} is installed (Debian: apt install chromium)")
    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=_ARGUMENTS, chromium_sandbox=False)
        yield browser
        browser.close()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    settings = Settings(data_dir=tmp_path, poll_interval_s=0.05, reconcile_interval_s=0.5)
    store = Store(settings.store_url)
    service = Service(settings, FakeCluster(cpus=8), store, _free_port())
    service.start()
    yield service
    service.stop()
    store.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@dataclass
class Visitor:
    """A browser tab, and what went wrong in it."""

    page: Page
    url: str
    faults: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def watch(self) -> None:
        self.page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        self.page.on("console", self._said)
        self.page.on("request", lambda request: self.requests.append(request.url))

    def _said(self, message: Any) -> None:
        # That an answer was an error is told by the page, and the tests ask for some.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.faults.append(f"console: {message.text}")

    def sign_in(self) -> None:
        self.page.goto(f"{self.url}/dashboard")
        self.page.get_by_label("Token").fill(TOKEN)
        self.page.get_by_role("button", name="Sign in").click()
        self.page.get_by_role("heading", name="Jobs").wait_for()

    def open(self, address: str) -> None:
        self.page.goto(f"{self.url}/dashboard#/{address}")


@pytest.fixture
def stranger(browser: Browser, service: Service) -> Iterator[Visitor]:
    """A tab that has not signed in."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(WAIT_MS)
    visitor = Visitor(context.new_page(), service.url)
    visitor.watch()
    yield visitor
    context.close()
    foreign = [url for url in visitor.requests if not url.startswith((service.url, "data:"))]
    assert foreign == [], "the page asked another host"
    assert visitor.faults == []


@pytest.fixture
def visitor(stranger: Visitor) -> Visitor:
    """A tab that has signed in and shows the list of jobs."""
    cookie = {"name": SESSION_COOKIE, "value": AUTH.issue_session(), "url": stranger.url}
    stranger.page.context.add_cookies([cookie])
    stranger.open("jobs")
    stranger.page.get_by_role("heading", name="Jobs").wait_for()
    return stranger
