"""Controller and workers on a real local Ray: start, resize, recover, pause, cancel, fail."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.exceptions import RayActorError

from tests.distributed.ranks import run_ranks
from workers import naming
from workers.conductor import Limits
from workers.controller import JobController
from workers.data import open_batches
from workers.spec import JobSpec
from zero_core.checkpoint import manifest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

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


@pytest.fixture
def job(ray_cluster: int, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    name = re.sub(r"[^a-z0-9]+", "-", request.node.name.removeprefix("test_"))[:50].strip("-")
    job = Job(name, tmp_path)
    yield job
    job.kill()
    _wait_for_cpus(ray_cluster)


def _wait_for_cpus(count: float, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while (free := ray.available_resources().get("CPU", 0)) < count:
        assert time.monotonic() < deadline, f"only {free} of {count} CPUs are free"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _assert_ledger(job: Job, steps: range) -> None:
    """Every sample of every step was seen exactly once by the ranks of the generation that finished it."""
    spec = JobSpec.model_validate(spec_of())
    batches = open_batches(spec, vocabulary=None)
    for step in steps:
        reports = [r for r in job.reports() if r["step"] == step]
        last = max(r["generation"] for r in reports)
        seen = [sample for r in reports if r["generation"] == last for sample in r["samples"]]
        due = [int(i) for m in range(spec.micro_batches) for i in batches.ids(step - 1, m)]
        assert sorted(seen) == sorted(due), f"step {step}"


def _reference_losses(rank: int, world_size: int, spec: dict[str, Any], folder: Path) -> dict[int, float]:
    from tests.distributed.test_worker_loop import _train

    _, notices = _train(rank, world_size, folder, JobSpec.model_validate(spec))
    return {n["step"]: n["loss"] for n in notices if n["type"] == "report"}


def test_two_four_three_workers_lose_no_step_and_change_no_number(job: Job, tmp_path: Path) -> None:
    """Also L7 (torchrun): no resize counts as a failure, as this job may not have a single one."""
    spec = spec_of(steps=90, recovery={"max_worker_losses": 0, "max_node_losses": 0})
    job.start(spec)
    job.wait_step(5, world_size=2)
    before = job.pids()
    job.command("resize", workers=4)
    job.wait_step(1, world_size=4)
    job.command("resize", workers=3)
    job.wait_phase("succeeded")

    first, second = (event["data"] for event in job.events("resize"))
    assert (first["old_workers"], first["new_workers"], first["who"]) == (2, 4, "tester")
    assert (second["old_workers"], second["new_workers"]) == (4, 3)
    assert first["steps_lost"] == second["steps_lost"] == 0
    assert 0 < first["pause_s"] < 60
    assert set(first["seconds"]) == {"wait", "stop", "form", "start", "move", "load"}
    assert first["source"] == second["source"] == "live"
    assert (first["cause"], first["steps_repeated"]) == ("asked for", 0)
    assert 0 < first["bytes_needed"] <= first["bytes_moved"] <= 1.05 * first["bytes_needed"]
    # Survivors kept their processes.
    after = job.pids()
    assert {name: after[name] for name in before} == before
    assert len(after) == 4
    assert {r["worker"] for r in job.reports() if r["world_size"] == 3} == {"w0", "w1", "w2"}
    # No step was done twice, and each by all ranks of its generation.
    done = [(r["step"], r["rank"]) for r in job.reports()]
    assert len(done) == len(set(done))
    _assert_ledger(job, range(1, 91))
    losses = {r["step"]: r["loss"] for r in job.reports()}
    paceless = {**spec, "model": {**spec["model"], "arguments": {"pause_s": 0.0}}}
    (reference,) = run_ranks(1, _reference_losses, paceless, tmp_path / "reference")
    assert losses == pytest.approx(reference, rel=1e-5)
    saved = [(e["data"]["step"], e["data"]["reason"]) for e in job.events("checkpoint")]
    assert [reason for _, reason in saved if reason not in ("interval", "owed")] == ["final"]
    assert saved[-1] == (90, "final")
    assert not any(_runs(pid) for pid in after.values())
    assert job.phases() == ["starting", "running", "resizing", "running", "resizing", "running", "succeeded"]


def _kill(job: Job, *workers: str) -> None:
    for victim in [job.pids()[worker] for worker in workers]:
        os.kill(victim, signal.SIGKILL)


@pytest.mark.parametrize("victim", ["w0", "w2"])
def test_a_killed_worker_costs_one_step_at_most_and_its_place_is_taken_again(job: Job, victim: str) -> None:
    job.start(spec_of(workers={"wanted": 3}, checkpoints={"every_steps": None}), wanted=3)
    job.wait_step(7)
    before = job.pids()
    _kill(job, victim)
    recovery = job.wait_event("recovery")["data"]
    lost = job.wait_event("worker_lost")["data"]
    assert (lost["rank"], lost["worker"], lost["budget"]) == (int(victim[1]), victim, "worker")
    assert victim in recovery["cause"]
    # Those that are left are enough, and wait for nobody.
    assert (recovery["old_workers"], recovery["new_workers"]) == (3, 2)
    assert (recovery["source"], recovery["replica_ranks"]) == ("replica", [lost["rank"]])
    assert recovery["steps_repeated"] <= 1
    back = job.wait_event("resize")["data"]
    assert (back["who"], back["cause"], back["source"]) == ("controller", "grown back", "live")
    assert (back["old_workers"], back["new_workers"], back["steps_repeated"]) == (2, 3, 0)
    job.wait_step(back["at_step"] + 3, generation=back["generation"])
    after = job.pids()
    survivors = {name: pid for name, pid in before.items() if name != victim}
    assert survivors.items() <= after.items()
    workers = {r["worker"] for r in job.reports() if r["generation"] == back["generation"]}
    assert workers == {*survivors, "w3"}
    _assert_ledger(job, range(1, back["at_step"] + 1))
    assert job.status()["wanted"] == 3


def _assert_from_the_checkpoint(job: Job, survivors: dict[str, int]) -> None:
    recovery = job.wait_event("recovery")["data"]
    assert recovery["source"] == "checkpoint"
    assert recovery["at_step"] % 5 == 0
    # One may be being written while the next five steps are done, and only the one after that waits for it.
    assert 0 <= recovery["steps_repeated"] <= 2 * 5
    assert recovery["new_workers"] == len(survivors)
    job.wait_step(recovery["at_step"] + 6, generation=recovery["generation"])
    assert survivors.items() <= job.pids().items()
    workers = {r["worker"] for r in job.reports() if r["generation"] == recovery["generation"]}
    assert workers == set(survivors)
    _assert_ledger(job, range(1, recovery["at_step"] + 5))


def test_two_neighbours_lost_at_once_cost_the_steps_since_the_checkpoint_and_no_process(job: Job) -> None:
    job.start(
        spec_of(workers={"wanted": 4}, elastic={"grow_back": False}),
        wanted=4,
    )
    job.wait_event("checkpoint")
    survivors = {name: pid for name, pid in job.pids().items() if name in ("w0", "w3")}
    _kill(job, "w1", "w2")
    _assert_from_the_checkpoint(job, survivors)
    assert sorted(e["data"]["worker"] for e in job.events("worker_lost")) == ["w1", "w2"]
    assert all(name in job.events("recovery")[-1]["data"]["cause"] for name in ("w1", "w2"))
    # Nobody grows back where that is not wanted.
    assert job.events("resize") == []
    assert job.status()["world_size"] == 2


def test_without_replicas_a_loss_costs_the_steps_since_the_checkpoint(job: Job) -> None:
    job.start(spec_of(elastic={"replicas": 0, "grow_back": False}, workers={"wanted": 3}), wanted=3)
    job.wait_event("checkpoint")
    survivors = {name: pid for name, pid in job.pids().items() if name != "w1"}
    _kill(job, "w1")
    _assert_from_the_checkpoint(job, survivors)


def test_a_worker_that_hangs_is_replaced(job: Job) -> None:
    """Nothing has died: the others run into the collective's timeout, and the hanging one stays inside."""
    job.start(spec_of(recovery={"collective_timeout_s": 4}))
    job.wait_step(6)
    victim = job.pids()["w1"]
    os.kill(victim, signal.SIGSTOP)
    recovery = job.wait_event("recovery", timeout_s=240)["data"]
    lost = [e["data"] for e in job.events("worker_lost")]
    assert [e["worker"] for e in lost] == [None, "w1"]
    assert "did not come out of its broken group" in lost[1]["cause"]
    assert recovery["new_workers"] == 1
    back = job.wait_event("resize")["data"]
    assert (back["cause"], back["new_workers"]) == ("grown back", 2)
    job.wait_step(back["at_step"] + 2, generation=back["generation"])
    names = {r["worker"] for r in job.reports() if r["generation"] == back["generation"]}
    assert names == {"w0", "w2"}
    assert not _runs(victim)


def test_a_lost_place_shrinks_the_group_and_too_many_losses_end_the_job(job: Job) -> None:
    job.start(spec_of(workers={"wanted": 2}, resources={"cpus": 4}, recovery={"max_worker_losses": 1}))
    job.wait_step(6)
    # Somebody else takes the dead worker's place at once: there is no room for a replacement.
    blocker: Any = ray.remote(Blocker).options(num_cpus=4).remote()
    held = blocker.hold.remote()
    os.kill(job.pids()["w0"], signal.SIGKILL)
    recovery = job.wait_event("recovery")["data"]
    assert (recovery["old_workers"], recovery["new_workers"]) == (2, 1)
    job.wait_step(recovery["at_step"] + 1, generation=recovery["generation"])
    survivor = next(r["worker"] for r in reversed(job.reports()))
    os.kill(job.pids()[survivor], signal.SIGKILL)
    failed = job.wait_phase("failed")
    assert "2 workers were lost, more than recovery.max_worker_losses 1" in failed["data"]["reason"]
    ray.kill(blocker)
    with pytest.raises(RayActorError):
        ray.get(held, timeout=60)


class Blocker:
    """Takes a place on the cluster."""

    def hold(self) -> None:
        time.sleep(1000)


def test_a_killed_controller_goes_on_by_itself_and_its_workers_die_with_it(job: Job) -> None:
    job.start(spec_of())
    job.wait_step(7)
    job.command("resize", workers=3)
    job.wait_step(1, world_size=3)
    old, last = job.pids(), len(job.read())
    job.crash_controller()
    _wait_for_status(job, "running")
    assert not any(_runs(pid) for pid in old.values())
    recovery = job.wait_event("recovery")["data"]
    assert recovery["cause"] == "the controller was restarted"
    assert recovery["new_workers"] == 3, "the resize before the restart is remembered"
    assert len(job.entries) > last, "the numbers go on"
    at = recovery["at_step"]
    job.wait_step(at + 2, generation=recovery["generation"])
    names = {r["worker"] for r in job.reports() if r["generation"] == recovery["generation"]}
    assert not names & set(old), "no name is used twice"


def _wait_for_status(job: Job, phase: str) -> None:
    deadline = time.monotonic() + 240
    while True:
        try:
            if job.status()["phase"] == phase:
                return
        except RayActorError:
            pass
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_cancel_leaves_nothing_behind(job: Job, ray_cluster: int) -> None:
    """L10 (Ray 23638, 35773): processes, memory and placement groups are gone before `cancelled` is shown."""
    job.start(spec_of())
    job.wait_step(2)
    began = time.monotonic()
    job.command("cancel")
    event = job.wait_phase("cancelled")
    assert time.monotonic() - began < 30
    assert event["data"]["reason"] == "cancelled by tester"
    assert not any(_runs(pid) for pid in job.pids().values()), "gone before `cancelled` is shown"
    assert event["data"]["workers"] == 0
    _wait_for_cpus(ray_cluster, timeout_s=20)
    job.command("resize", workers=3)
    job.read()
    assert "cancelled" in job.events("command")[-1]["data"]["refused"]
    # A controller that is restarted after the end leaves it at that.
    job.crash_controller()
    _wait_for_status(job, "cancelled")
    assert job.status()["world_size"] == 0
    last = len(job.entries)
    assert len(job.read()) == last


def test_cancel_leaves_nothing_of_a_save_in_its_middle(job: Job) -> None:
    factory = "tests.integration.unwritten_model:Unwritten"
    job.start(spec_of(model={"kind": "custom", "factory": factory, "arguments": {"pause_s": 0.05}}))
    root = naming.JobFolder(job.storage, job.job_id).checkpoints
    own = manifest.staging(root, 1)
    job.wait(lambda _: any(own.glob(f"{manifest.SAVING}*/*")), "a save that has begun to write")
    job.command("cancel")
    job.wait_phase("cancelled")
    assert list(root.iterdir()) == [own]
    assert list(own.iterdir()) == []


def test_cancel_is_answered_at_once_while_waiting_for_room(job: Job) -> None:
    """L9 (Ray Train 2.60): not after the wait for resources."""
    job.start(spec_of(workers={"wanted": 2, "min": 2}, resources={"cpus": 100}))
    event = job.wait(
        lambda job: [e for e in job.events("phase") if e["data"]["reason"]], "a reason for the wait"
    )[-1]
    assert event["data"]["phase"] == "starting"
    assert "places for 0 of 2 workers" in event["data"]["reason"]
    began = time.monotonic()
    job.command("cancel")
    job.wait_phase("cancelled")
    assert time.monotonic() - began < 20


def test_a_job_starts_with_fewer_workers_and_says_so(job: Job) -> None:
    job.start(spec_of(workers={"wanted": 5}), wanted=5)
    job.wait_step(1, world_size=4)
    reasons = [e["data"]["reason"] for e in job.events("phase")]
    assert "going on with 4 workers: the cluster had places for 4 of 5 workers within 3 s" in reasons
    status = job.status()
    assert (status["wanted"], status["world_size"], status["phase"]) == (5, 4, "running")


def test_orders_that_change_no_number_leave_the_group_alone(job: Job) -> None:
    """L8 (Ray Train 2.60): a resize above capacity does not end the healthy group first."""
    job.start(spec_of(checkpoints={"every_steps": None}))
    job.wait_step(2)
    job.command("resize", workers=5)
    at = job.status()["step"]
    refused = job.wait_event("resize_refused")["data"]
    assert (refused["who"], refused["wanted"], refused["workers"]) == ("tester", 5, 2)
    assert "places for 2 of 3 more workers" in refused["reason"]
    assert refused["missing"] == {"CPU": 2.0}
    assert "missing: 2 CPU" in refused["reason"]
    job.wait_step(at + 10, world_size=2)
    assert {r["generation"] for r in job.reports()} == {1}
    assert job.phases() == ["starting", "running"]
    _wait_for_cpus(4)  # the joiners that were placed are gone again
    # More than the job may ever have is refused at once; the same number changes nothing.
    job.command("resize", workers=7)
    assert "1 to 6" in job.wait(lambda job: job.events("resize_refused")[1:], "refusal")[0]["data"]["reason"]
    job.command("resize", workers=2)
    job.wait_step(job.status()["step"] + 5)
    assert job.phases() == ["starting", "running"]
    assert job.status()["wanted"] == 2
    # A checkpoint on demand does not disturb the group either.
    job.command("checkpoint")
    saved = job.wait_event("checkpoint")["data"]
    assert saved["reason"] == "demand"
    job.wait_step(saved["step"] + 2)
    assert job.phases() == ["starting", "running"]


def test_the_newest_wanted_number_counts(job: Job) -> None:
    job.start(spec_of(recovery={"max_worker_losses": 0}))  # resizes use none of it
    job.wait_step(2)
    job.command("resize", workers=4)
    job.command("resize", workers=3)
    job.wait_step(1, world_size=3)
    assert [e["data"]["new_workers"] for e in job.events("resize")] == [3]
    _wait_for_cpus(2)
    # Back to the number that is there already: nothing happens but that the joiners go again.
    job.command("resize", workers=4)
    job.command("resize", workers=3)
    job.wait_step(job.status()["step"] + 5)
    _wait_for_cpus(2)
    assert len(job.events("resize")) == 1
    # One that comes while another is under way follows at once.
    job.command("resize", workers=1)
    job.wait(lambda job: job.phases()[-1] == "resizing" or len(job.events("resize")) > 1, "a resize")
    job.command("resize", workers=2)
    job.wait(lambda job: job.events("resize")[-1]["data"]["new_workers"] == 2, "the newest number")
    last = job.status()
    assert (last["wanted"], last["world_size"]) == (2, 2)
    done = [(r["step"], r["rank"]) for r in job.reports()]
    assert len(done) == len(set(done)), "no step was done twice"
    _assert_ledger(job, range(1, last["step"] - 1))


def test_the_same_numbers_come_out_of_any_history(job: Job, tmp_path: Path) -> None:
    """2 -> 4 -> 3 -> 1 -> 5 workers with a kill in between: the bits of one worker that nobody disturbed."""
    spec = spec_of(
        steps=400,
        zero={"reproducible": True, "stage": 2},
        optimizer={"lr": 0.05},
        resources={"cpus": 1},
        checkpoints={"every_steps": None},
    )
    job.start(spec)
    job.wait_step(5, world_size=2)
    for workers in (4, 3):
        job.command("resize", workers=workers)
        job.wait_step(1, world_size=workers)
    _kill(job, job.reports()[-1]["worker"])
    recovery = job.wait_event("recovery")["data"]
    assert recovery["source"] == "replica"
    job.wait_step(recovery["at_step"] + 2, generation=recovery["generation"])
    for workers in (1, 5):
        job.command("resize", workers=workers)
        job.wait_step(1, world_size=workers)
    job.wait_phase("succeeded")
    losses = {r["step"]: r["loss"] for r in job.reports()}
    assert sorted(losses) == list(range(1, 401))
    paceless = {**spec, "model": {**spec["model"], "arguments": {"pause_s": 0.0}}}
    (reference,) = run_ranks(1, _reference_losses, paceless, tmp_path / "reference")
    assert losses == reference
    mine, theirs = (
        run_ranks(1, _parameters, folder)[0]
        for folder in (job.storage / "jobs" / job.job_id / "checkpoints", tmp_path / "reference")
    )
    assert mine == theirs
    _assert_ledger(job, range(1, 401))


def _parameters(rank: int, world_size: int, folder: Path) -> str:
    """The digest of all parameters and moments in the newest checkpoint."""
    from safetensors import safe_open

    latest = manifest.latest(folder)
    assert latest is not None
    assert latest.step == 400
    layout = manifest.read(latest.path).layout
    digest = sha256()
    for unit in range(len(layout.units)):
        for kind in ("master", "momentum", "variance"):
            for owner in range(layout.world_size):
                with safe_open(latest.path / manifest.shard_name(owner), framework="np") as file:
                    if f"{kind}/{unit}" in file.keys():  # noqa: SIM118 - it is no mapping
                        digest.update(file.get_tensor(f"{kind}/{unit}").tobytes())
    return digest.hexdigest()


def test_pause_gives_everything_back_and_another_attempt_goes_on(job: Job, ray_cluster: int) -> None:
    spec = spec_of(steps=60)
    job.start(spec)
    job.wait_step(3)
    job.command("pause")
    event = job.wait_phase("paused")
    assert event["data"]["reason"] == "paused by tester"
    assert not any(_runs(pid) for pid in job.pids().values())
    at = max(r["step"] for r in job.reports())
    last = job.events("checkpoint")[-1]["data"]
    assert (last["step"], last["reason"]) == (at, "pause")
    _wait_for_cpus(ray_cluster, timeout_s=20)
    job.kill()
    _wait_until_free(job)
    job.start(spec, attempt=2, wanted=3)
    job.wait_phase("succeeded")
    resumed = [r for r in job.reports() if r["world_size"] == 3]
    assert min(r["step"] for r in resumed) == at + 1
    assert {r["generation"] for r in resumed} == {2}
    _assert_ledger(job, range(1, 61))


def test_an_attempt_goes_on_from_the_checkpoint_before_a_damaged_one_and_says_so(job: Job) -> None:
    spec = spec_of(steps=60)
    job.start(spec)
    job.wait_step(8)
    job.command("pause")
    job.wait_phase("paused")
    job.kill()
    _wait_until_free(job)
    before, newest = manifest.scan(job.storage / "jobs" / job.job_id / "checkpoints")[-2:]
    damaged = newest.path / manifest.shard_name(1)
    raw = bytearray(damaged.read_bytes())
    raw[-1] ^= 1
    damaged.write_bytes(raw)
    job.start(spec, attempt=2, wanted=3)
    told = job.wait_event("checkpoint_damaged")["data"]
    assert (told["checkpoint"], told["loaded_step"]) == (newest.name, before.step)
    assert damaged.name in told["reason"]
    job.wait_phase("succeeded")
    assert min(r["step"] for r in job.reports() if r["world_size"] == 3) == before.step + 1
    _assert_ledger(job, range(1, 61))


def _wait_until_free(job: Job) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            ray.get_actor(naming.controller_name(job.job_id), namespace=naming.RAY_NAMESPACE)
        except ValueError:
            return
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("ValueError", "ValueError: this model was told to fail"),
        ("MemoryError", "MemoryError: this model was told to fail"),
        ("torch.OutOfMemoryError", "OutOfMemoryError: this model was told to fail"),
    ],
)
def test_an_error_in_the_users_model_fails_the_job_with_its_traceback(
    job: Job, error: str, reason: str
) -> None:
    arguments = {"pause_s": 0.01, "fail_at": 8, "fail_with": error}
    job.start(spec_of(model={"kind": "custom", "factory": PACED, "arguments": arguments}))
    failed = job.wait_phase("failed")
    assert failed["data"]["reason"] == reason
    told = job.events("error")[-1]["data"]
    assert told["rank"] in (0, 1)
    assert "paced_model.py" in told["traceback"]
    assert job.events("recovery") == job.events("worker_lost") == [], "it is not tried again"
    assert not any(_runs(pid) for pid in job.pids().values())
    logs = [p.read_text() for p in (job.storage / "jobs" / job.job_id / "logs").glob("*.log")]
    assert any("this model was told to fail" in text for text in logs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"kind": "custom", "factory": "no_such_module:X"}}, "ModelError.*no_such_module"),
        ({"optimizer": {"lr": 1e38}, "workers": {"wanted": 1}}, "(NonFinite|Diverged)Error.* step"),
    ],
)
def test_what_cannot_work_fails_with_a_reason(job: Job, change: dict[str, Any], message: str) -> None:
    spec = spec_of(**change)
    job.start(spec, wanted=spec["workers"]["wanted"])
    assert re.search(message, job.wait_phase("failed")["data"]["reason"])
