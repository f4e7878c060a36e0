"""A specification means what it says: values of other types are refused, and what the engine would refuse."""

from typing import Any

import pytest
from pydantic import ValidationError

from workers.spec import JobSpec

_LEAST: dict[str, Any] = {
    "data": {"kind": "synthetic"},
    "steps": 4,
    "global_batch": 4,
    "micro_batch": 1,
}


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("workers", "wanted", True),
        ("workers", "wanted", "2"),
        ("workers", "wanted", 2.0),
        ("zero", "reproducible", "no"),
        ("zero", "reproducible", 1),
        ("zero", "stage", True),
        ("elastic", "replicas", True),
        ("schedule", "warmup_steps", 1.0),
        ("optimizer", "lr", "0.1"),
        ("checkpoints", "asynchronous", "yes"),
    ],
)
def test_a_value_of_another_type_is_refused(section: str, field: str, value: object) -> None:
    with pytest.raises(ValidationError) as caught:
        JobSpec.model_validate(_LEAST | {section: {field: value}})
    assert field in str(caught.value)


@pytest.mark.parametrize(("field", "value"), [("steps", 1e3), ("steps", 10**30), ("global_batch", 10**30)])
def test_counts_are_integers_that_json_can_carry(field: str, value: object) -> None:
    with pytest.raises(ValidationError, match=field):
        JobSpec.model_validate(_LEAST | {field: value})


def test_what_json_has_no_type_for_is_taken_as_json_writes_it() -> None:
    groups = [{"name": "bias", "patterns": ["*.bias"], "betas": [0.8, 0.9]}]
    spec = JobSpec.model_validate(
        _LEAST | {"precision": "bf16", "optimizer": {"lr": 1, "betas": [0.5, 0.75], "groups": groups}}
    )
    assert JobSpec.model_validate(spec.model_dump(mode="json")) == spec
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize("staging", [1, 4095])
def test_what_the_engine_refuses_is_refused_as_the_job_is_read(staging: int) -> None:
    with pytest.raises(ValidationError, match="staging_bytes"):
        JobSpec.model_validate(_LEAST | {"zero": {"staging_bytes": staging}})
    with pytest.raises(ValidationError, match="keep_gathered_bytes"):
        JobSpec.model_validate(_LEAST | {"zero": {"stage": 2, "keep_gathered_bytes": 1 << 20}})
