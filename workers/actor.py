"""A worker as a Ray actor: the shell around `workers.worker`, which says what the methods do.

The controller imports this module to create actors, and must not load torch for that: the worker itself is
only imported in the actor's own process. The process ends when the controller kills it, or by Ray when the
controller is gone.
"""

import os
import threading
from pathlib import Path
from typing import Any

import ray

from workers.naming import JobFolder
from workers.protocol import Assignment, Poll, Readiness, Wish
from workers.spec import JobSpec
from workers.worker_log import logger, redirect

THREADS = 8
"""Ray's threads in the actor: one waits for ever, as the sign of life; the others answer."""


class WorkerActor:
    """Runs with THREADS concurrent methods, all but `prepare`, `poll` and `wait_for_ever` quick."""

    def __init__(self, name: str, job_id: str, spec: dict[str, Any], storage: str) -> None:
        folder = JobFolder(Path(storage), job_id)
        redirect(folder.worker_log(name))
        context = ray.get_runtime_context()
        log = logger(name)
        log.info("worker started", pid=os.getpid(), node=context.get_node_id(), job=job_id)
        from workers.worker import Worker

        self._worker = Worker(
            name=name,
            spec=JobSpec.model_validate(spec),
            folder=folder,
            node=context.get_node_id(),
            address=ray.util.get_node_ip_address(),  # type: ignore[no-untyped-call]
            log=log,
        )

    def wait_for_ever(self) -> None:
        """Never returns: the call fails in the controller's hands when this process is gone."""
        threading.Event().wait()

    def prepare(self) -> Readiness:
        return self._worker.prepare()

    def begin(self, assignment: Assignment) -> None:
        self._worker.begin(assignment)

    def ask(self, generation: int, wish: Wish) -> None:
        self._worker.ask(generation, wish)

    def abort(self, generation: int) -> None:
        self._worker.abort(generation)

    def poll(self, after: int, news: int, wait_s: float) -> Poll:
        return self._worker.poll(after, news=news, wait_s=wait_s)
