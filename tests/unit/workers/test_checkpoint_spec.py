"""What a job says about its checkpoints and about what it starts from."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from workers.naming import JobFolder
from workers.spec import JobSpec


def _spec(**changes: Any) -> JobSpec:
    fields = {"data": {"kind": "synthetic"}, "steps": 5, "global_batch": 4, "micro_batch": 2}
    return JobSpec.model_validate(fields | changes)


def test_what_a_job_that_says_nothing_gets() -> None:
    spec = _spec()
    assert spec.checkpoints.model_dump() == {
        "every_steps": 100,
        "keep": 3,
        "keep_every": None,
        "asynchronous": True,
        "location": None,
    }
    assert spec.start_from is None


@pytest.mark.parametrize("place", ["/data/checkpoints", "s3://bucket/folder", "memory://x", "/"])
def test_places_that_are_taken(place: str) -> None:
    assert _spec(checkpoints={"location": place}).checkpoints.location == place
    assert _spec(start_from={"checkpoint": place}).start_from is not None
    assert _spec(start_from={"safetensors": place}).start_from is not None


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("checkpoints", "absolute path or an address"),
        ("~/checkpoints", "absolute path or an address"),
        ("", "at least 1 character"),
        ("/a/../../etc", "must not lead upwards"),
        ("s3://bucket/../other", "must not lead upwards"),
        ("s3://", "is no address"),
        ("S3 x://b/c", "is no address"),
        ("s3://key:secret@bucket/folder", "must not hold credentials"),
        ("/a\nb", "cannot be printed"),
        (" /a", "spaces at its ends"),
        (5, "valid string"),
    ],
)
def test_places_that_are_refused(place: Any, said: str) -> None:
    for changes in (
        {"checkpoints": {"location": place}},
        {"start_from": {"checkpoint": place}},
        {"start_from": {"safetensors": place}},
    ):
        with pytest.raises(ValidationError, match=said):
            _spec(**changes)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "exactly one of job, checkpoint and safetensors; given: none"),
        ({"job": "abc", "checkpoint": "/a"}, "given: job and checkpoint"),
        ({"checkpoint": "/a", "step": 5}, "step 5 means something with job only"),
        ({"job": "abc", "step": 0}, "greater than 0"),
        ({"safetensors": "/a", "cast": True}, "cast means something with checkpoints only"),
        ({"job": "../abc"}, "match pattern"),
        ({"job": "abc", "stepp": 5}, "Extra inputs"),
    ],
)
def test_beginnings_that_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        _spec(start_from=fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"keep": 0}, "greater than 0"),
        ({"keep_every": 0}, "greater than 0"),
        ({"asynchronous": "perhaps"}, "valid boolean"),
        ({"asynchron": True}, "Extra inputs"),
    ],
)
def test_checkpoints_that_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        _spec(checkpoints=fields)


def test_each_job_has_a_folder_of_its_own_in_a_shared_place() -> None:
    folder = JobFolder(Path("/storage"), "abc")
    assert folder.checkpoint_root(None) == Path("/storage/jobs/abc/checkpoints")
    assert folder.checkpoint_root("/shared/") == Path("/shared/abc")
    assert folder.checkpoint_root("s3://bucket/x/") == "s3://bucket/x/abc"
    assert folder.export(50, "bf16") == Path("/storage/jobs/abc/exports/step-00000050-bf16")
