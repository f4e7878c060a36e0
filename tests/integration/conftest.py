"""What the integration tests share."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.jobs import Job, wait_for_cpus

CPUS = 8
"""Logical CPUs of the local Ray cluster; the machine may have fewer."""


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[int]:
    """A local Ray cluster for tests that drive actors themselves; its number of CPUs."""
    import ray

    from workers import naming

    root = str(Path(__file__).parents[2])
    before = os.environ.get("PYTHONPATH")
    # Workers import the tests' own models; they inherit the environment of the cluster's processes.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (root, before)))
    try:
        ray.init(
            address="local",
            num_cpus=CPUS,
            include_dashboard=False,
            namespace=naming.RAY_NAMESPACE,
            log_to_driver=False,
            object_store_memory=100 << 20,
        )
        yield CPUS
    finally:
        ray.shutdown()
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


@pytest.fixture
def job(ray_cluster: int, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    name = re.sub(r"[^a-z0-9]+", "-", request.node.name.removeprefix("test_"))[:50].strip("-")
    job = Job(name, tmp_path)
    yield job
    job.kill()
    wait_for_cpus(ray_cluster)
