"""The main job as a user runs it: a real `elastic-zero serve`, real HTTP, a real local Ray, a real database.

Every job trains the same model on the same data with the same seed, so whatever happens to it, its losses
must be those of the undisturbed one.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from api import server_file
from api.client import Client, Refused
from api.connection import connect
from api.schemas import EventOut, JobOut, ReportOut
from service.local_ray import LocalRay
from service.settings import Settings

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

CPUS = 4
STEPS = 100
GLOBAL_BATCH = 6
PAUSE_S = 0.15
PATIENCE_S = 240.0
"""Longest wait for anything: a machine with other work to do is slow, and only a hang is to fail."""

RELATIVE_TOLERANCE = 1e-5

_SEQUENCE = 32


def _spec(gate: Path, **changes: Any) -> dict[str, Any]:
    """A job of 6 micro-batches that is slow until `gate` exists."""
    sizes = {"layers": 2, "hidden": 32, "heads": 2, "sequence_length": _SEQUENCE}
    return {
        "name": "end to end",
        "model": {
            "kind": "custom",
            "factory": "tests.integration.gated_model:GatedGPT",
            "arguments": {"gate": str(gate), "pause_s": PAUSE_S, **sizes},
        },
        "data": {"kind": "text", "paths": ["python:"], "max_bytes": 100_000},
        "steps": STEPS,
        "global_batch": GLOBAL_BATCH,
        "micro_batch": 1,
        "sequence_length": _SEQUENCE,
        "seed": 5,
        "optimizer": {"lr": 3e-3},
        "zero": {"stage": 2},
        "workers": {"wanted": 2},
        "checkpoints": {"every_steps": 5},
        "sample_ledger": True,
        **changes,
    }


@dataclass(slots=True)
class Service:
    """A service process; killed and started again on the same folder and port by the tests."""

    data_dir: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "api.cli", "--data-dir", str(self.data_dir), "serve"]
        with (self.data_dir / "serve.log").open("a") as log:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port), "--local-cpus", str(CPUS)],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        _until(self._answers)

    def kill(self) -> None:
        """As a crash: no handler runs."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def end(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(PATIENCE_S)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command of the command line."""
        command = [sys.executable, "-m", "api.cli", "--data-dir", str(self.data_dir), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)

    def client(self) -> Client:
        return connect(Settings(data_dir=self.data_dir))

    @property
    def log(self) -> str:
        return (self.data_dir / "serve.log").read_text()

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log
        record = server_file.read(self.data_dir)
        if record is None or not record.alive:
            return False
        with self.client() as client:
            return client.ready().ok


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    data_dir = tmp_path_factory.mktemp("service")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    service = Service(data_dir, port)
    try:
        service.start()
        yield service
        # With no job alive the service takes its Ray down with it.
        ended = service.run("down")
        assert ended.returncode == 0, ended.stderr
        assert service.process is not None
        assert service.process.wait(10) == 0
        assert "the local Ray has been stopped" in service.log
        assert server_file.read(data_dir) is None
        assert not (data_dir / "ray.json").exists()
    finally:
        if service.process is not None and service.process.poll() is None:
            service.process.kill()
            service.process.wait()
        LocalRay(data_dir).stop()


@pytest.fixture
def client(service: Service) -> Iterator[Client]:
    with service.client() as client:
        yield client


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    return tmp_path / "gate"


@dataclass(slots=True)
class Told:
    """All that a stream has told of a job."""

    events: list[EventOut] = field(default_factory=list)
    reports: list[ReportOut] = field(default_factory=list)
    job: JobOut | None = None

    @property
    def losses(self) -> list[float]:
        """Of each step in order; of a step that was done again, the last."""
        by_step = {report.step: report.loss for report in self.reports}
        return [by_step[step] for step in sorted(by_step)]

    @property
    def samples(self) -> dict[int, list[int]]:
        """Ids of the samples of each step, over all ranks; of a step that was done again, the last time."""
        last = {report.step: report.generation for report in self.reports}
        found: dict[int, list[int]] = defaultdict(list)
        for report in self.reports:
            if report.generation == last[report.step]:
                assert report.samples is not None
                found[report.step] += report.samples
        return {step: sorted(ids) for step, ids in found.items()}

    def of(self, kind: str) -> list[EventOut]:
        return [event for event in self.events if event.kind == kind]

    def take(self, item: JobOut | EventOut | ReportOut) -> None:
        match item:
            case JobOut():
                self.job = item
            case EventOut():
                self.events.append(item)
            case ReportOut():
                self.reports.append(item)

    @property
    def step(self) -> int:
        return self.reports[-1].step if self.reports else 0


def _follow(client: Client, job_id: str, act: Callable[[Told], None] = lambda told: None) -> Told:
    """Follow a job to its end; `act` is called after each item."""
    told = Told()
    for streamed in client.follow(job_id):
        told.take(streamed.item)
        act(told)
    return told


@pytest.fixture(scope="module")
def undisturbed(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Told:
    """The job that nothing happens to, on two workers from its first step to its last."""
    gate = tmp_path_factory.mktemp("open") / "gate"
    gate.touch()
    with service.client() as client:
        told = _follow(client, client.submit(_spec(gate)).id)
    _assert_whole(told)
    assert {report.world_size for report in told.reports} == {2}
    return told


def test_it_learns_and_every_sample_is_seen_once(undisturbed: Told) -> None:
    losses = undisturbed.losses
    assert losses[0] > 5
    assert sum(losses[-10:]) / 10 < 0.75 * losses[0]
    seen = [sample for ids in undisturbed.samples.values() for sample in ids]
    # Less than one epoch, so none twice.
    assert len(seen) == len(set(seen)) == STEPS * GLOBAL_BATCH


def test_resized_from_2_to_4_to_3_the_losses_and_the_samples_stay_the_same(
    client: Client, gate: Path, undisturbed: Told
) -> None:
    """L4 (prime-rl 1092): a larger world in mid-epoch reads every sample once."""
    job_id = client.submit(_spec(gate)).id
    _until(lambda: client.job(job_id).step >= 2)
    with pytest.raises(Refused, match="place for 4") as caught:
        client.resize(job_id, CPUS + 1)
    assert caught.value.code == "impossible_resize"
    due = [(5, 0, 4), (5, 1, 3)]

    def resize(told: Told) -> None:
        """Ask when so many steps have passed since the resize before."""
        resizes = told.of("resize")
        if due and len(resizes) == due[0][1]:
            since = resizes[-1].data["at_step"] if resizes else 0
            if told.step >= since + due[0][0]:
                client.resize(job_id, due.pop(0)[2])
        elif not due and len(resizes) == 2:
            gate.touch()

    told = _follow(client, job_id, resize)
    _assert_whole(told)
    _assert_same(told, undisturbed)
    first, second = told.of("resize")
    assert (first.data["old_workers"], first.data["new_workers"]) == (2, 4)
    assert (second.data["old_workers"], second.data["new_workers"]) == (4, 3)
    for event in (first, second):
        assert event.data["steps_lost"] == 0
        assert event.data["who"].startswith("cli:")
        assert 0 < event.data["pause_s"] < 120
    sizes = {report.step: report.world_size for report in told.reports}
    assert sizes[first.data["at_step"]] == 2
    assert sizes[first.data["at_step"] + 1] == 4
    assert sizes[second.data["at_step"] + 1] == sizes[STEPS] == 3
    assert len(client.ranks(job_id)) == 3
    # No step twice: each rank of each step reported once.
    assert len(told.reports) == sum(sizes.values())
    checkpoint = client.checkpoints(job_id)[-1]
    assert (checkpoint.step, checkpoint.world_size) == (STEPS, 3)


def test_a_worker_killed_with_sigkill_costs_a_step_at_most_and_the_job_grows_back(
    client: Client, gate: Path, undisturbed: Told
) -> None:
    job_id = client.submit(_spec(gate)).id
    killed: list[int] = []

    def kill(told: Told) -> None:
        if told.step >= 8 and not killed:
            victim = next(report.worker for report in told.reports if report.rank == 1)
            killed.append(_pid(client, job_id, victim))
            os.kill(killed[0], signal.SIGKILL)
        elif told.of("resize"):
            gate.touch()

    told = _follow(client, job_id, kill)
    _assert_whole(told)
    _assert_same(told, undisturbed)
    (lost,) = told.of("worker_lost")
    assert lost.data["rank"] == 1
    (recovery,) = told.of("recovery")
    assert (recovery.data["old_workers"], recovery.data["new_workers"]) == (2, 1)
    assert recovery.data["source"] == "replica"
    assert recovery.data["steps_repeated"] <= 1
    (grown,) = told.of("resize")
    assert (grown.data["cause"], grown.data["new_workers"]) == ("grown back", 2)
    assert grown.data["steps_lost"] == 0
    assert told.job is not None
    assert told.job.attempt == 1


def test_the_service_killed_and_started_again_loses_and_doubles_nothing(
    service: Service, client: Client, gate: Path, undisturbed: Told
) -> None:
    job_id = client.submit(_spec(gate)).id
    told, running = Told(), threading.Event()

    def follow() -> None:
        with service.client() as own:
            for streamed in own.follow(job_id, patience_s=PATIENCE_S):
                told.take(streamed.item)
                if told.step >= 5:
                    running.set()

    follower = threading.Thread(target=follow)
    follower.start()
    assert running.wait(PATIENCE_S)
    service.kill()
    at_kill = told.step
    time.sleep(1.0)
    service.start()
    with service.client() as again:
        found = again.job(job_id)
        assert (found.state, found.attempt) == ("running", 1)
        _until(lambda: again.job(job_id).step > at_kill)
    # In good order it is ended too while the job runs: its Ray stays, and says so.
    assert service.end() == 0
    assert f"left running, for jobs live on it ({job_id})" in service.log
    refused = service.run("down")
    assert refused.returncode == 1
    assert f"({job_id})" in refused.stderr
    assert LocalRay(service.data_dir).running
    service.start()
    gate.touch()
    follower.join(PATIENCE_S)
    assert not follower.is_alive()
    _assert_whole(told)
    _assert_same(told, undisturbed)
    assert {report.generation for report in told.reports} == {1}
    assert len(told.reports) == 2 * STEPS


def test_paused_it_holds_nothing_and_resumed_it_goes_on_where_it_was(
    client: Client, gate: Path, undisturbed: Told
) -> None:
    job_id = client.submit(_spec(gate)).id
    _until(lambda: client.job(job_id).step >= 5)
    client.pause(job_id)
    _until(lambda: client.job(job_id).state == "paused")
    _assert_nothing_held(client)
    paused = client.job(job_id)
    assert [checkpoint.step for checkpoint in client.checkpoints(job_id)][-1] == paused.step
    gate.touch()
    client.resume(job_id)
    told = _follow(client, job_id)
    _assert_whole(told)
    _assert_same(told, undisturbed)
    assert told.job is not None
    assert told.job.attempt == 2
    assert len(told.reports) == 2 * STEPS


def test_another_job_starts_from_its_checkpoint_once_it_was_verified_and_exported(
    client: Client, gate: Path, undisturbed: Told
) -> None:
    assert undisturbed.job is not None
    first = undisturbed.job.id
    assert [checkpoint.step for checkpoint in client.checkpoints(first)] == [90, 95, 100]
    assert client.verify_checkpoint(first, 90).whole
    exported = client.export_checkpoint(first, 100, dtype="bf16")
    assert all((Path(exported.folder) / name).is_file() for name in exported.files)
    gate.touch()
    start = {"start_from": {"job": first, "step": 90}, "workers": {"wanted": 3}}
    told = _follow(client, client.submit(_spec(gate, **start)).id)
    assert told.job is not None
    assert told.job.state == "succeeded"
    assert sorted(told.samples) == [*range(91, STEPS + 1)]
    assert told.samples == {step: undisturbed.samples[step] for step in told.samples}
    assert told.losses == pytest.approx(undisturbed.losses[90:], rel=RELATIVE_TOLERANCE)
    for saved in told.of("checkpoint"):
        assert saved.data["stall_s"] >= 0


def test_cancelled_shows_only_when_everything_is_gone(service: Service, client: Client, gate: Path) -> None:
    job_id = client.submit(_spec(gate, workers={"wanted": 4})).id
    _until(lambda: client.job(job_id).step >= 2)
    workers = [_pid(client, job_id, report.worker) for report in client.ranks(job_id)]
    assert len(workers) == 4
    assert all(_runs(pid) for pid in workers)
    asked = time.monotonic()
    client.cancel(job_id)
    _until(lambda: client.job(job_id).state == "cancelled")
    took_s = time.monotonic() - asked
    assert not [pid for pid in workers if _runs(pid)]
    _assert_nothing_held(client)
    left = _left_on_ray(service)
    assert left["placement_groups"] == []
    assert took_s < 120


# What is true of every job that succeeded.


def _assert_whole(told: Told) -> None:
    assert told.job is not None
    assert told.job.state == "succeeded", (told.job.reason, told.of("error"))
    assert told.job.step == STEPS
    assert told.job.workers.current == 0
    items = sorted([*told.events, *told.reports], key=lambda item: item.id)
    assert len({item.id for item in items}) == len(items)
    # The controller's numbers, in the order in which they were stored: none lost, none twice.
    seqs = [item.seq for item in items if item.seq is not None]
    assert seqs == list(range(1, len(seqs) + 1))
    assert sorted({report.step for report in told.reports}) == list(range(1, STEPS + 1))
    assert all(len(ids) == GLOBAL_BATCH for ids in told.samples.values())


def _assert_same(told: Told, undisturbed: Told) -> None:
    assert told.losses == pytest.approx(undisturbed.losses, rel=RELATIVE_TOLERANCE)
    assert told.samples == undisturbed.samples


def _assert_nothing_held(client: Client) -> None:
    (node,) = client.nodes()
    assert node.cpus_free == node.cpus == CPUS


def _pid(client: Client, job_id: str, worker: str) -> int:
    """The worker's process, as the first line of its log tells it."""
    (log,) = client.logs(job_id, worker=worker, tail=1000)
    found = re.search(r"worker started.*\bpid=(\d+)", "\n".join(log.lines))
    assert found is not None, log
    return int(found[1])


def _runs(pid: int) -> bool:
    """Whether the process holds anything yet: one that has ended and waits for its parent's look does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _left_on_ray(service: Service) -> dict[str, Any]:
    """What Ray itself says is left, asked by a process of its own."""
    program = """
import json, ray
from ray.util import placement_group_table
ray.init(address="auto", log_to_driver=False, logging_level="error")
groups = [group for group in placement_group_table().values() if group["state"] != "REMOVED"]
print(json.dumps({"placement_groups": groups}))
"""
    address = json.loads((service.data_dir / "ray.json").read_text())["address"]
    environment = {**os.environ, **LocalRay(service.data_dir).environment(), "RAY_ADDRESS": address}
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    left: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return left


def _until(holds: Callable[[], bool], *, timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.05)
