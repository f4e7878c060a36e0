"""What the integration tests share."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

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
