"""The contract of the seam, on a real local Ray with real controllers and workers."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.ray_cluster import RayCluster
from service.settings import Settings
from tests.integration.nodes import another_node
from tests.unit.service.cluster_contract import ClusterContract
from workers.spec import JobSpec

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    cluster = RayCluster(Settings(data_dir=tmp_path_factory.mktemp("contract"), local_cpus=4))
    assert cluster.local is not None
    try:
        cluster.connect()
        yield cluster
    finally:
        cluster.close()
        cluster.local.stop()


class TestRayCluster(ClusterContract):
    @pytest.fixture
    def spare_node(self, cluster: RayCluster, tmp_path: Path) -> Iterator[str]:
        with another_node(cluster, tmp_path, cpus=1) as node_id:
            yield node_id

    @pytest.fixture
    def spec(self) -> JobSpec:
        return JobSpec.model_validate(
            {
                "data": {"kind": "synthetic", "samples": 64},
                "model": {"kind": "gpt", "layers": 1, "hidden": 16, "heads": 2},
                "steps": 1_000_000,
                "global_batch": 4,
                "micro_batch": 1,
                "sequence_length": 8,
                "workers": {"wanted": 2},
                "checkpoints": {"every_steps": None},
            }
        )

    @pytest.fixture
    def job_id(self) -> str:
        return f"contract-{secrets.token_hex(4)}"

    @pytest.fixture
    def timeout_s(self) -> float:
        return 240.0
