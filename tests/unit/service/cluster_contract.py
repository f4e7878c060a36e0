"""What every `service.cluster.Cluster` must do. The fake and the one on Ray run the same suite."""

import time
from collections.abc import Callable

import pytest

from service.cluster import Cluster
from service.errors import ControllerGone
from tests.unit.service.makers import wait_until
from workers.reports import log_entry
from workers.spec import JobSpec


class ClusterContract:
    """Subclasses give the fixtures `cluster`, `spec` (2 workers, endless), `job_id`, `timeout_s`.

    And `spare_node`, the id of a node that is not the head and that nothing runs on.
    """

    @pytest.fixture
    def run(self, cluster: Cluster, spec: JobSpec, job_id: str, timeout_s: float) -> Callable[[], None]:
        def start() -> None:
            cluster.start_job(job_id, spec, attempt=1, wanted=2)
            wait_until(lambda: cluster.status(job_id).phase == "running", timeout_s=timeout_s)

        return start

    def test_it_has_a_node_that_takes_work(self, cluster: Cluster) -> None:
        cluster.connect()
        (node, *_) = cluster.view().alive
        assert node.cpus >= node.cpus_free > 0
        assert node.memory_bytes > 0

    def test_a_job_without_a_controller_is_told(self, cluster: Cluster, job_id: str) -> None:
        for call in (
            lambda: cluster.status(job_id),
            lambda: cluster.read(job_id, after=0, limit=10),
            lambda: cluster.command(job_id, {"kind": "cancel", "who": "test"}),
        ):
            with pytest.raises(ControllerGone):
                call()
        cluster.release(job_id)
        assert job_id not in cluster.running_jobs()

    def test_a_job_starts_once_is_read_in_order_and_cancelled(
        self, cluster: Cluster, spec: JobSpec, job_id: str, run: Callable[[], None], timeout_s: float
    ) -> None:
        run()
        assert job_id in cluster.running_jobs()
        cluster.start_job(job_id, spec, attempt=1, wanted=2)
        status = cluster.status(job_id)
        assert (status.attempt, status.world_size, status.wanted) == (1, 2, 2)
        first = cluster.read(job_id, after=0, limit=1)
        rest = cluster.read(job_id, after=1, limit=1000)
        assert [entry["seq"] for entry in first + rest] == list(range(1, 2 + len(rest)))
        kinds = [log_entry.validate_python(entry) for entry in first + rest]
        assert kinds[0].model_dump()["data"]["phase"] == "starting"
        cluster.command(job_id, {"kind": "cancel", "who": "test"})
        wait_until(lambda: cluster.status(job_id).phase == "cancelled", timeout_s=timeout_s)
        status = cluster.status(job_id)
        (last,) = cluster.read(job_id, after=status.last_seq - 1, limit=10)
        assert (last["kind"], last["data"]["phase"], last["data"]["attempt"]) == ("phase", "cancelled", 1)
        assert cluster.read(job_id, after=status.last_seq, limit=10) == []
        wait_until(lambda: all(n.cpus == n.cpus_free for n in cluster.view().alive), timeout_s=timeout_s)
        cluster.release(job_id)
        assert job_id not in cluster.running_jobs()

    def test_the_workers_nodes_are_known(
        self, cluster: Cluster, job_id: str, run: Callable[[], None], timeout_s: float
    ) -> None:
        run()
        nodes = {node.id for node in cluster.view().nodes}

        def known() -> bool:
            return {place.node for place in cluster.status(job_id).workers} <= nodes

        wait_until(known, timeout_s=timeout_s)
        assert [place.rank for place in cluster.status(job_id).workers] == [0, 1]
        assert len({place.worker for place in cluster.status(job_id).workers}) == 2
        cluster.release(job_id)

    def test_a_drained_node_takes_no_more_work(
        self, cluster: Cluster, spare_node: str, timeout_s: float
    ) -> None:
        (head,) = [node for node in cluster.view().nodes if node.head]
        assert head.id != spare_node
        assert {head.id, spare_node} <= {node.id for node in cluster.view().alive}
        deadline = time.time() + 300
        cluster.drain(spare_node, why="test", deadline=deadline)
        wait_until(lambda: spare_node not in {node.id for node in cluster.view().alive}, timeout_s=timeout_s)
        (node,) = [node for node in cluster.view().nodes if node.id == spare_node]
        # With nothing on it, a node may be gone at once.
        assert not node.alive or (node.draining and node.deadline == pytest.approx(deadline, abs=0.01))
        assert head.id in {node.id for node in cluster.view().alive}

    def test_a_resize_changes_the_world_size(
        self, cluster: Cluster, job_id: str, run: Callable[[], None], timeout_s: float
    ) -> None:
        run()
        before = cluster.status(job_id)
        cluster.command(job_id, {"kind": "resize", "workers": 3, "who": "test"})

        def resized() -> bool:
            status = cluster.status(job_id)
            return (status.phase, status.world_size) == ("running", 3)

        wait_until(resized, timeout_s=timeout_s)
        assert cluster.status(job_id).generation > before.generation
        entries = cluster.read(job_id, after=0, limit=10_000)
        (event,) = [entry for entry in entries if entry.get("kind") == "resize"]
        assert (event["data"]["old_workers"], event["data"]["new_workers"]) == (2, 3)
        cluster.release(job_id)

    def test_the_next_attempt_goes_on_with_the_log(
        self, cluster: Cluster, spec: JobSpec, job_id: str, run: Callable[[], None], timeout_s: float
    ) -> None:
        run()
        cluster.command(job_id, {"kind": "pause", "who": "test"})
        wait_until(lambda: cluster.status(job_id).phase == "paused", timeout_s=timeout_s)
        last = cluster.status(job_id)
        # The controller of the first attempt is still there: it is replaced.
        cluster.start_job(job_id, spec, attempt=2, wanted=2)
        wait_until(lambda: cluster.status(job_id).phase == "running", timeout_s=timeout_s)
        status = cluster.status(job_id)
        assert status.attempt == 2
        assert status.generation > last.generation
        entries = cluster.read(job_id, after=last.last_seq, limit=10)
        assert entries[0]["seq"] == last.last_seq + 1
        assert entries[0]["data"]["attempt"] == 2
        cluster.release(job_id)
