"""The service's process: from settings to a running web server, and back to nothing left behind.

Owns the order of starting and ending, the port, the lock on the data folder and the signals. A local Ray that
is ours is ended with the service if no job lives on it; otherwise it is left running, and the jobs with it.
"""

import errno
import fcntl
import logging
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import FrameType

import uvicorn

from api import server_file
from api.app import create_app
from api.auth import Auth
from api.token_file import ensure_token
from service.control_plane import ControlPlane
from service.errors import ClusterUnavailable
from service.jobs import LIVE, Job
from service.local_ray import LocalRay
from service.ray_cluster import RayCluster
from service.settings import Settings
from service.store import Store

_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_BACKLOG = 128
_DRAIN_TIMEOUT_S = 5
"""How long open requests may take to end; streams are told at once."""


class ServeError(RuntimeError):
    """The service cannot start; the message says why and what to change."""


def serve(settings: Settings, *, announce: Callable[[str], None]) -> None:
    """Run the service until SIGTERM or SIGINT. `announce` is told, for people, what happens.

    Raises ServeError where the folder or the port is taken, and what token, store and local Ray raise.
    """
    # To stderr: stdout is for what is announced.
    logging.basicConfig(level=logging.INFO, format=_LOG_FORMAT)
    with suppress(_Ended), _ending_signals():
        settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _only_one(settings.data_dir), _bound(settings.host, settings.port) as listener:
            _serve_on(listener, settings, announce)


def _serve_on(listener: socket.socket, settings: Settings, announce: Callable[[str], None]) -> None:
    auth = Auth(token=ensure_token(settings.token_file), allowed_hosts=_host_names(settings))
    with closing(Store(settings.store_url)) as store, closing(RayCluster(settings)) as cluster:
        try:
            _connect(cluster, announce)
            app = create_app(ControlPlane(settings, store, cluster), auth)
            url = _url(listener, settings.host)
            server_file.write(settings.data_dir, url)
            announce(f"serving at {url}, dashboard at {url}/dashboard; the token is in {settings.token_file}")
            config = uvicorn.Config(
                app,
                log_config=None,
                log_level="warning",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=_DRAIN_TIMEOUT_S,
            )
            uvicorn.Server(config).run(sockets=[listener])
        finally:
            server_file.remove(settings.data_dir)
            if cluster.local is not None:
                _leave(cluster.local, store, announce)


def _connect(cluster: RayCluster, announce: Callable[[str], None]) -> None:
    """Our own Ray must come up; one of somebody else may come later, and requests say so until then."""
    if cluster.local is not None:
        announce("starting the local Ray; this takes some seconds")
        cluster.connect()
        return
    try:
        cluster.connect()
    except ClusterUnavailable as error:
        announce(f"the cluster is not reachable yet, and is tried again: {error}")


def _leave(local: LocalRay, store: Store, announce: Callable[[str], None]) -> None:
    """End our Ray unless jobs live on it."""
    live = store.in_states(LIVE)
    if live and local.running:
        announce(
            f"the local Ray is left running, for jobs live on it ({named(live)}); "
            "'elastic-zero serve' finds them again; 'elastic-zero down --force' ends Ray, "
            "and they go on from their last checkpoints when it is served again"
        )
    elif local.stop():
        announce("the local Ray has been stopped; no job needs it")


def named(jobs: Sequence[Job]) -> str:
    """The first few ids."""
    return ", ".join(job.id for job in jobs[:5]) + (", ..." if len(jobs) > 5 else "")


class _Ended(BaseException):
    """A signal asked the service to end. Not an Exception: nothing on the way may take it for a failure."""


@contextmanager
def _ending_signals() -> Iterator[None]:
    """Raise _Ended at the first SIGTERM or SIGINT, and pass over later ones, so that cleaning up is finished.

    While uvicorn runs it has handlers of its own; it raises the signal again once it has shut down.
    """
    asked = False

    def end(_number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        if not asked:
            asked = True
            raise _Ended

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _only_one(data_dir: Path) -> Iterator[None]:
    """Hold the data folder: two services on one database would run each job twice."""
    with (data_dir / "serve.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            record = server_file.read(data_dir)
            where = f" at {record.url} (process {record.pid})" if record else ""
            raise ServeError(
                f"a service already runs on the data folder {data_dir}{where}; "
                "use it, end it with 'elastic-zero down', or name another folder with --data-dir"
            ) from None
        yield


@contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    """A listening socket; port 0 takes any free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ServeError(
                f"port {port} of {host} is taken; name another with --port, or 0 for any free one"
            ) from error
        raise ServeError(f"cannot listen on {host} port {port}: {error}; see --host and --port") from error
    with listener:
        yield listener


def _url(listener: socket.socket, host: str) -> str:
    """Where this machine reaches the listener; a wildcard address stands for loopback too."""
    port = listener.getsockname()[1]
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}"


def _host_names(settings: Settings) -> tuple[str, ...]:
    """The host names that are answered: those set, and the address that was bound unless it is a wildcard."""
    names = [name.strip("[]").lower() for name in settings.allowed_hosts]
    bound = settings.host.lower()
    return tuple(names if bound in {"0.0.0.0", "::", *names} else [*names, bound])
