"""The process that talks to Ray, and the only file that imports it.

Ray ends the process of a driver whose cluster has been gone for a minute, and blocks inside calls until
then. So the driver is a process of its own, a child of the service: it reads one JSON request a line from
the socket it inherited, answers each by its id, out of order, and ends when the service hangs up.

    request   {"id": 7, "op": "read", "arguments": {...}}
    answer    {"id": 7, "value": ...}
              {"id": 7, "error": "gone" | "unavailable" | "failed", "message": "..."}

Knows nothing of the database, and of the environment only what it was started with.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from workers import nodes as nodes_of_ray
from workers.naming import RAY_NAMESPACE, controller_name

THREADS = 16
"""Requests answered at one time; the rest wait in line."""

CONTROLLER_THREADS = 4
"""Methods of a controller answered at one time: a long read is not to hold up a cancel."""

_HEAD_RESOURCE = "node:__internal_head__"
_ON_THE_HEAD = {_HEAD_RESOURCE: 0.001}
"""Controllers are placed where the cluster's own brain is: losing any other node then costs a job that node's
workers only, and no controller is ever cut off alive from the one that Ray starts in its place."""

_CALL_TIMEOUT_S = 5.0
_CREATION_TIMEOUT_S = 30.0
_RELEASE_TIMEOUT_S = 10.0
_POLL_S = 0.05


class Gone(Exception):  # noqa: N818
    """The job has no controller."""


def serve(connection: socket.socket) -> None:
    """Answer requests until the other side hangs up."""
    sending = threading.Lock()

    def answer(request: Mapping[str, Any]) -> None:
        line = json.dumps({"id": request["id"], **_answer(request)}) + "\n"
        # The service may have hung up meanwhile; then the loop below ends as well.
        with sending:
            try:
                connection.sendall(line.encode())
            except OSError:
                return

    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="request")
    with connection.makefile("r", encoding="utf-8") as requests:
        for line in requests:
            pool.submit(answer, json.loads(line))
    pool.shutdown(wait=False, cancel_futures=True)


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {"value": OPERATIONS[request["op"]](**request["arguments"])}
    except Gone as error:
        return {"error": "gone", "message": str(error)}
    except RayTaskError as error:
        return {"error": "failed", "message": _last_line(error)}
    except RayActorError as error:
        # Restarting: it will be back. Dead for good: its name is forgotten, so the next call says Gone.
        return {"error": "unavailable", "message": _last_line(error)}
    except (GetTimeoutError, TimeoutError, RayError, ConnectionError) as error:
        return {"error": "unavailable", "message": f"{type(error).__name__}: {_last_line(error)}"}
    except Exception as error:
        return {"error": "failed", "message": f"{type(error).__name__}: {_last_line(error)}"}


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def connect(address: str) -> dict[str, str]:
    """Join the cluster at `address` (host:port) as a driver."""
    ray.init(
        address=address,
        namespace=RAY_NAMESPACE,
        log_to_driver=False,
        configure_logging=False,
        ignore_reinit_error=True,
    )
    return {"ray": ray.__version__}


def view() -> list[dict[str, Any]]:
    """The nodes with their total and free resources."""
    free = available_resources_per_node()  # type: ignore[no-untyped-call]
    drained = nodes_of_ray.draining()
    nodes = []
    for node in ray.nodes():  # type: ignore[no-untyped-call]
        total, left = node["Resources"], free.get(node["NodeID"], {})
        nodes.append(
            {
                "id": node["NodeID"],
                "address": node["NodeManagerAddress"],
                "alive": bool(node["Alive"]),
                "cpus": total.get("CPU", 0.0),
                "cpus_free": left.get("CPU", 0.0),
                "gpus": total.get("GPU", 0.0),
                "gpus_free": left.get("GPU", 0.0),
                "memory_bytes": int(total.get("memory", 0)),
                "memory_free_bytes": int(left.get("memory", 0)),
                "draining": node["NodeID"] in drained,
                "deadline": drained.get(node["NodeID"]),
                "head": _HEAD_RESOURCE in total,
            }
        )
    return nodes


def drain(node_id: str, why: str, deadline: float | None) -> None:
    """Have Ray put no more work on a node."""
    nodes_of_ray.drain(node_id, why=why, deadline=deadline)


def start_job(job_id: str, spec: dict[str, Any], storage: str, attempt: int, wanted: int) -> None:
    """Create and start the controller of this attempt; it may be there already from a call that timed out."""
    from workers.controller import JobController

    existing = _find(job_id)
    if existing is not None and _get(existing.status.remote())["attempt"] != attempt:
        release(job_id)
    actor: Any = ray.remote(JobController)
    controller = actor.options(
        name=controller_name(job_id),
        namespace=RAY_NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        resources=_ON_THE_HEAD,
        max_restarts=-1,
        max_concurrency=CONTROLLER_THREADS,
    ).remote(job_id, spec, storage, attempt, wanted)
    # It begins by itself, also where nobody is left to hear this answer.
    _get(controller.status.remote(), timeout_s=_CREATION_TIMEOUT_S)


def command(job_id: str, command: dict[str, Any]) -> None:
    """Hand a command over."""
    _get(_controller(job_id).command.remote(command))


def read(job_id: str, after: int, limit: int) -> list[dict[str, Any]]:
    """Entries of the controller's log."""
    entries: list[dict[str, Any]] = _get(_controller(job_id).read.remote(after, limit))
    return entries


def status(job_id: str) -> dict[str, Any]:
    """The controller's account of itself."""
    account: dict[str, Any] = _get(_controller(job_id).status.remote())
    return account


def running_jobs() -> list[str]:
    """Ids of the jobs whose controller's name is taken."""
    prefix = controller_name("x").removesuffix("x")
    names = ray.util.list_named_actors(all_namespaces=True)
    return [
        actor["name"].removeprefix(prefix)
        for actor in names
        if actor["namespace"] == RAY_NAMESPACE and actor["name"].startswith(prefix)
    ]


def release(job_id: str) -> None:
    """End the controller and wait until its name is free; Ray ends the workers it owns with it."""
    controller = _find(job_id)
    if controller is None:
        return
    ray.kill(controller, no_restart=True)
    deadline = time.monotonic() + _RELEASE_TIMEOUT_S
    while _find(job_id) is not None:
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"the controller of job {job_id} still holds its name {_RELEASE_TIMEOUT_S} s on"
            )
        time.sleep(_POLL_S)


def _find(job_id: str) -> Any | None:
    try:
        return ray.get_actor(controller_name(job_id), namespace=RAY_NAMESPACE)
    except ValueError:
        return None


def _controller(job_id: str) -> Any:
    controller = _find(job_id)
    if controller is None:
        raise Gone(f"job {job_id} has no controller on the cluster")
    return controller


def _get(reference: Any, *, timeout_s: float = _CALL_TIMEOUT_S) -> Any:
    return ray.get(reference, timeout=timeout_s)


OPERATIONS: Mapping[str, Callable[..., Any]] = {
    operation.__name__: operation
    for operation in (connect, view, drain, start_job, command, read, status, running_jobs, release)
}


def main() -> None:
    """Serve the inherited socket whose descriptor is the only argument."""
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        serve(connection)
    # Calls into a dead cluster may still be stuck in other threads; nothing here needs an orderly end.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
