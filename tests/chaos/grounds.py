"""Where chaos takes place: a cluster of hosts with links to cut, or one local Ray where there can be none.

Owns what an action does to processes and links. Knows the job only by the processes it has.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import psutil

from service.local_ray import LocalRay
from tests.multihost.cluster import PATIENCE_S, Cluster, Node, ray_hosts
from tests.multihost.served import Place

HOSTS = 3
CPUS = 2
"""Of each host."""

WORKER, CONTROLLER = "ray::WorkerActor", "ray::JobController"
"""What Ray calls the processes of a job."""


class LocalPlace:
    """One machine, as `elastic-zero serve` uses it when no cluster is named: a `Place` without hosts."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._ray = LocalRay(data_dir)

    @property
    def environment(self) -> dict[str, str]:
        inherited = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        root = str(Path(__file__).parents[2])
        paths = [root, *filter(None, (os.environ.get("PYTHONPATH"),))]
        return inherited | {"PYTHONPATH": os.pathsep.join(paths)}

    @property
    def serving(self) -> Sequence[str]:
        return ("--port", "0", "--local-cpus", str(HOSTS * CPUS))

    def network(self) -> AbstractContextManager[None]:
        return nullcontext()

    def ask(self, program: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", program, self._record["address"]],
            env=self.environment | self._ray.environment(),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def running(self, title: str) -> list[int]:
        with suppress(psutil.NoSuchProcess):
            tree = psutil.Process(self._record["pid"]).children(recursive=True)
            return [process.pid for process in tree if _titled(process, title)]
        return []

    @property
    def _record(self) -> dict[str, Any]:
        record: dict[str, Any] = json.loads((self._data_dir / "ray.json").read_text())
        return record

    def end(self) -> None:
        """End the Ray."""
        self._ray.stop()


def _titled(process: psutil.Process, title: str) -> bool:
    with suppress(psutil.Error):
        return " ".join(process.cmdline()).startswith(title)
    return False


@contextmanager
def hosts() -> Iterator[Cluster]:
    """As many hosts as chaos takes."""
    with ray_hosts([CPUS] * HOSTS) as cluster:
        yield cluster


@contextmanager
def one_machine(data_dir: Path) -> Iterator[LocalPlace]:
    """As many CPUs without hosts."""
    place = LocalPlace(data_dir)
    try:
        yield place
    finally:
        place.end()


def chosen(whom: float, candidates: Sequence[int]) -> int | None:
    """The candidate that a share in [0, 1) means; None where there is none."""
    return candidates[int(whom * len(candidates))] if candidates else None


def kill(place: Place, title: str, whom: float) -> bool:
    """SIGKILL one of the processes of this title; False where there was none."""
    pid = chosen(whom, sorted(place.running(title)))
    if pid is None:
        return False
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return True


def host(cluster: Cluster, whom: float) -> Node:
    """A host other than the head, whose loss is the loss of the cluster."""
    others = cluster.nodes[1:]
    return others[int(whom * len(others))]
