"""Our own Ray head on this machine: started, found again, used, ended exactly. Real processes."""

import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from service.errors import ClusterUnavailable, ControllerGone
from service.local_ray import LocalRay
from service.ray_cluster import RayCluster
from service.settings import Settings
from tests.unit.service.makers import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalRay]:
    local = LocalRay(tmp_path, cpus=2)
    yield local
    local.stop()


def tree(data_dir: Path) -> list[psutil.Process]:
    first = psutil.Process(json.loads((data_dir / "ray.json").read_text())["pid"])
    return [first, *first.children(recursive=True)]


def living(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_a_head_is_started_found_again_by_another_process_and_ended_exactly(
    local: LocalRay, tmp_path: Path
) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        assert not local.running
        address = local.ensure_running()
        token = tmp_path / "ray-token"
        assert stat.S_IMODE(token.stat().st_mode) == 0o600
        processes = tree(tmp_path)
        assert len(processes) > 3
        assert all(os.getsid(p.pid) != os.getsid(0) for p in processes)

        code = (
            "from pathlib import Path; from service.local_ray import LocalRay; import sys;"
            "print(LocalRay(Path(sys.argv[1])).ensure_running())"
        )
        found = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)],
            capture_output=True,
            text=True,
            check=True,
            timeout=240,
        )
        assert found.stdout.strip() == address

        temp_dir = Path(json.loads((tmp_path / "ray.json").read_text())["temp_dir"])
        assert stat.S_IMODE(temp_dir.parent.stat().st_mode) == 0o700
        assert LocalRay(tmp_path).stop()
        assert living(processes) == []
        assert not temp_dir.parent.exists()
        assert not local.running
        assert not local.stop()
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_head_that_was_killed_is_cleared_away_and_replaced(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, local_cpus=2)
    cluster = RayCluster(settings)
    assert cluster.local is not None
    try:
        cluster.connect()
        assert [node.cpus for node in cluster.view().alive] == [2]
        with pytest.raises(ControllerGone):
            cluster.status("nope")
        processes = tree(tmp_path)
        # Only the first of them: the others are orphans that have to be found by their mark.
        processes[0].kill()
        psutil.wait_procs(processes[:1], timeout=10)

        def connected() -> bool:
            try:
                cluster.connect()
            except ClusterUnavailable:
                return False
            return bool(cluster.view().alive)

        wait_until(connected, timeout_s=240)
        assert living(processes) == []
        assert tree(tmp_path)[0].pid != processes[0].pid
    finally:
        cluster.close()
        cluster.local.stop()


def test_a_service_whose_driver_process_dies_connects_again(tmp_path: Path) -> None:
    cluster = RayCluster(Settings(data_dir=tmp_path, local_cpus=1))
    assert cluster.local is not None
    try:
        cluster.connect()
        children = living(psutil.Process().children())
        (driver,) = [p for p in children if "service.ray_driver" in p.cmdline()]
        driver.kill()
        wait_until(lambda: not cluster._driver or not cluster._driver.alive)
        with pytest.raises(ClusterUnavailable):
            cluster.view()
        cluster.connect()
        assert cluster.view().alive
        cluster.close()
        with pytest.raises(ClusterUnavailable, match="not connected"):
            cluster.view()
    finally:
        cluster.close()
        cluster.local.stop()


def test_a_head_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = LocalRay(tmp_path)
    monkeypatch.setattr(
        local, "_start_command", lambda _: [sys.executable, "-c", "raise SystemExit('no such thing')"]
    )
    with pytest.raises(ClusterUnavailable, match="no such thing"):
        local.ensure_running()
    assert not (tmp_path / "ray.json").exists()


def test_a_damaged_record_is_told_and_nothing_is_removed(tmp_path: Path) -> None:
    (tmp_path / "ray.json").write_text("{")
    with pytest.raises(ClusterUnavailable, match=r"ray\.json"):
        LocalRay(tmp_path).stop()
    other = tmp_path / "other"
    (other / "r").mkdir(parents=True)
    record = {"pid": os.getpid(), "mark": "none", "temp_dir": str(other / "r"), "address": ""}
    (tmp_path / "ray.json").write_text(json.dumps(record))
    assert LocalRay(tmp_path).stop()
    assert other.exists()


def test_a_folder_for_sockets_that_someone_else_made_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from service import local_ray

    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/tmp")
    name = local_ray._folder_name(tmp_path)
    planted = Path("/tmp") / name
    planted.mkdir(mode=0o755)
    try:
        with pytest.raises(ClusterUnavailable, match="mode 0700"):
            LocalRay(tmp_path).ensure_running()
    finally:
        planted.rmdir()
