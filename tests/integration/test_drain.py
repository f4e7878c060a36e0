"""Nodes that are drained under a running job, on a real Ray of three nodes on this machine."""

import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from service.cluster import NodeView
from service.errors import ClusterUnavailable
from service.ray_cluster import RayCluster
from service.settings import Settings, child_environment
from tests.integration.nodes import another_node
from workers.spec import JobSpec

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

SPARE_CPUS = 4
"""Of the two nodes beside the head, which has one and so no place for a worker of two."""

CONTROLLER = """
import sys, json, ray
from workers.controller import JobController
from workers.naming import RAY_NAMESPACE, controller_name
address, job_id, storage, spec = sys.argv[1:]
ray.init(address=address, namespace=RAY_NAMESPACE, log_to_driver=False, configure_logging=False)
actor = ray.remote(JobController).options(
    name=controller_name(job_id), lifetime="detached", num_cpus=0, max_restarts=-1, max_concurrency=4,
    resources={"spare": 0.001},
).remote(job_id, json.loads(spec), storage, 1, 2)
ray.get(actor.status.remote(), timeout=120)
"""
"""Starts a job's controller on one of the nodes beside the head."""


class Scene:
    """A cluster of a head and two nodes, and one job on it."""

    def __init__(self, cluster: RayCluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.job_id = f"drain-{secrets.token_hex(4)}"

    def spares(self) -> list[NodeView]:
        return [node for node in self.cluster.view().alive if not node.head]

    def wait(self, found: Callable[[], Any], what: str, timeout_s: float = 180) -> Any:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                if answer := found():
                    return answer
            except ClusterUnavailable:
                pass  # the controller is being started again
            time.sleep(0.1)
        told = [(e["kind"], e["data"]) for e in self.entries() if e["type"] == "event"]
        raise AssertionError(f"{what} did not come within {timeout_s} s; events: {told}")

    def entries(self) -> list[dict[str, Any]]:
        return self.cluster.read(self.job_id, after=0, limit=10_000)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [e["data"] for e in self.entries() if e["type"] == "event" and e["kind"] == kind]

    def reports(self) -> list[dict[str, Any]]:
        return [e for e in self.entries() if e["type"] == "report"]

    def nodes(self) -> set[str | None]:
        """Where the job's workers are."""
        return {place.node for place in self.cluster.status(self.job_id).workers}

    def trains(self, steps: int) -> None:
        """Wait until the job has done so many steps more."""
        at = self.cluster.status(self.job_id).step
        self.wait(lambda: self.cluster.status(self.job_id).step >= at + steps, f"{steps} steps from {at}")

    def gone(self, node_id: str) -> bool:
        return not next(node.alive for node in self.cluster.view().nodes if node.id == node_id)

    def assert_no_step_lost(self) -> None:
        done = [(report["step"], report["rank"]) for report in self.reports()]
        assert len(done) == len(set(done)), "no step was done twice"
        steps = sorted({step for step, _ in done})
        assert steps == list(range(1, steps[-1] + 1)), "and none was left out"


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    cluster = RayCluster(Settings(data_dir=tmp_path, local_cpus=1))
    assert cluster.local is not None
    scene = Scene(cluster, tmp_path)
    try:
        cluster.connect()
        with ExitStack() as nodes:
            for _ in range(2):
                nodes.enter_context(another_node(cluster, tmp_path, cpus=SPARE_CPUS))
            yield scene
            cluster.release(scene.job_id)
    finally:
        cluster.close()
        cluster.local.stop()


def spec_of(**changes: Any) -> JobSpec:
    fields = {
        "data": {"kind": "synthetic", "samples": 64},
        "model": {
            "kind": "custom",
            "factory": "tests.integration.paced_model:Paced",
            "arguments": {"pause_s": 0.05},
        },
        "steps": 100_000,
        "global_batch": 4,
        "micro_batch": 1,
        "sequence_length": 8,
        "workers": {"wanted": 2},
        "resources": {"cpus": 2},
        "checkpoints": {"every_steps": None},
    }
    return JobSpec.model_validate(fields | changes)


def test_a_job_moves_off_a_drained_node_and_loses_no_step(scene: Scene) -> None:
    scene.cluster.start_job(scene.job_id, spec_of(), attempt=1, wanted=2)
    scene.wait(lambda: scene.cluster.status(scene.job_id).step >= 3, "three steps")
    drained = next(iter(scene.nodes()))
    assert drained is not None
    (other,) = [node.id for node in scene.spares() if node.id != drained]
    scene.cluster.drain(drained, why="test", deadline=time.time() + 300)
    scene.wait(lambda: scene.nodes() == {other}, "all workers on the other node")
    scene.trains(3)
    (told, *_) = scene.events("drain")
    assert told["node"] == drained
    assert told["workers"]
    change = scene.events("resize")[0]
    assert (change["old_workers"], change["new_workers"], change["cause"]) == (2, 2, "drain")
    assert (change["nodes"], change["steps_lost"]) == ([drained], 0)
    scene.assert_no_step_lost()
    assert scene.events("worker_lost") == []
    scene.wait(lambda: scene.gone(drained), "the node's own end, as nothing is left on it")

    # Now there is no other node with room: the job's minimum keeps it where it is, which is told.
    scene.cluster.drain(other, why="test", deadline=time.time() + 4)
    said = scene.wait(
        lambda: [told["said"] for told in scene.events("drain") if "cannot be moved" in told["said"]],
        "that it cannot be moved",
    )
    assert "fewer than the job's minimum of 1" in said[-1]
    scene.trains(3)
    assert scene.nodes() == {other}


def test_a_job_shrinks_off_a_node_where_the_others_lack_room(scene: Scene) -> None:
    spec = spec_of(workers={"wanted": 2, "min": 1}, resources={"cpus": 3})
    scene.cluster.start_job(scene.job_id, spec, attempt=1, wanted=2)
    scene.wait(lambda: scene.cluster.status(scene.job_id).step >= 3, "three steps")
    first, second = sorted(node for node in scene.nodes() if node)
    scene.cluster.drain(first, why="test", deadline=time.time() + 6)
    scene.wait(lambda: scene.nodes() == {second}, "one worker on the other node")
    scene.trains(3)
    change = scene.events("resize")[-1]
    assert (change["old_workers"], change["new_workers"], change["steps_lost"]) == (2, 1, 0)
    scene.assert_no_step_lost()


def test_the_controller_leaves_a_drained_node_with_the_job_saved(scene: Scene) -> None:
    assert scene.cluster.local is not None
    address = scene.cluster.local.ensure_running()
    spec = spec_of()
    storage = str(scene.folder / "storage")
    subprocess.run(
        [sys.executable, "-c", CONTROLLER, address, scene.job_id, storage, spec.model_dump_json()],
        env=child_environment(scene.cluster.local.environment()),
        check=True,
        timeout=180,
    )
    scene.wait(lambda: scene.cluster.status(scene.job_id).step >= 3, "three steps")
    drained = scene.cluster.status(scene.job_id).node
    (other,) = [node.id for node in scene.spares() if node.id != drained]
    scene.cluster.drain(drained, why="test", deadline=time.time() + 300)
    scene.wait(lambda: scene.gone(drained), "the node's own end, as nothing is left on it")
    scene.wait(lambda: scene.cluster.status(scene.job_id).phase == "running", "the job to run again")
    scene.trains(3)
    assert scene.nodes() == {other}
    assert scene.cluster.status(scene.job_id).node == other
    recovery = scene.events("recovery")[-1]
    assert recovery["cause"] == "the controller was restarted"
    assert recovery["steps_lost"] == 0
    scene.assert_no_step_lost()
    assert any("controller is on node" in told["said"] for told in scene.events("drain"))
