"""A service that is killed and started again at will, and jobs as their logs tell them.

The service is a process of its own, on the head of a cluster of hosts or on a local Ray, asked over HTTP as
a user does. What becomes of a job is read from its log on the shared storage, which is there also while the
service or the controller is not.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file

from api import server_file
from api.client import Client, Refused, Unreachable
from api.connection import connect
from service.settings import Settings
from tests.multihost.cluster import PATIENCE_S, until
from workers.data import open_batches
from workers.naming import JobFolder, controller_name
from workers.spec import JobSpec
from zero_core.checkpoint import manifest


class Place(Protocol):
    """Where a service runs, and its Ray."""

    @property
    def environment(self) -> dict[str, str]:
        """What the service's process has in its environment."""

    @property
    def serving(self) -> Sequence[str]:
        """Options of `elastic-zero serve`."""

    def network(self) -> AbstractContextManager[None]:
        """Puts this thread where the service can be reached."""

    def ask(self, program: str) -> str:
        """What a Python program prints that has Ray's address as its argument."""

    def running(self, title: str) -> list[int]:
        """Ids of the processes there whose command line begins with `title`, as Ray's actors have it."""


@dataclass(slots=True)
class Service:
    """A service process on one data folder, over its restarts."""

    place: Place
    data_dir: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "api.cli", "--data-dir", str(self.data_dir), "serve"]
        with self.place.network(), (self.data_dir / "serve.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *self.place.serving],
                env=self.place.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        until(self._answers, "the service's first answer", told=self.log)

    def kill(self) -> None:
        """As a crash: no handler runs."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    @contextmanager
    def client(self) -> Iterator[Client]:
        """A client for this thread, which is in the service's network meanwhile."""
        with self.place.network(), connect(Settings(data_dir=self.data_dir)) as client:
            yield client

    def submit(self, spec: dict[str, Any]) -> "Job":
        with self.client() as client:
            return Job(self, client.submit(spec).id, JobSpec.model_validate(spec))

    def log(self) -> str:
        return (self.data_dir / "serve.log").read_text(errors="replace")

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log()
        record = server_file.read(self.data_dir)
        if record is None or record.pid != self.process.pid:
            return False
        try:
            with self.client() as client:
                return client.ready().ok
        except Unreachable:
            return False


@dataclass(slots=True)
class Job:
    """One job; `entries` are those of its log that were read so far."""

    service: Service
    id: str
    spec: JobSpec
    entries: list[dict[str, Any]] = field(default_factory=list)
    _read_bytes: int = 0

    @property
    def folder(self) -> JobFolder:
        return JobFolder(self.service.data_dir, self.id)

    def read(self) -> "Job":
        """Take in what the log has more of; its numbers must go on without a gap."""
        if self.folder.log.exists():
            with self.folder.log.open("rb") as log:
                log.seek(self._read_bytes)
                lines = log.read().splitlines(keepends=True)
            for line in lines:
                if not line.endswith(b"\n"):
                    break  # still being written, or torn; it is read again
                entry = json.loads(line)
                assert entry["seq"] == len(self.entries) + 1, line
                self.entries.append(entry)
                self._read_bytes += len(line)
        return self

    def wait(self, holds: Callable[["Job"], Any], what: str, *, timeout_s: float = PATIENCE_S) -> Any:
        """Wait until something holds of the job; what it was."""
        found: list[Any] = []

        def look() -> bool:
            found[:] = [holds(self.read())]
            return bool(found[0])

        until(look, f"job {self.id}: {what}", timeout_s=timeout_s, told=self.story)
        return found[0]

    def story(self) -> str:
        """Its events, for people, and where it stands."""
        told = [
            f"{event['time'] - self.entries[0]['time']:.1f} s g{event['generation']} {event['kind']} "
            f"{event['data']}"
            for event in self.events()
        ]
        return "\n".join([f"step {self.step}", *told])

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        return [e for e in self.entries if e["type"] == "event" and kind in (None, e["kind"])]

    def reports(self) -> list[dict[str, Any]]:
        return [entry for entry in self.entries if entry["type"] == "report"]

    @property
    def step(self) -> int:
        reports = self.reports()
        return reports[-1]["step"] if reports else 0

    @property
    def generation(self) -> int:
        return self.entries[-1]["generation"] if self.entries else 0

    @property
    def phase(self) -> str | None:
        phases = self.events("phase")
        return phases[-1]["data"]["phase"] if phases else None

    def wait_step(self, step: int, *, world_size: int | None = None, generation: int = 0) -> dict[str, Any]:
        """Wait for a report of this step or a later one, of this generation or a later one."""

        def reached(job: "Job") -> dict[str, Any] | None:
            for report in reversed(job.reports()):
                late_enough = report["step"] >= step and report["generation"] >= generation
                if late_enough and world_size in (None, report["world_size"]):
                    return report
            assert job.phase != "failed", job.story()
            return None

        what = f"step {step} with {world_size or 'any number of'} workers in generation {generation} or later"
        found: dict[str, Any] = self.wait(reached, what)
        return found

    def wait_event(self, kind: str, *, after: int = 0, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        """Wait for an event of this kind, the `after` first ones not counted."""
        found: list[dict[str, Any]] = self.wait(
            lambda job: job.events(kind)[after:], f"event {kind}", timeout_s=timeout_s
        )
        return found[0]

    def finish(self) -> None:
        """Wait until the job has succeeded, on the cluster and in the service's records."""
        self.wait(lambda job: job.phase in ("succeeded", "failed", "cancelled"), "its end")
        assert self.phase == "succeeded", self.story()

        def recorded() -> bool:
            with self.service.client() as client:
                return client.job(self.id).over

        until(recorded, f"the service's record of the end of job {self.id}", told=self.service.log)

    def end(self) -> None:
        """Cancel the job where it is not over, and wait until it is."""

        def over() -> bool:
            with self.service.client() as client, suppress(Refused):
                if not client.job(self.id).over:
                    client.cancel(self.id)
                return client.job(self.id).over
            return False

        until(over, f"the end of job {self.id}", told=self.story)

    # What it is made of

    def workers(self) -> dict[str, tuple[int, str]]:
        """Process id and node id of every worker that has ever started, from their logs."""
        found = {}
        for path in self.folder.worker_logs.glob("*.log"):
            text = path.read_text(errors="replace")
            if started := re.search(r"worker started.*\bnode=(\w+)\b.*\bpid=(\d+)", text):
                found[path.stem] = (int(started[2]), started[1])
        return found

    def ranks(self) -> dict[int, str]:
        """The worker of each rank of the newest generation that has reported."""
        reports = self.reports()
        newest = max(r["generation"] for r in reports)
        return {r["rank"]: r["worker"] for r in reports if r["generation"] == newest}

    def losses(self) -> list[float]:
        """Of each step in order; of a step that was done again, the last time."""
        return [report["loss"] for report in _last(self.reports())]

    def masters(self) -> dict[str, torch.Tensor]:
        """The fp32 master of every unit in the final checkpoint, whatever N wrote it."""
        latest = manifest.latest(self.folder.checkpoints)
        assert latest is not None
        assert latest.step == self.spec.steps
        parts: dict[str, list[torch.Tensor]] = {}
        for rank in range(latest.world_size):
            for name, tensor in load_file(latest.path / manifest.shard_name(rank)).items():
                parts.setdefault(name, []).append(tensor)
        return {name: torch.cat(tensors) for name, tensors in parts.items() if name.startswith("master/")}

    # What must be true of it

    def assert_every_sample_once(self) -> None:
        """In the history that counts, each step read the samples it was to read, each of them once.

        A step counts as the last generation to report it did it. A rank's report may be missing only where
        the rank was lost with its process before it was read; no other can have read its samples.
        """
        batches = open_batches(self.spec, vocabulary=None)
        lost = {(e["generation"], e["data"]["worker"]) for e in self.events("worker_lost")}
        counted: dict[int, list[dict[str, Any]]] = {}
        for report in self.reports():
            held = counted.setdefault(report["step"], [])
            if held and held[0]["generation"] < report["generation"]:
                held.clear()
            held.append(report)
        assert sorted(counted) == list(range(1, self.spec.steps + 1))
        for step, reports in counted.items():
            world_size = reports[0]["world_size"]
            ranks = [report["rank"] for report in reports]
            assert len(set(ranks)) == len(ranks), f"step {step}: ranks {ranks}"
            for report in reports:
                mine = range(report["rank"], self.spec.micro_batches, world_size)
                due = [int(sample) for m in mine for sample in batches.ids(step - 1, m)]
                assert report["samples"] == due, f"step {step}, rank {report['rank']}"
            if len(ranks) < world_size:
                generation = reports[0]["generation"]
                missing = [r for r in range(world_size) if r not in ranks]
                gone = [worker for number, worker in lost if number == generation]
                assert len(missing) <= len(gone), f"step {step}: no reports of ranks {missing}"


def _last(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One report of each step, in order of the steps: of the last generation that did it."""
    by_step = {report["step"]: report for report in reports}
    return [by_step[step] for step in sorted(by_step)]


_LEFT = """
import json, sys, time, ray
from ray.util import placement_group_table
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
nodes = [node for node in ray.nodes() if node["Alive"]]
print(json.dumps({
    "groups": [group for group in placement_group_table().values() if group["state"] != "REMOVED"],
    "names": [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)],
    "cpus": sum(node["Resources"].get("CPU", 0) for node in nodes),
    "free": ray.available_resources().get("CPU", 0),
}))
"""


def assert_nothing_left(service: Service, *jobs: Job) -> None:
    """No actor, process or placement group of these jobs remains, and everything is free."""
    place, told = service.place, {"left": {}}

    def clear() -> bool:
        left = json.loads(place.ask(_LEFT).splitlines()[-1])
        left["workers"] = place.running("ray::WorkerActor")
        told["left"] = left
        left["controllers"] = {controller_name(job.id) for job in jobs} & set(left.pop("names"))
        held = left["groups"] or left["workers"] or left["controllers"]
        return not held and left["free"] == left["cpus"]

    # The keeper lets the controller of a job that is over go at one of its next looks.
    until(clear, "a cluster with nothing left on it", timeout_s=120, told=lambda: told)
