"""A job's attempts on a real local Ray: how they start, pause, go on, are cancelled, and fail."""

import re
import time
from typing import Any

import pytest
import ray

from tests.integration.jobs import (
    PACED,
    Job,
    assert_ledger,
    runs,
    spec_of,
    wait_for_cpus,
    wait_for_status,
)
from workers import naming
from zero_core.checkpoint import manifest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def _wait_until_free(job: Job) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            ray.get_actor(naming.controller_name(job.job_id), namespace=naming.RAY_NAMESPACE)
        except ValueError:
            return
        time.sleep(0.05)


def test_cancel_leaves_nothing_behind(job: Job, ray_cluster: int) -> None:
    """L10 (Ray 23638, 35773): processes, memory and placement groups are gone before `cancelled` is shown."""
    job.start(spec_of())
    job.wait_step(2)
    began = time.monotonic()
    job.command("cancel")
    event = job.wait_phase("cancelled")
    assert time.monotonic() - began < 30
    assert event["data"]["reason"] == "cancelled by tester"
    assert not any(runs(pid) for pid in job.pids().values()), "gone before `cancelled` is shown"
    assert event["data"]["workers"] == 0
    wait_for_cpus(ray_cluster, timeout_s=20)
    job.command("resize", workers=3)
    job.read()
    assert "cancelled" in job.events("command")[-1]["data"]["refused"]
    # A controller that is restarted after the end leaves it at that.
    job.crash_controller()
    wait_for_status(job, "cancelled")
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


def test_pause_gives_everything_back_and_another_attempt_goes_on(job: Job, ray_cluster: int) -> None:
    spec = spec_of(steps=60)
    job.start(spec)
    job.wait_step(3)
    job.command("pause")
    event = job.wait_phase("paused")
    assert event["data"]["reason"] == "paused by tester"
    assert not any(runs(pid) for pid in job.pids().values())
    at = max(r["step"] for r in job.reports())
    last = job.events("checkpoint")[-1]["data"]
    assert (last["step"], last["reason"]) == (at, "pause")
    wait_for_cpus(ray_cluster, timeout_s=20)
    job.kill()
    _wait_until_free(job)
    job.start(spec, attempt=2, wanted=3)
    job.wait_phase("succeeded")
    resumed = [r for r in job.reports() if r["world_size"] == 3]
    assert min(r["step"] for r in resumed) == at + 1
    assert {r["generation"] for r in resumed} == {2}
    assert_ledger(job, range(1, 61))


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
    assert_ledger(job, range(1, 61))


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
    assert not any(runs(pid) for pid in job.pids().values())
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
