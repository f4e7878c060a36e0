"""Learning rates over the updates."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_core.config import AdamWConfig, ParameterGroup, ScheduleConfig, ZeroConfig
from zero_core.errors import ConfigError
from zero_core.schedule import factor, rates


def schedule(**fields: object) -> ScheduleConfig:
    return ScheduleConfig(**{"total_steps": 11, **fields})


def test_constant_is_the_peak_at_every_update() -> None:
    assert [factor(ScheduleConfig(), update) for update in (0, 5, 10_000)] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_warm_up_rises_linearly_to_the_peak(kind: str) -> None:
    found = [factor(schedule(kind=kind, warmup_steps=4), update) for update in range(4)]
    assert found == pytest.approx([0.25, 0.5, 0.75, 1.0])


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_decay_falls_from_the_peak_to_the_final_ratio_and_stays(kind: str) -> None:
    spec = schedule(kind=kind, final_ratio=0.2)
    factors = [factor(spec, update) for update in range(11)]
    assert (factors[0], factors[5], factors[10]) == pytest.approx((1.0, 0.6, 0.2))
    assert factors == sorted(factors, reverse=True)
    assert factor(spec, 500) == pytest.approx(0.2)


@given(
    kind=st.sampled_from(["constant", "linear", "cosine"]),
    total=st.integers(1, 300),
    warmup=st.integers(0, 300),
    final=st.floats(0, 1),
    update=st.integers(0, 400),
)
def test_a_factor_lies_between_zero_and_one(
    kind: str, total: int, warmup: int, final: float, update: int
) -> None:
    spec = ScheduleConfig(kind=kind, total_steps=total, warmup_steps=min(warmup, total), final_ratio=final)
    assert 0 <= factor(spec, update) <= 1 + 1e-12
    if update >= spec.warmup_steps:
        assert factor(spec, update) >= min(final, 1.0) - 1e-12


def test_every_group_has_its_rate() -> None:
    config = ZeroConfig(
        optimizer=AdamWConfig(lr=0.5),
        groups=(
            ParameterGroup(name="half", patterns=("a*",), lr_factor=0.5),
            ParameterGroup(name="own", patterns=("b*",), lr=2.0),
            ParameterGroup(name="plain", patterns=(), weight_decay=0.0),
        ),
        schedule=schedule(kind="linear", final_ratio=0.2),
    )
    assert rates(config, 5) == pytest.approx({"default": 0.3, "half": 0.15, "own": 1.2, "plain": 0.3})
    # An explicit rate takes the place of the optimizer's; a group with a rate of its own keeps it.
    found = rates(config, 0, lr=0.1)
    assert found == pytest.approx({"default": 0.1, "half": 0.05, "own": 2.0, "plain": 0.1})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "linear", "total_steps": None}, "needs total_steps"),
        ({"kind": "quadratic"}, "constant, linear or cosine"),
        ({"warmup_steps": 12}, "at least 1 and warmup_steps 12"),
        ({"warmup_steps": -1}, "must not be negative"),
        ({"final_ratio": 1.5}, r"final_ratio 1\.5"),
    ],
)
def test_a_schedule_that_cannot_work_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        schedule(**fields)
