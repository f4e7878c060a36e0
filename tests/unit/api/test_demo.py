"""What the demo takes for success, and that its job is the one it says."""

from dataclasses import replace

import pytest

from api import demo
from api.demo import SPEC, DemoFailed
from api.schemas import EventOut, JobOut
from service.jobs import JobState, submitted


def _job(state: JobState = JobState.SUCCEEDED) -> JobOut:
    return JobOut.of(replace(submitted("job", SPEC, who="test", now=0.0).job, state=state))


def _resize(old: int, new: int, *, lost: int = 0) -> EventOut:
    data = {"old_workers": old, "new_workers": new, "steps_lost": lost, "pause_s": 0.5, "at_step": 10}
    return EventOut(id=1, seq=1, time=0.0, kind="resize", rank=None, generation=2, step=10, data=data)


def _seen(**changes: object) -> demo._Seen:
    losses = [5.5 - 4.0 * step / SPEC.steps for step in range(SPEC.steps)]
    seen = demo._Seen(losses=losses, resizes=[_resize(2, 4), _resize(4, 3)], job=_job())
    for name, value in changes.items():
        setattr(seen, name, value)
    return seen


def test_a_good_run_passes() -> None:
    demo._judge(_seen())


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"job": _job(JobState.FAILED)}, "ended as failed"),
        ({"job": None}, "ended as None"),
        ({"losses": [5.5] * SPEC.steps}, "nothing was learned"),
        ({"losses": [float("nan")] * SPEC.steps}, "nothing was learned"),
        ({"losses": [5.5, 1.0]}, "2 steps were reported"),
        ({"resizes": [_resize(2, 4)]}, "not 2 -> 4 -> 3"),
        ({"resizes": [_resize(2, 3), _resize(3, 3)]}, "not 2 -> 4 -> 3"),
        ({"resizes": [_resize(2, 4, lost=1), _resize(4, 3)]}, "lost 1 steps"),
    ],
)
def test_whatever_is_not_as_it_should_be_fails(changes: dict[str, object], told: str) -> None:
    with pytest.raises(DemoFailed, match=told):
        demo._judge(_seen(**changes))


def test_a_refused_resize_fails_at_once() -> None:
    refused = _resize(2, 4).model_copy(update={"kind": "resize_refused"})
    with pytest.raises(DemoFailed, match="refused"):
        demo._keep(_seen(), refused)


def test_its_job_fits_two_cores_and_may_be_resized_as_it_will_be() -> None:
    assert SPEC.max_workers >= 4
    assert 4 * SPEC.resources.cpus <= demo.LOCAL_CPUS
    assert all(0 < step < SPEC.steps for step, _ in demo.RESIZES)
