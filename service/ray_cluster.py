"""The cluster on Ray, seen from the service: starts the driver process, sends it requests, bounds each wait.

The driver (`service.ray_driver`) is replaced when it dies or stops answering; until it is connected again
every call raises ClusterUnavailable at once, so that no request of a user waits for a cluster to start.
Imports no Ray.
"""

import json
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from service.cluster import ClusterView, ControllerStatus, NodeView, WorkerPlace
from service.errors import ClusterUnavailable, ControllerGone, ServiceError
from service.journal import logger
from service.local_ray import LocalRay
from service.settings import Settings, child_environment
from workers.spec import JobSpec

_CONNECT_TIMEOUT_S = 60.0
_CALL_TIMEOUT_S = 15.0
_START_TIMEOUT_S = 60.0
_EXIT_TIMEOUT_S = 5.0
_SEND_TIMEOUT_S = 5
_RETRY_PAUSE_S = 2.0

_log = logger(__name__)


class RayCluster:
    """A `service.cluster.Cluster`; on the cluster at `settings.ray_address`, or on our own local head.

    `local` is None where the cluster is someone else's.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.local = None if settings.ray_address else LocalRay(settings.data_dir, cpus=settings.local_cpus)
        self._connecting = threading.Lock()
        self._driver: _Driver | None = None
        self._not_before = 0.0

    def connect(self) -> None:
        """Make the driver ready; the local head is started, or found again, first.

        Raises ClusterUnavailable where that fails, and for two seconds after a failure without trying.
        """
        with self._connecting:
            head_runs = self.local is None or self.local.running
            if self._driver is not None and self._driver.alive and head_runs:
                return
            self._hang_up()
            if time.monotonic() < self._not_before:
                raise ClusterUnavailable(
                    "the last attempt to reach Ray has just failed; it is tried again soon"
                )
            try:
                self._driver = self._started()
            except ServiceError:
                self._not_before = time.monotonic() + _RETRY_PAUSE_S
                raise

    def close(self) -> None:
        """End the driver process; jobs and the local head run on."""
        with self._connecting:
            self._hang_up()

    def view(self) -> ClusterView:
        """The nodes now."""
        return ClusterView(tuple(NodeView(**node) for node in self._call("view")))

    def drain(self, node_id: str, *, why: str, deadline: float | None) -> None:
        """Have a node get no new work."""
        self._call("drain", node_id=node_id, why=why, deadline=deadline)

    def start_job(self, job_id: str, spec: JobSpec, *, attempt: int, wanted: int) -> None:
        """Create and start the controller of this attempt."""
        self._call(
            "start_job",
            timeout_s=_START_TIMEOUT_S,
            job_id=job_id,
            spec=spec.model_dump(mode="json"),
            storage=str(self._settings.storage_dir),
            attempt=attempt,
            wanted=wanted,
        )

    def command(self, job_id: str, command: Mapping[str, Any]) -> None:
        """Hand a command to the job's controller."""
        self._call("command", job_id=job_id, command=dict(command))

    def read(self, job_id: str, *, after: int, limit: int) -> list[dict[str, Any]]:
        """Entries of the controller's log."""
        entries: list[dict[str, Any]] = self._call("read", job_id=job_id, after=after, limit=limit)
        return entries

    def status(self, job_id: str) -> ControllerStatus:
        """What the job's controller says of itself."""
        account = self._call("status", job_id=job_id)
        # A controller of a newer release may say more.
        known = {field.name: account[field.name] for field in fields(ControllerStatus)}
        places = tuple(WorkerPlace(**place) for place in account["workers"])
        return ControllerStatus(**known | {"workers": places})

    def running_jobs(self) -> set[str]:
        """Ids of the jobs that have a controller."""
        return set(self._call("running_jobs"))

    def release(self, job_id: str) -> None:
        """End the job's controller."""
        self._call("release", job_id=job_id)

    def _call(self, op: str, *, timeout_s: float = _CALL_TIMEOUT_S, **arguments: Any) -> Any:
        driver = self._driver
        if driver is None or not driver.alive:
            raise ClusterUnavailable("the service is not connected to Ray; it keeps trying")
        return driver.call(op, arguments, timeout_s=timeout_s)

    def _started(self) -> "_Driver":
        address, changes = self._settings.ray_address, dict(_QUIET)
        if self.local is not None:
            address = self.local.ensure_running()
            changes |= self.local.environment()
        driver = _Driver(child_environment(changes), folder=self._settings.data_dir)
        try:
            ready = driver.call("connect", {"address": address}, timeout_s=_CONNECT_TIMEOUT_S)
        except ServiceError:
            driver.stop()
            raise
        _log.info("connected to Ray", address=address, **ready)
        return driver

    def _hang_up(self) -> None:
        if self._driver is not None:
            self._driver.stop()
            self._driver = None


_QUIET = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
"""Ray is to leave the workers' environment as it is, and not to guess one from how we were started."""


class _Driver:
    """One driver process and the requests under way to it."""

    def __init__(self, environment: Mapping[str, str], *, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        # A session of its own: Ctrl-C in the service's terminal is not meant for it.
        with theirs, (folder / "ray-driver.log").open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "service.ray_driver", str(theirs.fileno())],
                env=environment,
                cwd=folder,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._log_file = folder / "ray-driver.log"
        self._socket = ours
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_TIMEOUT_S, 0))
        self._guard = threading.Lock()
        self._waiting: dict[int, Future[Any]] = {}
        self._next_id = 0
        self._hung_up = False
        self._reader = threading.Thread(target=self._receive, name="ray-driver", daemon=True)
        self._reader.start()

    @property
    def alive(self) -> bool:
        return not self._hung_up

    def call(self, op: str, arguments: Mapping[str, Any], *, timeout_s: float) -> Any:
        """Ask and wait for the answer; a driver that keeps silent is given up with all its requests."""
        answer: Future[Any] = Future()
        with self._guard:
            if self._hung_up:
                raise ClusterUnavailable("the connection to Ray was lost; it is being made again")
            self._next_id += 1
            self._waiting[self._next_id] = answer
            line = json.dumps({"id": self._next_id, "op": op, "arguments": dict(arguments)}) + "\n"
            unsent = self._send(line.encode())
        if unsent is not None:
            self._give_up(f"the process that talks to Ray takes no more requests: {unsent}")
        try:
            reply = answer.result(timeout_s)
        except TimeoutError:
            # The driver bounds its own calls more tightly: it hangs inside Ray, and will not come back.
            self._give_up(f"Ray did not answer {op} within {timeout_s:.0f} s")
            raise ClusterUnavailable(f"Ray did not answer {op} within {timeout_s:.0f} s") from None
        if "error" not in reply:
            return reply["value"]
        raise _error_of(reply, op)

    def stop(self) -> None:
        """End the process: it leaves when the socket closes, and is killed where it does not."""
        self._give_up("the service is disconnecting from Ray")
        try:
            self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_EXIT_TIMEOUT_S)
        self._reader.join(_EXIT_TIMEOUT_S)

    def _send(self, line: bytes) -> OSError | None:
        try:
            self._socket.sendall(line)
        except OSError as error:
            return error
        return None

    def _receive(self) -> None:
        try:
            with self._socket.makefile("r", encoding="utf-8") as replies:
                for line in replies:
                    reply = json.loads(line)
                    with self._guard:
                        answer = self._waiting.pop(reply["id"], None)
                    if answer is not None:
                        answer.set_result(reply)
        except OSError:
            pass  # closed under the reader by `_give_up`
        self._give_up(f"the process that talks to Ray has ended; see {self._log_file}")

    def _give_up(self, reason: str) -> None:
        with self._guard:
            if self._hung_up:
                return
            self._hung_up = True
            waiting, self._waiting = self._waiting, {}
            # Wakes the reader; closing alone would leave it blocked.
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
        for answer in waiting.values():
            answer.set_result({"error": "unavailable", "message": reason})


def _error_of(reply: Mapping[str, Any], op: str) -> ServiceError:
    message = reply["message"]
    match reply["error"]:
        case "gone":
            return ControllerGone(message)
        case "unavailable":
            return ClusterUnavailable(f"{op}: {message}")
    return ServiceError(f"the cluster could not {op}: {message}", code="cluster_error")
