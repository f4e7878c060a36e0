"""What a job says about optimizer, groups, schedule and loss scale, and what the engine makes of it."""

from typing import Any

import pytest
from pydantic import ValidationError

from workers.engine_config import engine_config
from workers.spec import JobSpec
from zero_core.config import AdamConfig, AdamWConfig, LossScale, ParameterGroup, ScheduleConfig, SGDConfig
from zero_core.schedule import rates


def _spec(**fields: Any) -> JobSpec:
    basis = {"data": {"kind": "synthetic"}, "steps": 11, "global_batch": 2, "micro_batch": 1}
    return JobSpec.model_validate(basis | fields)


@pytest.mark.parametrize(
    ("optimizer", "settings", "clip"),
    [
        ({}, AdamWConfig(betas=(0.9, 0.95), weight_decay=0.1), 1.0),
        ({"lr": 0.5}, AdamWConfig(lr=0.5, betas=(0.9, 0.95), weight_decay=0.1), 1.0),
        ({"kind": "adam", "eps": 1e-6}, AdamConfig(betas=(0.9, 0.95), eps=1e-6), 1.0),
        (
            {"kind": "sgd", "momentum": 0.8, "dampening": 0.1, "clip_norm": None},
            SGDConfig(lr=0.01, momentum=0.8, dampening=0.1),
            None,
        ),
        ({"kind": "sgd", "nesterov": True}, SGDConfig(lr=0.01, momentum=0.9, nesterov=True), 1.0),
    ],
)
def test_each_kind_reaches_the_engine(
    optimizer: dict[str, Any], settings: object, clip: float | None
) -> None:
    spec = _spec(optimizer=optimizer)
    config = engine_config(spec)
    assert (config.optimizer, config.clip_norm) == (settings, clip)
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec


def test_groups_schedule_and_loss_scale_reach_the_engine() -> None:
    spec = _spec(
        precision="fp16",
        loss_scale={"initial": 1024.0, "growth_interval": 7},
        schedule={"kind": "linear", "warmup_steps": 2, "final_ratio": 0.2},
        optimizer={
            "lr": 0.5,
            "groups": [
                {"name": "head", "patterns": ["head.*"], "lr": 0.1, "betas": [0.5, 0.6]},
                {"name": "norms", "patterns": ["*norm*"], "lr_factor": 2, "weight_decay": 0},
            ],
        },
    )
    config = engine_config(spec)
    assert config.precision == "fp16"
    assert config.loss_scale == LossScale(initial=1024.0, growth_interval=7)
    assert config.schedule == ScheduleConfig(kind="linear", warmup_steps=2, total_steps=11, final_ratio=0.2)
    assert config.groups == (
        ParameterGroup(name="head", patterns=("head.*",), lr=0.1, betas=(0.5, 0.6)),
        ParameterGroup(name="norms", patterns=("*norm*",), lr_factor=2, weight_decay=0),
    )
    assert rates(config, 10) == pytest.approx({"default": 0.1, "head": 0.02, "norms": 0.2})
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"optimizer": {"kind": "adagrad"}}, "'adamw', 'adam', 'sgd'"),
        ({"optimizer": {"momentum": 0.9}}, "adamw.momentum"),
        ({"optimizer": {"kind": "sgd", "betas": [0.9, 0.9]}}, "sgd.betas"),
        ({"optimizer": {"kind": "sgd", "momentum": 0, "nesterov": True}}, "nesterov needs a momentum"),
        ({"optimizer": {"groups": [{"name": "a", "patterns": [], "momentum": 0.1}]}}, "groups.0.momentum"),
        ({"optimizer": {"groups": [{"name": "a", "patterns": [], "speed": 1}]}}, "groups.0.speed"),
        ({"optimizer": {"groups": [{"name": "default", "patterns": []}]}}, "cannot be called 'default'"),
        ({"optimizer": {"groups": [{"name": "a", "patterns": []}] * 2}}, "different names"),
        ({"optimizer": {"groups": [{"name": "a", "patterns": [], "lr": 1, "lr_factor": 1}]}}, "set one"),
        ({"optimizer": {"kind": "sgd", "groups": [{"name": "a", "patterns": [], "momentum": 0}]}}, "or none"),
        ({"loss_scale": {"initial": 0.5}}, "floor 1.0 <= initial 0.5"),
        ({"loss_scale": {"start": 0.5}}, "loss_scale.start"),
        ({"precision": "fp8"}, "'fp32', 'bf16' or 'fp16'"),
    ],
)
def test_what_cannot_work_is_refused_on_submission(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        _spec(**fields)
    assert message in str(caught.value)
