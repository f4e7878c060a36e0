"""Settings of another type than is declared are refused by name, whatever they would have done."""

from typing import Any

import pytest

from zero_core import AdamWConfig, ZeroConfig
from zero_core.config import LossScale, ParameterGroup, ScheduleConfig, SGDConfig
from zero_core.errors import ConfigError


@pytest.mark.parametrize(
    ("kind", "name", "value", "wanted"),
    [
        (ZeroConfig, "reproducible", "no", "bool"),
        (ZeroConfig, "overlap", "no", "bool"),
        (ZeroConfig, "overlap", 1, "bool"),
        (ZeroConfig, "stage", True, "0 or 1 or 2 or 3"),
        (ZeroConfig, "precision", None, "'fp32' or 'bf16' or 'fp16'"),
        (ZeroConfig, "micro_batches", 2.5, "int or None"),
        (ZeroConfig, "micro_batches", "4", "int or None"),
        (ZeroConfig, "prefetch_units", True, "int"),
        (ZeroConfig, "staging_bytes", 5000.5, "int"),
        (ZeroConfig, "clip_norm", "1", "float or None"),
        (ZeroConfig, "optimizer", "adamw", "AdamWConfig or AdamConfig or SGDConfig"),
        (ZeroConfig, "schedule", "cosine", "ScheduleConfig"),
        (ZeroConfig, "groups", [1], "a tuple of ParameterGroup"),
        (ZeroConfig, "groups", (1,), "a tuple of ParameterGroup"),
        (AdamWConfig, "lr", "x", "float"),
        (AdamWConfig, "lr", True, "float"),
        (AdamWConfig, "betas", 0.9, "a tuple of float"),
        (AdamWConfig, "betas", ("0.9", 0.99), "a tuple of float"),
        (SGDConfig, "nesterov", "no", "bool"),
        (ScheduleConfig, "warmup_steps", 1.5, "int"),
        (LossScale, "growth_interval", 10.5, "int"),
    ],
)
def test_a_setting_of_another_type_is_refused_by_name(kind: Any, name: str, value: Any, wanted: str) -> None:
    with pytest.raises(ConfigError) as caught:
        kind(**{name: value})
    said = f"{name} {value!r} of {kind.__name__} must be {wanted}, not {type(value).__name__}"
    assert str(caught.value) == said


def test_an_integer_is_fine_where_a_float_is_wanted() -> None:
    config = ZeroConfig(clip_norm=1, optimizer=AdamWConfig(lr=1, betas=(0, 0.99)), collective_timeout_s=5)
    assert (config.clip_norm, config.optimizer.lr) == (1, 1)
    group = ParameterGroup(name="norms", patterns=("*.norm.*",), lr=1, betas=None)
    assert ZeroConfig(groups=(group,)).groups == (group,)
