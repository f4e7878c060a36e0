"""The learning rate over the steps."""

import pytest

from workers.schedule import factor, learning_rate
from workers.spec import JobSpec


def _spec(**schedule: object) -> JobSpec:
    return JobSpec.model_validate(
        {
            "data": {"kind": "synthetic"},
            "steps": 11,
            "global_batch": 2,
            "micro_batch": 1,
            "optimizer": {"lr": 0.5},
            "schedule": schedule,
        }
    )


def test_constant_is_the_peak_at_every_step() -> None:
    assert [learning_rate(_spec(kind="constant"), step) for step in (0, 5, 10)] == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_warm_up_rises_linearly_to_the_peak(kind: str) -> None:
    spec = _spec(kind=kind, warmup_steps=4)
    assert [factor(spec, step) for step in range(4)] == pytest.approx([0.25, 0.5, 0.75, 1.0])


@pytest.mark.parametrize(("kind", "middle"), [("linear", 0.6), ("cosine", 0.6)])
def test_decay_falls_from_the_peak_to_the_final_ratio(kind: str, middle: float) -> None:
    spec = _spec(kind=kind, final_ratio=0.2)
    assert factor(spec, 0) == pytest.approx(1.0)
    assert factor(spec, 5) == pytest.approx(middle)
    assert factor(spec, 10) == pytest.approx(0.2)
    factors = [factor(spec, step) for step in range(11)]
    assert factors == sorted(factors, reverse=True)


@pytest.mark.parametrize("warmup_steps", [10, 11])
def test_no_room_is_left_for_the_decay(warmup_steps: int) -> None:
    spec = _spec(kind="cosine", warmup_steps=warmup_steps)
    assert 0 < factor(spec, 10) <= 1
