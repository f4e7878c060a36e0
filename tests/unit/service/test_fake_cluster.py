"""The fake keeps the contract."""

import pytest

from service.fake_cluster import FakeCluster
from tests.unit.service.cluster_contract import ClusterContract
from tests.unit.service.makers import spec_of
from workers.spec import JobSpec


class TestFakeCluster(ClusterContract):
    @pytest.fixture
    def cluster(self) -> FakeCluster:
        return FakeCluster(nodes=2)

    @pytest.fixture
    def spare_node(self) -> str:
        return "node-1"

    @pytest.fixture
    def spec(self) -> JobSpec:
        return spec_of()

    @pytest.fixture
    def job_id(self) -> str:
        return "job-1"

    @pytest.fixture
    def timeout_s(self) -> float:
        return 1.0


def test_a_job_moves_off_a_drained_node_where_there_is_room() -> None:
    cluster = FakeCluster(cpus=2, nodes=3)
    cluster.start_job("job-1", spec_of(), attempt=1, wanted=3)
    assert [place.node for place in cluster.status("job-1").workers] == ["node-0", "node-0", "node-1"]
    cluster.drain("node-1", why="test", deadline=None)
    assert [place.node for place in cluster.status("job-1").workers] == ["node-0", "node-0", "node-2"]
    cluster.drain("node-2", why="test", deadline=5.0)
    assert [place.node for place in cluster.status("job-1").workers] == ["node-0", "node-0", "node-2"]
    events = [entry for entry in cluster.log_of("job-1") if entry["kind"] in ("drain", "resize")]
    assert [event["kind"] for event in events] == ["drain", "resize", "drain", "drain"]
    assert "cannot be moved" in events[-1]["data"]["said"]
