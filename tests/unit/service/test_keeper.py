"""The comparison of database and cluster, step by step and without threads."""

import json
from pathlib import Path

import pytest

from service import jobs
from service.cluster import ControllerStatus
from service.errors import ClusterUnavailable
from service.jobs import JobState
from service.keeper import reminder
from tests.unit.service.conftest import House
from tests.unit.service.makers import NOW, job_of, spec_of
from workers.naming import JobFolder


def write_log(house: House, storage: Path) -> None:
    """What the fake logged, where the real controller would have written it."""
    path = JobFolder(storage, "job-1").log
    path.parent.mkdir(parents=True)
    lines = [json.dumps(entry) for entry in house.cluster.log_of("job-1")]
    path.write_text("\n".join(lines) + '\n{"seq": 99, "ty')


def test_a_queued_job_is_started_and_followed(house: House) -> None:
    job = house.running()
    assert (job.state, job.attempt, job.workers) == (JobState.RUNNING, 1, 2)
    assert house.cluster.started == [("job-1", 1, 2)]
    house.keeper.round()
    assert len(house.cluster.started) == 1


def test_a_job_that_has_no_place_says_what_it_waits_for(house: House) -> None:
    house.submit("job-1", spec_of(resources={"cpus": 3}))
    house.keeper.round()
    job = house.store.get("job-1")
    assert job.state is JobState.QUEUED
    assert "waiting for" in job.reason
    last = house.store.last_id("job-1")
    house.keeper.round()
    assert house.store.last_id("job-1") == last


def test_a_finished_jobs_controller_is_read_to_its_end_and_released(house: House) -> None:
    house.running(spec=spec_of(steps=3))
    house.cluster.train("job-1", 3)
    assert house.collect().state is JobState.SUCCEEDED
    assert house.stopped == 1
    house.keeper.round()
    assert house.cluster.running_jobs() == set()
    assert house.store.get("job-1").cursor == len(house.cluster.log_of("job-1"))


def test_a_lost_controller_is_started_again_as_the_next_attempt(house: House) -> None:
    house.running()
    house.cluster.lose_controller("job-1")
    house.keeper.round()
    assert house.cluster.started[-1] == ("job-1", 2, 2)
    job = house.collect()
    assert (job.state, job.attempt, job.controller_losses) == (JobState.RUNNING, 2, 1)


def test_a_job_whose_controller_is_lost_again_and_again_fails(house: House) -> None:
    house.running()
    for _ in range(house.max_controller_losses + 1):
        house.cluster.lose_controller("job-1")
        house.keeper.round()
    job = house.store.get("job-1")
    assert job.state is JobState.FAILED
    assert "controller was gone" in job.reason


def test_the_log_file_tells_the_end_of_a_job_whose_controller_is_lost(house: House) -> None:
    house.running(spec=spec_of(steps=3))
    house.cluster.train("job-1", 3)
    write_log(house, house.storage)
    house.cluster.lose_controller("job-1")
    house.keeper.round()
    job = house.store.get("job-1")
    assert (job.state, job.step) == (JobState.SUCCEEDED, 3)
    assert job.cursor == len(house.cluster.log_of("job-1"))
    assert len(house.cluster.started) == 1


def test_a_wish_to_stop_is_fulfilled_where_the_controller_is_gone(house: House) -> None:
    house.running()
    house.store.change("job-1", lambda job: jobs.cancelled(job, who="ann", now=NOW), now=NOW)
    house.cluster.lose_controller("job-1")
    house.keeper.round()
    assert house.store.get("job-1").state is JobState.CANCELLED


@pytest.mark.parametrize("wish", ["cancel", "pause", "resize"])
def test_a_wish_that_was_not_told_is_told_again(house: House, wish: str) -> None:
    house.running()
    steps = {
        "cancel": lambda job: jobs.cancelled(job, who="ann", now=NOW),
        "pause": lambda job: jobs.paused(job, who="ann", now=NOW),
        "resize": lambda job: jobs.resized(job, 3, who="ann", now=NOW),
    }
    house.store.change("job-1", steps[wish], now=NOW)
    house.keeper.round()
    assert [command["kind"] for _, command in house.cluster.commands] == [wish]
    house.collect()
    house.keeper.round()
    assert len(house.cluster.commands) == 1


def test_a_controller_of_no_known_job_is_released(house: House) -> None:
    house.cluster.start_job("stray", spec_of(), attempt=1, wanted=1)
    house.keeper.round()
    assert house.cluster.running_jobs() == set()


def test_a_controller_of_a_past_attempt_is_replaced(house: House) -> None:
    house.running()
    house.store.change("job-1", lambda job: jobs.paused(job, who="ann", now=NOW), now=NOW)
    house.cluster.command("job-1", {"kind": "pause", "who": "ann"})
    house.collect()
    # Resumed and started in the database, then the service crashed: the old controller is still there.
    house.store.change("job-1", lambda job: jobs.resumed(job, who="ann", now=NOW), now=NOW)
    house.store.change("job-1", lambda job: jobs.started(job, now=NOW), now=NOW)
    house.keeper.round()
    house.keeper.round()
    job = house.collect()
    assert job.state is JobState.RUNNING
    assert house.cluster.status("job-1").attempt == job.attempt


def test_a_controller_that_is_over_without_having_said_so_is_replaced(house: House) -> None:
    house.running()
    house.cluster._controllers["job-1"].phase = "failed"
    house.keeper.round()
    assert house.cluster.started == [("job-1", 1, 2)]
    house.keeper.round()
    house.keeper.round()
    assert house.cluster.started[-1] == ("job-1", 2, 2)


def test_one_jobs_trouble_leaves_the_others_alone(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    house.submit("job-1", spec_of(workers={"wanted": 1}))
    house.submit("job-2", spec_of(workers={"wanted": 1}))
    start = house.cluster.start_job

    def broken(job_id: str, *arguments: object, **named: object) -> None:
        if job_id == "job-1":
            raise ClusterUnavailable("no")
        start(job_id, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(house.cluster, "start_job", broken)
    house.keeper.round()
    assert [job_id for job_id, _, _ in house.cluster.started] == ["job-2"]
    monkeypatch.undo()
    house.keeper._failures.clear()
    house.keeper.round()
    assert house.cluster.started[-1][:2] == ("job-1", 2)


def test_a_cancel_does_not_wait_for_the_next_try_of_a_start(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object, **named: object) -> None:
        raise ClusterUnavailable("no")

    monkeypatch.setattr(house.cluster, "start_job", broken)
    house.submit()
    house.keeper.round()
    house.store.change("job-1", lambda job: jobs.cancelled(job, who="ann", now=NOW), now=NOW)
    house.keeper.round()
    job = house.store.get("job-1")
    assert job.state is JobState.CANCELLED
    assert "did not start" in job.reason


def test_reminders_wait_until_the_whole_log_is_stored() -> None:
    status = ControllerStatus("running", 1, 2, 2, 5, last_seq=7, attempt=1)
    job = job_of(wanted_workers=4, cursor=7)
    assert reminder(job, status) == {"kind": "resize", "workers": 4, "who": "the control plane"}
    assert reminder(job_of(wanted_workers=4, cursor=6), status) is None
