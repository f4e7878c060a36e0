"""The states, the table, and the pure steps."""

from dataclasses import replace

import pytest

from service import jobs
from service.errors import ImpossibleResize, WrongState
from service.jobs import ACTIVE, LIVE, TERMINAL, TRANSITIONS, Job, JobState, observed
from tests.unit.service.makers import NOW, event, job_of, phase, report, spec_of
from workers.reports import Event, RankReport

LATER = NOW + 5


def test_the_table_covers_every_state_and_ends_at_the_terminal_ones() -> None:
    assert set(TRANSITIONS) == set(JobState)
    assert {state for state, targets in TRANSITIONS.items() if not targets} == TERMINAL


def test_every_state_can_reach_an_end() -> None:
    for state in JobState:
        reached, edge = {state}, {state}
        while edge := {target for s in edge for target in TRANSITIONS[s]} - reached:
            reached |= edge
        assert reached & TERMINAL


def test_a_job_goes_from_the_queue_to_success() -> None:
    job = jobs.submitted("job-1", spec_of(), who="ann", now=NOW).job
    assert (job.state, job.attempt, job.version) == (JobState.QUEUED, 0, 1)
    job = jobs.started(job, now=LATER).job
    assert (job.state, job.attempt) == (JobState.STARTING, 1)
    for name in ("starting", "running", "resizing", "running", "recovering", "running", "succeeded"):
        job = jobs.observed(job, phase(name), now=LATER)
        assert job.state == name
    assert job.finished_at == LATER
    assert job.workers == 0


@pytest.mark.parametrize("state", sorted(LIVE))
def test_cancel_of_a_live_job_waits_for_the_cluster(state: JobState) -> None:
    job = jobs.cancelled(job_of(state), who="ann", now=LATER).job
    assert job.state is JobState.CANCELLING
    for name in ("running", "recovering", "pausing", "paused"):
        assert jobs.observed(job, phase(name), now=LATER).state is JobState.CANCELLING
    assert jobs.observed(job, phase("cancelled"), now=LATER).state is JobState.CANCELLED


@pytest.mark.parametrize("state", [JobState.QUEUED, JobState.PAUSED])
def test_cancel_of_a_job_off_the_cluster_is_immediate(state: JobState) -> None:
    job = jobs.cancelled(job_of(state), who="ann", now=LATER).job
    assert (job.state, job.finished_at) == (JobState.CANCELLED, LATER)


def test_cancelling_twice_is_one_wish() -> None:
    first = jobs.cancelled(job_of(), who="ann", now=LATER)
    assert [note.kind for note in first.notes] == ["request", "state"]
    again = jobs.cancelled(first.job, who="bob", now=LATER)
    assert again == jobs.Outcome(first.job)


@pytest.mark.parametrize("state", [JobState.SUCCEEDED, JobState.FAILED])
def test_cancel_of_a_job_that_is_over_is_refused(state: JobState) -> None:
    with pytest.raises(WrongState, match="cannot cancel") as caught:
        jobs.cancelled(job_of(state), who="ann", now=LATER)
    assert caught.value.code == "wrong_state"
    assert caught.value.details["state"] == state


def test_a_pausing_job_ignores_phases_on_the_way() -> None:
    job = jobs.paused(job_of(), who="ann", now=LATER).job
    for name in ("running", "recovering", "pausing"):
        job = jobs.observed(job, phase(name), now=LATER)
        assert job.state is JobState.PAUSING
    assert jobs.observed(job, phase("paused"), now=LATER).state is JobState.PAUSED


def test_a_resumed_job_queues_and_starts_as_the_next_attempt() -> None:
    job = jobs.resumed(job_of(JobState.PAUSED), who="ann", now=LATER).job
    assert (job.state, job.queued_at) == (JobState.QUEUED, LATER)
    assert jobs.started(job, now=LATER).job.attempt == 2


@pytest.mark.parametrize("state", sorted(set(JobState) - {JobState.PAUSED}))
def test_only_a_paused_job_can_be_resumed(state: JobState) -> None:
    with pytest.raises(WrongState):
        jobs.resumed(job_of(state), who="ann", now=LATER)


@pytest.mark.parametrize(
    ("workers", "bound"),
    [(9, "8 micro-batches"), (7, "workers.max of 6"), (1, "workers.min of 2")],
)
def test_an_impossible_resize_names_its_bound(workers: int, bound: str) -> None:
    spec = spec_of(workers={"wanted": 2, "min": 2, "max": 6})
    with pytest.raises(ImpossibleResize, match=bound) as caught:
        jobs.resized(job_of(spec=spec), workers, who="ann", now=LATER)
    assert caught.value.code == "impossible_resize"


def test_a_resize_is_a_wish_until_the_cluster_has_done_it() -> None:
    job = jobs.resized(job_of(workers=2), 4, who="ann", now=LATER).job
    assert (job.wanted_workers, job.workers, job.state) == (4, 2, JobState.RUNNING)
    done = event("resize", {"old_workers": 2, "new_workers": 4}, generation=2)
    job = jobs.observed(job, done, now=LATER)
    assert (job.workers, job.generation) == (4, 2)


def test_a_refused_resize_takes_the_wish_back_unless_there_is_a_newer_one() -> None:
    job = jobs.resized(job_of(workers=2), 4, who="ann", now=LATER).job
    refusal = event("resize_refused", {"wanted": 4, "workers": 2, "reason": "no place"})
    assert jobs.observed(job, refusal, now=LATER).wanted_workers == 2
    newer = jobs.resized(job, 3, who="ann", now=LATER).job
    assert jobs.observed(newer, refusal, now=LATER).wanted_workers == 3


@pytest.mark.parametrize("state", [*sorted(TERMINAL), JobState.CANCELLING, JobState.PAUSING])
def test_a_job_that_ends_is_not_resized(state: JobState) -> None:
    with pytest.raises(WrongState):
        jobs.resized(job_of(state), 4, who="ann", now=LATER)


def test_reports_tell_progress_and_those_of_a_past_generation_nothing() -> None:
    job = jobs.observed(job_of(), report(step=7, generation=3, world_size=4), now=LATER)
    assert (job.step, job.loss, job.workers, job.generation) == (7, 1 / 7, 4, 3)
    assert jobs.observed(job, report(step=8, generation=2), now=LATER) == job


def test_a_recovery_may_go_back_in_steps() -> None:
    job = jobs.observed(job_of(), report(step=7, generation=1), now=LATER)
    assert jobs.observed(job, report(step=5, generation=2), now=LATER).step == 5


def test_phases_of_a_past_attempt_say_nothing() -> None:
    job = job_of(JobState.STARTING, attempt=2)
    assert jobs.observed(job, phase("paused", attempt=1), now=LATER).state is JobState.STARTING


@pytest.mark.parametrize("state", sorted(ACTIVE))
def test_a_lost_controller_is_replaced_a_bounded_number_of_times(state: JobState) -> None:
    job = job_of(state)
    for attempt in (2, 3):
        job = jobs.controller_lost(job, cause="gone", limit=2, now=LATER).job
        assert (job.state, job.attempt) == (JobState.STARTING, attempt)
    job = jobs.controller_lost(job, cause="head lost", limit=2, now=LATER).job
    assert job.state is JobState.FAILED
    assert "head lost" in job.reason


def test_a_new_checkpoint_renews_the_patience_with_lost_controllers() -> None:
    job = jobs.controller_lost(job_of(), cause="gone", limit=1, now=LATER).job
    assert jobs.observed(job, event("checkpoint", {"step": 5}), now=LATER).controller_losses == 0


@pytest.mark.parametrize(
    ("state", "after"),
    [
        (JobState.CANCELLING, JobState.CANCELLED),
        (JobState.PAUSING, JobState.PAUSED),
        (JobState.QUEUED, JobState.QUEUED),
        (JobState.SUCCEEDED, JobState.SUCCEEDED),
    ],
)
def test_a_lost_controller_fulfils_a_wish_to_stop(state: JobState, after: JobState) -> None:
    assert jobs.controller_lost(job_of(state), cause="gone", limit=2, now=LATER).job.state is after


def _through(job: Job, *entries: Event | RankReport) -> Job:
    for entry in entries:
        job = observed(job, entry, now=NOW)
    return job


def test_goodput_counts_each_step_of_the_attempt_once() -> None:
    job = _through(job_of(JobState.STARTING), phase("starting", seq=0))
    assert job.goodput is None
    # Steps of 0.1 s: two ranks report each, in seconds 1, 2 and 4 of the attempt.
    job = _through(job, report(seq=1, step=1), report(seq=2, step=2), report(seq=3, rank=1, step=2))
    job = _through(job, report(seq=4, step=3))
    assert job.goodput == pytest.approx(0.3 / 4)
    # Steps 2 and 3 are done again.
    job = _through(job, report(seq=5, step=2, generation=2), report(seq=6, step=3, generation=2))
    assert job.goodput == pytest.approx(0.3 / 6)
    job = _through(job, report(seq=7, step=4, generation=2))
    assert job.goodput == pytest.approx(0.4 / 7)


def test_goodput_follows_the_controllers_own_account() -> None:
    job = _through(job_of(JobState.STARTING), phase("starting", seq=0), report(seq=1, step=1))
    job = _through(job, report(seq=2, step=2))
    known = {"old_workers": 2, "new_workers": 1, "at_step": 1, "productive_s": 0.15}
    job = _through(job, event("recovery", known, seq=3, generation=2))
    assert job.goodput == pytest.approx(0.15 / 3)
    job = _through(job, report(seq=4, step=2, generation=2))
    assert job.goodput == pytest.approx(0.25 / 4)


def test_goodput_is_the_attempts_and_stays_when_it_is_over() -> None:
    job = _through(job_of(JobState.STARTING), phase("starting", seq=0), phase("running", seq=1))
    job = _through(job, report(seq=2, step=1), phase("succeeded", seq=4))
    assert job.goodput == pytest.approx(0.1 / 4)
    job = _through(job, event("command", {"kind": "cancel", "who": "ann", "refused": "over"}, seq=1000))
    assert job.goodput == pytest.approx(0.1 / 4)
    again = replace(job, state=JobState.STARTING, attempt=2)
    again = _through(again, phase("starting", seq=10, attempt=1), phase("starting", seq=11, attempt=2))
    assert again.goodput is None
    assert _through(again, report(seq=12, step=1, generation=2)).goodput == pytest.approx(0.1)
