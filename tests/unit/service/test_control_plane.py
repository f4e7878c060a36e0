"""The facade with its loops running, over a real SQLite file and a cluster in memory."""

import threading
import time
from functools import partial
from pathlib import Path

import pytest

from service.control_plane import ControlPlane
from service.errors import (
    ClusterUnavailable,
    Conflict,
    DoesNotFit,
    ImpossibleResize,
    InvalidRequest,
    KeyReused,
    NotFound,
    WrongState,
)
from service.fake_cluster import FakeCluster
from service.jobs import Job, JobState
from service.settings import Settings
from service.store import Store
from tests.unit.service.makers import spec_of, wait_until
from workers.naming import JobFolder


def running(plane: ControlPlane, **changes: object) -> Job:
    job = plane.submit(spec_of(**changes), who="ann")
    return reach(plane, job, JobState.RUNNING)


def reach(plane: ControlPlane, job: Job, state: JobState) -> Job:
    wait_until(lambda: plane.get(job.id).state is state)
    return plane.get(job.id)


def test_a_job_runs_to_its_end(plane: ControlPlane, cluster: FakeCluster) -> None:
    job = running(plane, steps=5)
    cluster.train(job.id, 5)
    job = reach(plane, job, JobState.SUCCEEDED)
    assert (job.step, job.loss, job.workers) == (5, 0.8, 0)
    wait_until(lambda: not cluster.running_jobs())
    kinds = [entry.kind for entry in plane.timeline(job.id, after=0, limit=100, kinds="event")]
    assert kinds == ["request", "state", "phase", "phase", "checkpoint", "phase"]
    assert [entry.rank for entry in plane.latest_ranks(job.id)] == [0, 1]
    history = plane.rank_history(job.id, 1, after=0, limit=100)
    assert [entry.step for entry in history] == [1, 2, 3, 4, 5]


def test_resize_pause_resume_cancel(plane: ControlPlane, cluster: FakeCluster) -> None:
    job = running(plane)
    cluster.train(job.id, 3)
    plane.resize(job.id, 4, who="bob")
    wait_until(lambda: plane.get(job.id).workers == 4)
    plane.pause(job.id, who="bob")
    reach(plane, job, JobState.PAUSED)
    wait_until(lambda: not cluster.running_jobs())
    assert plane.resume(job.id, who="bob").state is JobState.QUEUED
    job = reach(plane, job, JobState.RUNNING)
    assert (job.attempt, cluster.started[-1]) == (2, (job.id, 2, 4))
    plane.save_checkpoint(job.id, who="bob")
    assert plane.cancel(job.id, who="bob").state is JobState.CANCELLING
    reach(plane, job, JobState.CANCELLED)
    wait_until(lambda: not cluster.running_jobs())
    asked = [
        entry.body["action"]
        for entry in plane.timeline(job.id, after=0, limit=100)
        if entry.kind == "request"
    ]
    assert asked == ["submit", "resize", "pause", "resume", "checkpoint", "cancel"]


def test_cancel_of_a_queued_job_is_immediate(plane: ControlPlane) -> None:
    running(plane, workers={"wanted": 4})
    job = plane.submit(spec_of(), who="ann")
    assert plane.cancel(job.id, who="ann").state is JobState.CANCELLED


def test_the_same_submission_returns_the_first_job(plane: ControlPlane) -> None:
    first = plane.submit(spec_of(), who="ann", idempotency_key="k")
    assert plane.submit(spec_of(), who="ann", idempotency_key="k").id == first.id
    with pytest.raises(KeyReused):
        plane.submit(spec_of(steps=7), who="ann", idempotency_key="k")
    with pytest.raises(InvalidRequest):
        plane.submit(spec_of(), who="ann", idempotency_key="k" * 201)


def test_a_job_that_cannot_fit_is_refused_before_it_starts(plane: ControlPlane, cluster: FakeCluster) -> None:
    with pytest.raises(DoesNotFit, match="place for 4") as caught:
        plane.submit(spec_of(workers={"wanted": 5}), who="ann")
    assert caught.value.code == "job_does_not_fit"
    assert plane.list_jobs(cursor=None, limit=10, state=None).jobs == ()


@pytest.mark.parametrize(
    ("workers", "message"), [(9, "micro-batches"), (6, "place for 4"), (1, "workers.min of 2")]
)
def test_an_impossible_resize_changes_nothing(plane: ControlPlane, workers: int, message: str) -> None:
    job = running(plane, workers={"wanted": 2, "min": 2})
    with pytest.raises(ImpossibleResize, match=message):
        plane.resize(job.id, workers, who="ann")
    assert plane.get(job.id).wanted_workers == 2


def test_a_resize_that_cannot_be_placed_is_taken_back(plane: ControlPlane, cluster: FakeCluster) -> None:
    job = running(plane)
    cluster.no_place = "a node left"
    assert plane.resize(job.id, 4, who="ann").wanted_workers == 4
    wait_until(lambda: plane.get(job.id).wanted_workers == 2)
    assert plane.timeline(job.id, after=0, limit=100)[-1].body["reason"] == "a node left"
    assert len(cluster.commands) == 1


def test_where_the_cluster_grows_room_is_left_to_the_controller(
    tmp_path: Path, store: Store, cluster: FakeCluster
) -> None:
    settings = Settings(data_dir=tmp_path, poll_interval_s=0.01, cluster_grows=True)
    plane = ControlPlane(settings, store, cluster)
    plane.start()
    try:
        job = running(plane, workers={"wanted": 5})
        assert cluster.started == [(job.id, 1, 5)], "more than the 4 places there are"
        cluster.no_place = "missing: 2 CPU"
        plane.resize(job.id, 7, who="ann")
        assert cluster.commands == [(job.id, {"kind": "resize", "workers": 7, "who": "ann"})]
        wait_until(lambda: plane.get(job.id).wanted_workers == 5)
        last = plane.timeline(job.id, after=0, limit=100)[-1]
        assert (last.kind, last.body["reason"]) == ("resize_refused", "missing: 2 CPU")
        assert plane.get(job.id).state is JobState.RUNNING
        with pytest.raises(ImpossibleResize, match="micro-batches"):
            plane.resize(job.id, 9, who="ann")
        with pytest.raises(DoesNotFit, match="reserves 1,000"):
            plane.submit(spec_of(resources={"memory_bytes": 1000}), who="ann")
    finally:
        plane.stop()


def test_a_resize_needs_the_cluster_to_be_asked(plane: ControlPlane, cluster: FakeCluster) -> None:
    job = running(plane)
    cluster.available = False
    with pytest.raises(ClusterUnavailable):
        plane.resize(job.id, 4, who="ann")
    assert plane.get(job.id).wanted_workers == 2


def test_a_resize_with_a_stale_version_is_a_conflict(plane: ControlPlane) -> None:
    job = running(plane)
    plane.resize(job.id, 3, who="ann", expected_version=job.version)
    with pytest.raises(Conflict) as caught:
        plane.resize(job.id, 4, who="ann", expected_version=job.version)
    assert caught.value.code == "version_conflict"


def test_wrong_states_are_told(plane: ControlPlane) -> None:
    running(plane, workers={"wanted": 4})
    job = plane.submit(spec_of(), who="ann")
    for wish in (plane.pause, plane.resume, plane.save_checkpoint):
        with pytest.raises(WrongState):
            wish(job.id, who="ann")


def test_what_is_unknown_is_told_by_code(plane: ControlPlane) -> None:
    job = plane.submit(spec_of(), who="ann")
    for call, code in (
        (lambda: plane.get("nope"), "unknown_job"),
        (lambda: plane.timeline("nope", after=0, limit=1), "unknown_job"),
        (lambda: plane.logs("../../etc", worker=None, tail_lines=10), "unknown_job"),
        (lambda: plane.rank_history(job.id, 7, after=0, limit=1), "unknown_rank"),
        (lambda: plane.logs(job.id, worker="../../x", tail_lines=10), "unknown_worker"),
    ):
        with pytest.raises(NotFound) as caught:
            call()
        assert caught.value.code == code


def test_a_failed_job_keeps_its_reason(plane: ControlPlane, cluster: FakeCluster) -> None:
    job = running(plane)
    cluster.fail(job.id, "ValueError: no such token")
    assert reach(plane, job, JobState.FAILED).reason == "ValueError: no such token"


def test_a_wish_during_an_outage_is_kept_and_told_later(plane: ControlPlane, cluster: FakeCluster) -> None:
    job = running(plane)
    cluster.available = False
    wait_until(lambda: not plane.ready().ok)
    assert plane.cancel(job.id, who="ann").state is JobState.CANCELLING
    cluster.available = True
    reach(plane, job, JobState.CANCELLED)
    wait_until(lambda: plane.ready().ok)


def test_jobs_are_taken_while_the_cluster_is_away(plane: ControlPlane, cluster: FakeCluster) -> None:
    cluster.available = False
    job = plane.submit(spec_of(), who="ann")
    assert job.state is JobState.QUEUED
    cluster.available = True
    reach(plane, job, JobState.RUNNING)


def has_passed(plane: ControlPlane, job_id: str, step: int) -> bool:
    return plane.get(job_id).step > step


def test_a_restarted_control_plane_goes_on_from_the_cursor(
    settings: Settings, url: str, cluster: FakeCluster
) -> None:
    job_id = ""
    for generation in range(4):
        store = Store(url)
        plane = ControlPlane(settings, store, cluster)
        plane.start()
        if not job_id:
            job_id = running(plane).id
        cluster.train(job_id, 20)
        if generation % 2:  # stop in the middle of reading
            wait_until(partial(has_passed, plane, job_id, 20 * generation))
        plane.stop()
        store.close()
        cluster.train(job_id, 1)
    store = Store(url)
    plane = ControlPlane(settings, store, cluster)
    plane.start()
    logged = cluster.log_of(job_id)
    wait_until(lambda: plane.get(job_id).cursor == len(logged))
    stored = [entry for entry in store.entries(job_id, after=0, limit=1000) if entry.seq is not None]
    assert [entry.seq for entry in stored] == [entry["seq"] for entry in logged]
    assert len(cluster.started) == 1
    plane.stop()
    store.close()


def test_waiting_for_a_change_ends_with_it(plane: ControlPlane, cluster: FakeCluster) -> None:
    job = running(plane)
    last = plane.timeline(job.id, after=0, limit=100)[-1].id
    started = time.monotonic()
    assert not plane.wait_for_change(job.id, last, 0.1)
    assert time.monotonic() - started >= 0.1
    threading.Timer(0.1, cluster.train, (job.id,)).start()
    assert plane.wait_for_change(job.id, last, 5)
    assert plane.wait_for_change(None, last, 5)


def test_stopping_lets_the_waiting_go(settings: Settings, store: Store, cluster: FakeCluster) -> None:
    plane = ControlPlane(settings, store, cluster)
    plane.start()
    threading.Timer(0.1, plane.stop).start()
    started = time.monotonic()
    assert not plane.wait_for_change(None, 0, 30)
    assert time.monotonic() - started < 30


def test_logs_are_tailed_by_computed_names_only(plane: ControlPlane, tmp_path: Path) -> None:
    job = plane.submit(spec_of(), who="ann")
    assert plane.logs(job.id, worker=None, tail_lines=10) == []
    folder = JobFolder(tmp_path, job.id)
    folder.worker_logs.mkdir(parents=True)
    for number in (2, 10):
        folder.worker_log(f"w{number}").write_text("".join(f"line {i}\n" for i in range(50)))
    (tmp_path / "secret.log").write_text("secret")
    (folder.worker_logs / "w3.log").symlink_to(tmp_path / "secret.log")
    tails = plane.logs(job.id, worker=None, tail_lines=2)
    assert [(tail.worker, tail.lines) for tail in tails] == [
        ("w2", ("line 48", "line 49")),
        ("w10", ("line 48", "line 49")),
    ]
    assert tails[0].truncated
    (tail,) = plane.logs(job.id, worker="w2", tail_lines=50)
    assert not tail.truncated
    for worker in ("../secret", "/etc/passwd", "w3/../../secret", ""):
        with pytest.raises(NotFound):
            plane.logs(job.id, worker=worker, tail_lines=2)
    assert plane.logs(job.id, worker="w3", tail_lines=2) == []


def test_a_huge_log_is_bounded_in_bytes(plane: ControlPlane, tmp_path: Path) -> None:
    job = plane.submit(spec_of(), who="ann")
    folder = JobFolder(tmp_path, job.id)
    folder.worker_logs.mkdir(parents=True)
    folder.worker_log("w0").write_bytes(b"x" * 100 + b"\n" + b"y" * (2 << 20) + b"\nend\n")
    (tail,) = plane.logs(job.id, worker="w0", tail_lines=5000)
    assert tail.lines[-1] == "end"
    assert tail.truncated
    assert sum(map(len, tail.lines)) < 600_000


def test_checkpoints_of_a_new_job_are_none(plane: ControlPlane) -> None:
    assert plane.checkpoints.listed(plane.submit(spec_of(), who="ann").id) == []


def test_limits_are_bounded(plane: ControlPlane) -> None:
    for limit in (0, 1001):
        with pytest.raises(InvalidRequest):
            plane.list_jobs(cursor=None, limit=limit, state=None)


def test_readiness_names_each_part(settings: Settings, store: Store, cluster: FakeCluster) -> None:
    plane = ControlPlane(settings, store, cluster)
    assert plane.ready().checks == {
        "database": "ok",
        "cluster": "ok",
        "keeper": "not running",
        "collector": "not running",
    }
