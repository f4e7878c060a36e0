"""What the service's unit tests share: a real SQLite file, a cluster in memory, parts put together."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from service.changes import Changes
from service.collector import Collector
from service.control_plane import ControlPlane
from service.fake_cluster import FakeCluster
from service.jobs import Job, submitted
from service.keeper import Keeper
from service.settings import Settings
from service.store import Store
from tests.unit.service.makers import NOW, spec_of
from workers.spec import JobSpec


@dataclass
class House:
    """Store, collector and keeper over a fake cluster, without threads: `round` does it all once."""

    store: Store
    cluster: FakeCluster
    storage: Path
    changes: Changes = field(default_factory=Changes)
    max_controller_losses: int = 2
    stopped: int = 0

    def __post_init__(self) -> None:
        self.collector = Collector(
            self.store,
            self.cluster,
            self.changes,
            storage=self.storage,
            clock=lambda: NOW,
            on_stopped=self._stopped,
        )
        self.keeper = Keeper(
            self.store,
            self.cluster,
            self.collector,
            self.changes,
            clock=lambda: NOW,
            max_controller_losses=self.max_controller_losses,
            status_interval_s=0.0,
        )

    def submit(self, job_id: str = "job-1", spec: JobSpec | None = None) -> Job:
        return self.store.create(submitted(job_id, spec or spec_of(), who="ann", now=NOW))[0]

    def collect(self, job_id: str = "job-1") -> Job:
        return self.collector.drain(self.store.get(job_id))

    def running(self, job_id: str = "job-1", spec: JobSpec | None = None) -> Job:
        self.submit(job_id, spec)
        self.keeper.round()
        return self.collect(job_id)

    def _stopped(self) -> None:
        self.stopped += 1


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'test.db'}"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    store = Store(url)
    yield store
    store.close()


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


@pytest.fixture
def house(store: Store, cluster: FakeCluster, tmp_path: Path) -> Iterator[House]:
    house = House(store, cluster, tmp_path)
    yield house
    house.collector.close()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path, poll_interval_s=0.01, reconcile_interval_s=0.05)


@pytest.fixture
def plane(settings: Settings, store: Store, cluster: FakeCluster) -> Iterator[ControlPlane]:
    plane = ControlPlane(settings, store, cluster)
    plane.start()
    yield plane
    plane.stop()
