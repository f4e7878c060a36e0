"""A job's controller on a real local Ray, driven as the service drives it; what tests of it share."""

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import RayActorError

from workers import naming
from workers.conductor import Limits
from workers.controller import JobController
from workers.data import open_batches
from workers.spec import JobSpec

LIMITS = Limits(start_patience_s=3, grace_s=1, abort_s=3)
PACED = "tests.integration.paced_model:Paced"


def spec_of(**changes: Any) -> dict[str, Any]:
    fields = {
        "data": {"kind": "synthetic", "samples": 64},
        "model": {"kind": "custom", "factory": PACED, "arguments": {"pause_s": 0.05}},
        "steps": 10_000,
        "global_batch": 6,
        "micro_batch": 1,
        "sequence_length": 8,
        "seed": 5,
        "workers": {"wanted": 2},
        "resources": {"cpus": 2},
        "checkpoints": {"every_steps": 5},
        "elastic": {"capacity_wait_s": 2},
        "sample_ledger": True,
    }
    return fields | changes


class Controller(JobController):
    """The real one, and where its process is."""

    def pid(self) -> int:
        return os.getpid()


class Job:
    """A job's controller, driven as the service drives it."""

    def __init__(self, job_id: str, storage: Path) -> None:
        self.job_id = job_id
        self.storage = storage
        self.controller: Any = None
        self.entries: list[dict[str, Any]] = []

    def start(self, spec: dict[str, Any], *, attempt: int = 1, wanted: int = 2) -> "Job":
        create: Any = (
            ray.remote(Controller)
            .options(
                name=naming.controller_name(self.job_id),
                namespace=naming.RAY_NAMESPACE,
                lifetime="detached",
                max_restarts=-1,
                num_cpus=0,
            )
            .remote
        )
        self.controller = create(self.job_id, spec, str(self.storage), attempt, wanted, limits=LIMITS)
        return self  # nothing more: it begins by itself, in case its creator is gone by now

    def command(self, kind: str, **more: Any) -> None:
        ray.get(self.controller.command.remote({"kind": kind, "who": "tester", **more}), timeout=60)

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = ray.get(self.controller.status.remote(), timeout=60)
        return status

    def read(self) -> list[dict[str, Any]]:
        """Collect what is new; every number must come exactly once."""
        new = ray.get(self.controller.read.remote(len(self.entries)), timeout=60)
        first = len(self.entries) + 1
        assert [entry["seq"] for entry in new] == list(range(first, first + len(new)))
        self.entries += new
        return self.entries

    def wait(self, condition: Callable[["Job"], Any], what: str, timeout_s: float = 240) -> Any:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.read()
            if found := condition(self):
                return found
            time.sleep(0.05)
        story = [(e["kind"], e["data"]) for e in self.events()]
        raise AssertionError(f"{what} did not come within {timeout_s} s; events: {story}")

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        found = [entry for entry in self.entries if entry["type"] == "event"]
        return [entry for entry in found if kind in (None, entry["kind"])]

    def phases(self) -> list[str]:
        return [entry["data"]["phase"] for entry in self.events("phase")]

    def reports(self) -> list[dict[str, Any]]:
        return [entry for entry in self.entries if entry["type"] == "report"]

    def wait_step(self, step: int, *, world_size: int | None = None, generation: int | None = None) -> None:
        def reached(job: Job) -> bool:
            return any(
                report["step"] >= step
                and world_size in (None, report["world_size"])
                and generation in (None, report["generation"])
                for report in job.reports()
            )

        self.wait(reached, f"step {step} (world size {world_size}, generation {generation})")

    def wait_phase(self, phase: str, timeout_s: float = 240) -> dict[str, Any]:
        def found(job: Job) -> dict[str, Any] | None:
            last = job.events("phase")[-1] if job.events("phase") else None
            return last if last and last["data"]["phase"] == phase else None

        event: dict[str, Any] = self.wait(found, f"phase {phase}", timeout_s)
        return event

    def wait_event(self, kind: str, timeout_s: float = 240) -> dict[str, Any]:
        event: dict[str, Any] = self.wait(lambda job: job.events(kind), f"event {kind}", timeout_s)[-1]
        return event

    def pids(self) -> dict[str, int]:
        """Process ids of the workers, from their log files."""
        found = {}
        for path in (self.storage / "jobs" / self.job_id / "logs").glob("*.log"):
            started = re.findall(r"worker started.*\bpid=(\d+)", path.read_text())
            found[path.stem] = int(started[-1])
        return found

    def crash_controller(self) -> None:
        os.kill(ray.get(self.controller.pid.remote(), timeout=60), signal.SIGKILL)

    def kill(self) -> None:
        """As the service does when it has read everything."""
        if self.controller is not None:
            ray.kill(self.controller, no_restart=True)


def wait_for_cpus(count: float, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while (free := ray.available_resources().get("CPU", 0)) < count:
        assert time.monotonic() < deadline, f"only {free} of {count} CPUs are free"
        time.sleep(0.05)


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_ledger(job: Job, steps: range) -> None:
    """Every sample of every step was seen exactly once by the ranks of the generation that finished it."""
    spec = JobSpec.model_validate(spec_of())
    batches = open_batches(spec, vocabulary=None)
    for step in steps:
        reports = [r for r in job.reports() if r["step"] == step]
        last = max(r["generation"] for r in reports)
        seen = [sample for r in reports if r["generation"] == last for sample in r["samples"]]
        due = [int(i) for m in range(spec.micro_batches) for i in batches.ids(step - 1, m)]
        assert sorted(seen) == sorted(due), f"step {step}"


def reference_losses(rank: int, world_size: int, spec: dict[str, Any], folder: Path) -> dict[int, float]:
    from tests.distributed.test_worker_loop import _train

    _, notices = _train(rank, world_size, folder, JobSpec.model_validate(spec))
    return {n["step"]: n["loss"] for n in notices if n["type"] == "report"}


def wait_for_status(job: Job, phase: str) -> None:
    deadline = time.monotonic() + 240
    while True:
        try:
            if job.status()["phase"] == phase:
                return
        except RayActorError:
            pass
        assert time.monotonic() < deadline
        time.sleep(0.1)
