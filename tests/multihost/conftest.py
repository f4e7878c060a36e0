"""One cluster of three hosts, the service on its head, and a job that nothing happens to."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import namespaces
from tests.multihost.cluster import Cluster, ray_hosts
from tests.multihost.served import Job, Service

CPUS = 2
"""Of each host: as many as a worker takes, so that no two share one."""

STEPS = 100


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    reason = namespaces.refusal()
    if reason:
        pytest.skip(reason)
    with ray_hosts([CPUS] * 3) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def service(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service(cluster, tmp_path_factory.mktemp("shared"))
    service.start()
    yield service
    service.kill()


@pytest.fixture
def submit(service: Service) -> Iterator[Callable[[dict[str, Any]], Job]]:
    """Submits jobs; those that a test leaves behind are cancelled, and their places free again."""
    jobs: list[Job] = []

    def submit(spec: dict[str, Any]) -> Job:
        jobs.append(service.submit(spec))
        return jobs[-1]

    yield submit
    for job in jobs:
        job.end()


@pytest.fixture
def hosts(cluster: Cluster) -> Cluster:
    """The cluster with all of its hosts alive and connected, whatever the test before did to them."""
    cluster.revive(cluster.nodes)
    return cluster


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """Jobs are slow until this file exists: the test gets its time, and the rest runs fast."""
    return tmp_path / "gate"


@pytest.fixture(scope="module")
def undisturbed(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The job on one worker from its first step to its last."""
    gate = tmp_path_factory.mktemp("open") / "gate"
    gate.touch()
    job = service.submit(spec_of(gate, wanted=1))
    job.finish()
    assert {report["world_size"] for report in job.reports()} == {1}
    job.assert_every_sample_once()
    return job


def spec_of(gate: Path, *, wanted: int, pause_s: float = 0.5, **changes: Any) -> dict[str, Any]:
    """A job whose bits do not depend on the number of workers; each of 6 micro-batches has its pause."""
    sizes = {"layers": 1, "hidden": 16, "heads": 2, "sequence_length": 16}
    return {
        "name": "hosts",
        "model": {
            "kind": "custom",
            "factory": "tests.integration.gated_model:GatedGPT",
            "arguments": {"gate": str(gate), "pause_s": pause_s, **sizes},
        },
        "data": {"kind": "synthetic", "samples": 6 * STEPS},
        "steps": STEPS,
        "global_batch": 6,
        "micro_batch": 1,
        "sequence_length": 16,
        "seed": 7,
        "zero": {"stage": 2, "reproducible": True},
        "workers": {"wanted": wanted},
        "resources": {"cpus": CPUS},
        "checkpoints": {"every_steps": 5},
        "sample_ledger": True,
        **changes,
    }
