"""The controller of one job: a named, detached, restartable Ray actor that owns the job's workers.

Answers the service quickly from its own methods, while a thread conducts the attempt. Its workers die with
it, so none is orphaned. If its process dies, Ray starts it again: the log says that the attempt was under
way, and the new process goes on from the last checkpoint by itself.
"""

import os
import re
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from workers import policies
from workers.commands import Resize, parse_command
from workers.conductor import Conductor, Limits
from workers.goodput import goodput
from workers.group import Group
from workers.log import JobLog
from workers.naming import JobFolder
from workers.nodes import NodeWatch
from workers.orders import Orders
from workers.policies import Bounds
from workers.reports import Phase
from workers.spec import JobSpec

READ_LIMIT = 10_000
"""Most entries of one `read`."""


class JobController:
    """One attempt of one job. All methods are quick."""

    def __init__(
        self,
        job_id: str,
        spec: dict[str, Any],
        storage: str,
        attempt: int,
        wanted: int,
        *,
        limits: Limits | None = None,
    ) -> None:
        """Take up the job's log and begin the attempt, or go on with one that was under way.

        Whoever created the actor may be gone by now, so nothing more is needed from it.

        wanted: the number of workers at the start of the attempt; after a restart the log knows better.
        limits: how long is waited for what; None: the usual.
        """
        self._spec = JobSpec.model_validate(spec)
        self._attempt = attempt
        self._bounds = Bounds(least=self._spec.workers.min, most=self._spec.max_workers)
        if refusal := policies.outside(self._bounds, wanted):
            raise ValueError(f"job {job_id}: {refusal}")
        folder = JobFolder(Path(storage), job_id)
        self._log = JobLog(folder.log)
        history = self._log.history
        if history.attempt > attempt:
            raise ValueError(
                f"job {job_id}: attempt {attempt} is older than the log's last, {history.attempt}"
            )
        taken_up = history.attempt == attempt
        self._final = history.phase if taken_up and history.phase and history.phase.final else None
        self._orders = Orders(
            history.wanted if taken_up else wanted,
            cancel=history.cancel if taken_up else None,
            pause=history.pause if taken_up else None,
        )
        self._conductor = Conductor(
            spec=self._spec,
            attempt=attempt,
            log=self._log,
            orders=self._orders,
            group=Group(
                spec=self._spec,
                job_id=job_id,
                storage=Path(storage),
                first_number=_next_number(folder.worker_logs),
                wake=self._orders.wake,
            ),
            checkpoints=folder.checkpoint_root(self._spec.checkpoints.location),
            limits=limits,
            nodes=NodeWatch(),
            leave_node=_leave_node,
        )
        if self._final is None:
            threading.Thread(target=self._conduct, name="conductor", daemon=True).start()

    def read(self, after: int, limit: int = 1000) -> list[dict[str, Any]]:
        """The log's entries numbered above `after`, oldest first, at most `limit`; JSON-ready."""
        return self._log.read(after, min(limit, READ_LIMIT))

    def command(self, command: dict[str, Any]) -> None:
        """Take note of what the owner wants; the log tells what comes of it.

        Raises pydantic's ValidationError for anything but a command of `workers.commands`.
        """
        order = parse_command.validate_python(command)
        generation = self._conductor.generation
        entry = order.model_dump(mode="json")
        if self._phase().final:
            self._log.event("command", generation, {**entry, "refused": f"the job is {self._phase()}"})
            return
        if isinstance(order, Resize) and (refusal := policies.outside(self._bounds, order.workers)):
            refused = {"who": order.who, "wanted": order.workers, "reason": refusal}
            self._log.event("resize_refused", generation, {**refused, "workers": self._orders.wanted})
            return
        self._log.event("command", generation, entry)
        self._orders.give(order)

    def status(self) -> dict[str, Any]:
        """Where the attempt stands, JSON-ready. Its times stop with it."""
        conductor = self._conductor
        productive_s = conductor.productive_s
        elapsed_s = max(0.0, (conductor.ended_at or time.time()) - conductor.began_at)
        return {
            "phase": self._phase().value,
            "generation": conductor.generation,
            "world_size": conductor.world_size,
            "wanted": self._orders.wanted,
            "step": conductor.step,
            "last_seq": self._log.last_seq,
            "attempt": self._attempt,
            "productive_s": productive_s,
            "elapsed_s": elapsed_s,
            "goodput": goodput(productive_s, elapsed_s),
            "node": conductor.node,
            "workers": [
                {"worker": worker, "rank": rank, "node": node}
                for rank, (worker, node) in enumerate(conductor.places)
            ],
        }

    def _phase(self) -> Phase:
        return self._final or self._conductor.phase

    def _conduct(self) -> None:
        try:
            self._conductor.run()
        except Exception:  # the log itself cannot be written: there is no better place left to tell it
            traceback.print_exc(file=sys.stderr)
            self._final = Phase.FAILED


def _leave_node() -> None:
    """End this process as if it had been killed: Ray starts the actor again, on a node that takes work."""
    os._exit(1)


def _next_number(worker_logs: Path) -> int:
    """The first worker number that no earlier worker of the job has left a log under."""
    numbers = [re.fullmatch(r"w(\d+)\.log", path.name) for path in worker_logs.glob("w*.log")]
    return max((int(number[1]) for number in numbers if number), default=-1) + 1
