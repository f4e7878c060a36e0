"""The loss scale as a state machine, and what a value that is not finite does in each precision."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_core.config import LossScale, ZeroConfig
from zero_core.errors import CheckpointError, ConfigError, LossScaleError, NonFiniteError
from zero_core.precision import ScaleState, StepGate, advance

INF, NAN = math.inf, math.nan

configs = st.builds(
    lambda low, up1, up2, interval, growth, backoff: LossScale(
        floor=2.0**low,
        initial=2.0 ** (low + up1),
        ceiling=2.0 ** (low + up1 + up2),
        growth_interval=interval,
        growth=growth,
        backoff=backoff,
    ),
    st.integers(-4, 4),
    st.integers(0, 5),
    st.integers(0, 5),
    st.integers(1, 4),
    st.sampled_from([1.0, 2.0, 3.0]),
    st.sampled_from([0.5, 0.3]),
)


@given(configs, st.lists(st.booleans(), max_size=40))
def test_the_scale_stays_within_its_bounds_and_counts_what_it_skips(
    config: LossScale, steps: list[bool]
) -> None:
    state, skipped = ScaleState(config.initial), 0
    for finite in steps:
        before, after = state, advance(state, config, finite=finite)
        if after is None:
            assert not finite
            assert before.scale == config.floor
            return
        skipped += not finite
        assert config.floor <= after.scale <= config.ceiling
        assert after.skipped == skipped
        assert after.good < config.growth_interval
        if not finite:
            assert after.scale == max(before.scale * config.backoff, config.floor)
            assert after.good == 0
        elif after.good:
            assert after == ScaleState(before.scale, before.good + 1, skipped)
        else:
            assert after.scale == min(before.scale * config.growth, config.ceiling)
        state = after


def test_growth_needs_good_steps_in_a_row() -> None:
    config = LossScale(initial=8.0, growth_interval=3)
    state, scales = ScaleState(config.initial), []
    for finite in (True, True, False, True, True, True, True):
        after = advance(state, config, finite=finite)
        assert after is not None
        state = after
        scales.append(state.scale)
    assert scales == [8, 8, 4, 4, 4, 8, 8]


def fp16(**fields: float) -> StepGate:
    return StepGate(ZeroConfig(precision="fp16", loss_scale=LossScale(**fields)))


@pytest.mark.parametrize(("norm", "loss"), [(INF, 1.0), (NAN, 1.0), (1.0, NAN), (1.0, INF), (NAN, NAN)])
def test_a_value_that_is_not_finite(norm: float, loss: float) -> None:
    """In fp32 and bf16 an error; in fp16 a skipped step until the scale is at its floor, then an error."""
    for precision in ("fp32", "bf16"):
        gate = StepGate(ZeroConfig(precision=precision))
        with pytest.raises(NonFiniteError, match="after step 7: parameters are unchanged"):
            gate.passes(grad_norm=norm, loss=loss, step=7)
        assert gate.passes(grad_norm=1.0, loss=1.0, step=7)
        assert (gate.scale, gate.skipped, gate.state_dict()) == (1.0, 0, None)
    gate = fp16(initial=4.0, floor=2.0)
    assert not gate.passes(grad_norm=norm, loss=loss, step=0)
    assert (gate.scale, gate.skipped) == (2.0, 1)
    message = r"although the loss scale is at its floor of 2 \(1 steps were skipped so far\)"
    for _ in range(2):  # the error changes nothing
        with pytest.raises(LossScaleError, match=message) as caught:
            gate.passes(grad_norm=norm, loss=loss, step=1)
    assert ("forward pass itself" in str(caught.value)) == (not math.isfinite(loss))
    assert gate.passes(grad_norm=1.0, loss=1.0, step=1)
    assert (gate.scale, gate.skipped) == (2.0, 1)


def test_the_state_goes_through_json() -> None:
    gate = fp16(initial=2.0**10, growth_interval=3)
    for norm in (INF, 1.0, 1.0):
        gate.passes(grad_norm=norm, loss=1.0, step=0)
    again = fp16()
    again.load_state_dict(json.loads(json.dumps(gate.state_dict())))
    assert again.state_dict() == {"scale": 512.0, "good": 2, "skipped": 1}
    with pytest.raises(CheckpointError, match="no loss scale but None"):
        again.load_state_dict(None)


@pytest.mark.parametrize(
    "fields",
    [
        {"initial": 0.5},
        {"floor": 0.0},
        {"initial": 2.0, "ceiling": 1.0},
        {"ceiling": INF},
        {"growth": 0.9},
        {"backoff": 1.0},
        {"growth_interval": 0},
        {"initial": NAN},
    ],
)
def test_settings_that_cannot_work_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="loss scale"):
        LossScale(**fields)
