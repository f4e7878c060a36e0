"""The control plane on a real local Ray: restarted, without its cluster, and asked for more than there is."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from service.control_plane import ControlPlane
from service.jobs import JobState
from service.local_ray import LocalRay
from service.ray_cluster import RayCluster
from service.settings import Settings, child_environment
from service.store import Store
from tests.unit.service.makers import wait_until
from workers.naming import JobFolder
from workers.spec import JobSpec

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

SPEC = JobSpec.model_validate(
    {
        "data": {"kind": "synthetic", "samples": 64},
        "model": {"kind": "gpt", "layers": 1, "hidden": 16, "heads": 2},
        "steps": 1_000_000,
        "global_batch": 4,
        "micro_batch": 1,
        "sequence_length": 8,
        "workers": {"wanted": 2},
        "checkpoints": {"every_steps": 10},
    }
)


_DEMAND = """
import json, sys, ray
from ray.autoscaler.v2.sdk import get_cluster_resource_state
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
state = get_cluster_resource_state(ray._private.worker.global_worker.gcs_client)
gangs = state.pending_gang_resource_requests
print(json.dumps([dict(one.resources_bundle) for gang in gangs for one in gang.requests]))
"""
"""Tells what an autoscaler is told of placement groups without a place."""


@contextmanager
def control_plane(settings: Settings) -> Iterator[ControlPlane]:
    """A control plane as `serve` makes it; the local Ray is left running."""
    store, cluster = Store(settings.store_url), RayCluster(settings)
    plane = ControlPlane(settings, store, cluster)
    plane.start()
    try:
        yield plane
    finally:
        plane.stop()
        cluster.close()
        store.close()


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[Settings]:
    settings = Settings(data_dir=tmp_path, local_cpus=4)
    yield settings
    LocalRay(tmp_path).stop()


def kill_head(data_dir: Path) -> None:
    first = psutil.Process(json.loads((data_dir / "ray.json").read_text())["pid"])
    for process in [first, *first.children(recursive=True)]:
        process.kill()


def test_a_job_outlives_the_control_plane_and_recovers_from_the_loss_of_its_cluster(
    settings: Settings,
) -> None:
    with control_plane(settings) as plane:
        job_id = plane.submit(SPEC, who="test").id
        wait_until(lambda: plane.get(job_id).step > 0, timeout_s=240)
        seen = plane.get(job_id).step

    with control_plane(settings) as plane:
        wait_until(lambda: plane.get(job_id).step > seen, timeout_s=240)
        assert plane.get(job_id).attempt == 1
        wait_until(lambda: plane.checkpoints.listed(job_id), timeout_s=240)

        kill_head(settings.data_dir)
        wait_until(lambda: plane.get(job_id).attempt == 2, timeout_s=240)
        saved = plane.checkpoints.listed(job_id)[-1].step
        assert saved >= 10
        wait_until(lambda: plane.get(job_id).state is JobState.RUNNING, timeout_s=240)
        generation = plane.get(job_id).generation
        wait_until(lambda: plane.latest_ranks(job_id)[0].generation == generation, timeout_s=240)

        started = time.monotonic()
        plane.cancel(job_id, who="test")
        wait_until(lambda: plane.get(job_id).state is JobState.CANCELLED, timeout_s=240)
        assert time.monotonic() - started < 60
        assert all(use.node.cpus_free == use.node.cpus for use in plane.nodes())

        stored, after = [], 0
        while page := plane.timeline(job_id, after=after, limit=1000):
            stored += page
            after = page[-1].id
        log = JobFolder(settings.storage_dir, job_id).log.read_text().splitlines()
        assert [entry.seq for entry in stored if entry.seq] == [json.loads(line)["seq"] for line in log]
        again = [e.step for e in stored if e.kind == "report" and e.generation == generation]
        assert min(again) == saved + 1  # type: ignore[type-var]


def test_where_the_cluster_grows_an_autoscaler_sees_what_a_resize_lacks(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, local_cpus=4, cluster_grows=True)
    changes = {"resources": {"cpus": 2}, "elastic": {"capacity_wait_s": 20}}
    spec = JobSpec.model_validate({**SPEC.model_dump(exclude_unset=True), **changes})
    try:
        with control_plane(settings) as plane:
            job_id = plane.submit(spec, who="test").id
            wait_until(lambda: plane.get(job_id).step > 0, timeout_s=240)
            assert plane.resize(job_id, 4, who="test").wanted_workers == 4
            wait_until(lambda: _demand(tmp_path) == [{"CPU": 2.0}] * 2, timeout_s=20)

            wait_until(lambda: plane.get(job_id).wanted_workers == 2, timeout_s=60)
            refused = next(
                entry.body
                for entry in plane.timeline(job_id, after=0, limit=1000, kinds="event")
                if entry.kind == "resize_refused"
            )
            assert refused["missing"] == {"CPU": 4.0}
            assert "missing: 4 CPU" in refused["reason"]
            assert _demand(tmp_path) == []
            job = plane.get(job_id)
            wait_until(lambda: plane.get(job_id).step > job.step, timeout_s=60)
            assert (job.state, job.workers, job.generation) == (JobState.RUNNING, 2, 1)

            larger = plane.submit(spec.model_copy(update={"name": "larger"}), who="test").id
            wait_until(lambda: plane.get(larger).state is JobState.STARTING, timeout_s=60)
            wait_until(lambda: _demand(tmp_path) == [{"CPU": 2.0}] * 2, timeout_s=60)
            for each in (larger, job_id):
                plane.cancel(each, who="test")
                wait_until(lambda each=each: plane.get(each).state is JobState.CANCELLED, timeout_s=60)
    finally:
        LocalRay(tmp_path).stop()


def _demand(data_dir: Path) -> list[dict[str, float]]:
    """Bundles without a place, as Ray's autoscaler hears of them."""
    address = json.loads((data_dir / "ray.json").read_text())["address"]
    environment = child_environment(LocalRay(data_dir).environment())
    done = subprocess.run(
        [sys.executable, "-c", _DEMAND, address],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found: list[dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return found
