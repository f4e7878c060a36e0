"""A rank that hangs, and one whose process is stopped, on a real local Ray: named, ended, gone on without."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.integration.jobs import Job, runs, spec_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

STUCK_AFTER_S = 6.0


def held_spec(held: Path, **changes: Any) -> dict[str, Any]:
    arguments = {"pause_s": 0.02, "held": str(held)}
    factory = "tests.integration.held_model:Held"
    return spec_of(
        model={"kind": "custom", "factory": factory, "arguments": arguments},
        elastic={"stuck_after_s": STUCK_AFTER_S},
        **changes,
    )


def stuck_events(job: Job) -> list[dict[str, Any]]:
    return [event["data"] for event in job.events("worker_stuck")]


def test_a_rank_that_hangs_is_named_and_the_job_goes_on_without_it(job: Job, tmp_path: Path) -> None:
    held = tmp_path / "held"
    job.start(held_spec(held), wanted=3)
    job.wait_step(3, world_size=3)
    pids = job.pids()
    held.touch()
    told = job.wait(lambda job: [data for data in stuck_events(job) if data["dead"]], "a stuck rank")[0]
    held.unlink()
    warning = stuck_events(job)[0]
    assert (warning["rank"], warning["dead"], warning["phase"]) == (1, False, "forward")
    assert (told["rank"], told["worker"], told["phase"]) == (1, "w1", "forward")
    assert told["collective"], "the last collective it had come to"
    assert told["node"]
    assert told["seconds"] >= STUCK_AFTER_S
    assert sorted(told["waiting"]) == ["0", "2"]
    recovery = job.wait_event("recovery")["data"]
    assert "rank 1 (w1)" in recovery["cause"]
    assert "has not moved" in recovery["cause"]
    job.wait_step(recovery["at_step"] + 3, generation=recovery["generation"])
    job.wait(lambda _: not runs(pids["w1"]), "the end of the process that hung")
    survivors = {r["worker"] for r in job.reports() if r["generation"] == recovery["generation"]}
    assert "w1" not in survivors
    assert {"w0", "w2"} <= survivors


def test_a_process_that_is_stopped_is_named_and_ended(job: Job, tmp_path: Path) -> None:
    job.start(held_spec(tmp_path / "never"), wanted=3)
    job.wait_step(3, world_size=3)
    pid = job.pids()["w2"]
    os.kill(pid, signal.SIGSTOP)
    try:
        told = job.wait(lambda job: [data for data in stuck_events(job) if data["dead"]], "a stuck rank")[0]
        assert (told["rank"], told["worker"]) == (2, "w2")
        assert told["silent_s"] >= STUCK_AFTER_S
        recovery = job.wait_event("recovery")["data"]
        job.wait_step(recovery["at_step"] + 3, generation=recovery["generation"])
        job.wait(lambda _: not runs(pid), "the end of the process that was stopped")
    finally:
        if runs(pid):
            os.kill(pid, signal.SIGCONT)
