"""Every example job is a valid specification."""

from pathlib import Path

import pytest
import yaml

from workers.spec import JobSpec

JOBS = sorted((Path(__file__).parents[3] / "examples" / "jobs").glob("*.yaml"))


def test_there_are_some() -> None:
    assert len(JOBS) >= 3


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_it_is_valid_and_named_after_its_file(path: Path) -> None:
    spec = JobSpec.model_validate(yaml.safe_load(path.read_text()))
    assert spec.name == path.stem
