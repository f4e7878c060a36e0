"""The fake keeps the contract."""

import pytest

from tests.unit.service.cluster_contract import ClusterContract
from tests.unit.service.makers import spec_of
from workers.spec import JobSpec


class TestFakeCluster(ClusterContract):
    @pytest.fixture
    def spec(self) -> JobSpec:
        return spec_of()

    @pytest.fixture
    def job_id(self) -> str:
        return "job-1"

    @pytest.fixture
    def timeout_s(self) -> float:
        return 1.0
