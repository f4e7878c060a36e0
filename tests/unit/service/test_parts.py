"""The small parts: imports, settings, errors, loops, and what a stuck job does to the others."""

import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from service.errors import ClusterUnavailable, Conflict, ControllerGone, NotFound
from service.journal import logger
from service.loops import Loop
from service.settings import Settings, child_environment
from tests.unit.service.conftest import House
from tests.unit.service.makers import spec_of, wait_until


def test_importing_the_service_loads_neither_ray_nor_torch() -> None:
    code = (
        "import sys, service.control_plane, service.ray_cluster, service.local_ray, service.fake_cluster;"
        "print([name for name in ('ray', 'torch', 'fastapi') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ELASTIC_ZERO_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("ELASTIC_ZERO_LOCAL_CPUS", "3")
    monkeypatch.setenv("ELASTIC_ZERO_CLUSTER_GROWS", "true")
    settings = Settings()
    assert settings.local_cpus == 3
    assert settings.cluster_grows
    assert settings.store_url == f"sqlite:///{tmp_path}/elastic-zero.db"
    assert settings.storage_dir == tmp_path
    with pytest.raises(ValidationError):
        Settings(port=70_000)


def test_children_find_our_packages_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    home, rest = child_environment({"A": "b"})["PYTHONPATH"].split(":")
    assert (Path(home) / "workers" / "spec.py").exists()
    assert rest == "/somewhere"


@pytest.mark.parametrize("kind", [NotFound, Conflict, ControllerGone])
def test_errors_survive_pickling(kind: Any) -> None:
    error = kind("what", code="some_code", details={"a": 1})
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.message, again.code, again.details) == (kind, "what", "some_code", {"a": 1})
    assert str(again) == "what"


def test_a_loop_survives_its_errors_and_tells_them() -> None:
    rounds: list[int] = []

    def action() -> None:
        rounds.append(len(rounds))
        if len(rounds) < 3:
            raise ClusterUnavailable("away")

    loop = Loop("test", action, interval_s=0.01)
    assert loop.trouble == "not running"
    loop.start()
    wait_until(lambda: len(rounds) > 4)
    assert loop.trouble is None
    loop.stop()
    assert loop.trouble == "not running"


def test_a_kick_begins_the_next_round_at_once() -> None:
    rounds = threading.Semaphore(0)
    loop = Loop("test", rounds.release, interval_s=60)
    loop.start()
    assert rounds.acquire(timeout=5)
    loop.kick()
    assert rounds.acquire(timeout=5)
    loop.stop()


def test_a_job_that_hangs_does_not_hold_up_the_others(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    for job_id in ("job-1", "job-2"):
        house.submit(job_id, spec_of(workers={"wanted": 1}))
    house.keeper.round()
    read, hang = house.cluster.read, threading.Event()

    def slow(job_id: str, **arguments: Any) -> list[dict[str, Any]]:
        if job_id == "job-1":
            hang.wait(10)
            raise ClusterUnavailable("no answer")
        return read(job_id, **arguments)

    monkeypatch.setattr(house.cluster, "read", slow)
    house.cluster.train("job-2", 3)
    house.collector.visit_all()
    wait_until(lambda: house.store.get("job-2").step == 3)
    house.collector.visit_all()
    assert house.store.get("job-1").cursor == 0
    hang.set()
    monkeypatch.undo()

    def caught_up() -> bool:
        house.collector.visit_all()
        return house.store.get("job-1").cursor > 0

    wait_until(caught_up)


def test_log_lines_are_structured_and_go_through_logging(caplog: pytest.LogCaptureFixture) -> None:
    log = logger("service.test")
    caplog.set_level("INFO")
    log.debug("not shown")
    log.info("job submitted", job="job-1", name="100 %s percent")
    try:
        raise ValueError("what")
    except ValueError:
        log.error("it failed", exc_info=True)
    assert [record.getMessage() for record in caplog.records] == [
        'job submitted job=job-1 name="100 %s percent"',
        "it failed",
    ]
    assert "ValueError: what" in caplog.text
