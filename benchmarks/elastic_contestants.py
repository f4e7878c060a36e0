"""The two that are compared, behind one seam: start a job, tell it a number, kill a worker, read its steps.

Both run on the Ray cluster that the caller has connected to. What they say is turned into rows of
`elastic_timeline`; what a change cost is worked out there.
"""

import json
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import ray

from benchmarks import elastic_ray_train
from benchmarks.elastic_model import MICRO_BATCH, SEQUENCE, model_section
from benchmarks.elastic_timeline import StepRow
from workers import naming
from workers.controller import JobController

MICRO_BATCHES = 4
FEWEST, MOST = 2, 4
WAIT_S = 240.0
"""Longest wait for anything that a contestant was told to do."""

_POLL_S = 0.1
_CALL_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 120.0
_MANY_STEPS = 1_000_000

Found = TypeVar("Found")


class ContestantError(Exception):
    """A contestant ended, or did not do what it was told to in time."""


class NotEndedError(Exception):
    """A contestant's job goes on where it should be over: nothing can be measured beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is trained.

    peer_checkpoint_every  steps between two checkpoints of the peer
    settled_steps          steps that a group does before it is changed
    stage                  of ours; the peer has nothing partitioned
    """

    size: str
    peer_checkpoint_every: int
    settled_steps: int
    stage: int = 2


class Contestant(Protocol):
    """A job under way, begun with the most workers."""

    def rows(self) -> list[StepRow]:
        """All steps so far. Raises ContestantError if the job has ended."""

    def settle(self) -> None:
        """Wait for a moment that is good for it to be changed at."""

    def order(self, workers: int) -> None:
        """Have it go on with another number of workers."""

    def kill(self, rank: int, *, after_loss: int | None) -> float:
        """SIGKILL a worker of the newest generation; returns Unix seconds right before.

        after_loss: with how many workers it is to go on; None: as it likes.
        """

    def event(self, kind: str, *, generation: int) -> dict[str, Any]:
        """What it says of the change that led to a generation; empty where it says nothing."""

    def close(self) -> None:
        """End the job and all its processes. Raises NotEndedError."""


def wait_for(contestant: Contestant, condition: Callable[[list[StepRow]], Found | None], what: str) -> Found:
    """The condition's answer over the rows, once there is one. Raises ContestantError after `WAIT_S`."""
    deadline = time.monotonic() + WAIT_S
    while (found := condition(contestant.rows())) is None:
        if time.monotonic() > deadline:
            raise ContestantError(f"{what} did not come within {WAIT_S:g} s")
        time.sleep(_POLL_S)
    return found


class Ours:
    """A job of this repository: its controller, driven as the service drives it."""

    def __init__(self, job: Job, *, job_id: str) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="bench-elastic-"))
        self._job_id = job_id
        self._entries: list[dict[str, Any]] = []
        self._steps: list[StepRow] = []
        create: Any = (
            ray.remote(JobController)
            .options(
                name=naming.controller_name(job_id),
                namespace=naming.RAY_NAMESPACE,
                lifetime="detached",
                max_restarts=-1,
                num_cpus=0,
            )
            .remote
        )
        self._controller = create(job_id, _spec(job), str(self._folder), 1, MOST)

    def rows(self) -> list[StepRow]:
        self._read()
        last = next((entry for entry in reversed(self._entries) if _is_event(entry, "phase")), None)
        if last and last["data"]["phase"] in ("failed", "succeeded", "cancelled", "paused"):
            raise ContestantError(f"the job is {last['data']['phase']}: {last['data']['reason']}")
        return self._steps

    def settle(self) -> None:
        """Any moment will do."""

    def order(self, workers: int) -> None:
        self._command({"kind": "resize", "workers": workers})

    def kill(self, rank: int, *, after_loss: int | None) -> float:
        del after_loss
        newest = max(row.generation for row in self.rows())
        worker = next(
            entry["worker"]
            for entry in reversed(self._entries)
            if entry["type"] == "report" and (entry["generation"], entry["rank"]) == (newest, rank)
        )
        log = naming.JobFolder(self._folder, self._job_id).worker_log(worker).read_text(encoding="utf-8")
        return _kill(int(re.findall(r"worker started.*\bpid=(\d+)", log)[-1]))

    def event(self, kind: str, *, generation: int) -> dict[str, Any]:
        deadline = time.monotonic() + _CALL_TIMEOUT_S
        while True:  # it may be logged a little after the first steps
            self._read()
            for entry in self._entries:
                if _is_event(entry, kind) and entry["data"]["generation"] == generation:
                    return dict(entry["data"])
            if time.monotonic() > deadline:
                raise ContestantError(f"no event {kind!r} told of generation {generation}")
            time.sleep(_POLL_S)

    def close(self) -> None:
        try:
            self._command({"kind": "cancel"})
            deadline = time.monotonic() + _END_TIMEOUT_S
            while time.monotonic() < deadline:
                status = ray.get(self._controller.status.remote(), timeout=_CALL_TIMEOUT_S)
                if status["phase"] in ("cancelled", "failed", "succeeded"):
                    break
                time.sleep(_POLL_S)
        finally:
            ray.kill(self._controller, no_restart=True)
            shutil.rmtree(self._folder, ignore_errors=True)

    def _command(self, command: dict[str, Any]) -> None:
        ray.get(self._controller.command.remote({"who": "benchmark", **command}), timeout=_CALL_TIMEOUT_S)

    def _read(self) -> None:
        new = ray.get(self._controller.read.remote(len(self._entries)), timeout=_CALL_TIMEOUT_S)
        self._entries += new
        self._steps += [_row(entry) for entry in new if entry["type"] == "report"]


def _spec(job: Job) -> dict[str, Any]:
    return {
        "name": "bench-elastic",
        "model": model_section(job.size),
        "data": {"kind": "synthetic", "samples": 1024},
        "steps": _MANY_STEPS,
        "global_batch": MICRO_BATCHES * MICRO_BATCH,
        "micro_batch": MICRO_BATCH,
        "sequence_length": SEQUENCE,
        "zero": {"stage": job.stage},
        "workers": {"wanted": MOST},
    }


def _row(report: dict[str, Any]) -> StepRow:
    # A report is made after its step's time was taken, so `began_s` errs to the late side.
    return StepRow(
        generation=report["generation"],
        step=report["step"],
        rank=report["rank"],
        world_size=report["world_size"],
        began_s=report["time"] - report["step_s"],
        ended_s=report["time"],
    )


def _is_event(entry: dict[str, Any], kind: str) -> bool:
    return bool(entry["type"] == "event" and entry["kind"] == kind)


class Peer:
    """Ray Train's job; its driver's call runs in a thread here."""

    def __init__(self, job: Job) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="bench-ray-train-"))
        self._orders: dict[str, int] = {"workers": MOST, "after_loss": MOST}
        self._read_to: dict[Path, int] = {}
        self._steps: list[StepRow] = []
        self._pids: dict[tuple[int, int], int] = {}
        self._ended: str | None = None
        self._write_orders()
        self._trainer = elastic_ray_train.trainer(
            self._folder,
            size=job.size,
            micro_batches=MICRO_BATCHES,
            workers=(1, MOST),
            checkpoint_every=job.peer_checkpoint_every,
        )
        self._thread = threading.Thread(target=self._fit, name="ray-train", daemon=True)
        self._thread.start()

    def rows(self) -> list[StepRow]:
        self._read()
        if self._ended is not None:
            raise ContestantError(f"Ray Train's job ended: {self._ended}")
        return self._steps

    def settle(self) -> None:
        """Right after its controller has taken a checkpoint, so that it has as few steps to repeat as can be.

        That is up to 2 s after the report: a worker that is lost in between takes the checkpoint with it.
        """
        before = self._checkpoints_taken()
        wait_for(
            self,
            lambda _: True if self._checkpoints_taken() != before else None,
            "Ray Train's next checkpoint",
        )

    def order(self, workers: int) -> None:
        self._orders["workers"] = workers
        self._write_orders()

    def kill(self, rank: int, *, after_loss: int | None) -> float:
        self._orders["after_loss"] = after_loss or self._orders["workers"]
        self._write_orders()
        newest = max(row.generation for row in self.rows())
        killed_at_s = _kill(self._pids[newest, rank])
        self._orders["workers"] = self._orders["after_loss"]
        self._write_orders()
        return killed_at_s

    def event(self, kind: str, *, generation: int) -> dict[str, Any]:
        del kind, generation
        return {}

    def close(self) -> None:
        (self._folder / "stop").touch()
        self._thread.join(_END_TIMEOUT_S)
        if self._thread.is_alive():
            raise NotEndedError(f"Ray Train's job did not end within {_END_TIMEOUT_S:g} s of being told to")
        shutil.rmtree(self._folder, ignore_errors=True)

    def _checkpoints_taken(self) -> int:
        """Changes whenever the controller has noted a checkpoint."""
        noted = self._folder / elastic_ray_train.RUN / "checkpoint_manager_snapshot.json"
        return noted.stat().st_mtime_ns if noted.exists() else 0

    def _fit(self) -> None:
        try:
            self._trainer.fit()
            self._ended = "it was told to stop"
        except Exception as error:  # whatever it raises is told where its rows are read
            self._ended = f"{type(error).__name__}: {error}"

    def _write_orders(self) -> None:
        part = self._folder / "orders.part"
        part.write_text(json.dumps(self._orders), encoding="utf-8")
        part.replace(self._folder / "orders.json")

    def _read(self) -> None:
        for path in sorted(self._folder.glob("steps-*.jsonl")):
            with path.open("rb") as lines:
                lines.seek(self._read_to.get(path, 0))
                whole = lines.read().rpartition(b"\n")[0]
            if not whole:
                continue
            self._read_to[path] = self._read_to.get(path, 0) + len(whole) + 1
            for line in whole.splitlines():
                self._take(json.loads(line))

    def _take(self, record: dict[str, Any]) -> None:
        pid = record.pop("pid")
        row = StepRow(**record)
        self._steps.append(row)
        self._pids[row.generation, row.rank] = pid


def _kill(pid: int) -> float:
    killed_at_s = time.time()
    os.kill(pid, signal.SIGKILL)
    return killed_at_s
