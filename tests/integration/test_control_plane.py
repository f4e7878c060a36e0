"""The control plane on a real local Ray: it is restarted, and its whole cluster is lost, while a job runs."""

import json
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
from service.settings import Settings
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
