"""More Ray nodes on this machine, of a cluster that a test has started itself."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from service.ray_cluster import RayCluster
from service.settings import child_environment

_JOIN_TIMEOUT_S = 120.0
_ATTEMPTS = 3
"""Ray gives up a start by itself where the machine is too busy."""


@contextmanager
def another_node(cluster: RayCluster, folder: Path, *, cpus: int) -> Iterator[str]:
    """A node joins the cluster, and is ended; yields its id. Its output goes to a file in `folder`.

    It has the resource `spare`, by which something can be put on such a node and not on the head.
    """
    before = {node.id for node in cluster.view().nodes}
    log = folder / f"node-{len(before)}.log"
    for attempt in range(_ATTEMPTS):
        node = _start(cluster, log, cpus)
        try:
            joined = _joined(cluster, node, before)
            if joined is None and attempt + 1 < _ATTEMPTS:
                continue
            assert joined is not None, f"no node joined: {log.read_text()[-2000:]}"
            yield joined
            return
        finally:
            _end(node)


def _start(cluster: RayCluster, log: Path, cpus: int) -> "subprocess.Popen[bytes]":
    assert cluster.local is not None
    address = cluster.local.ensure_running()
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--address={address}"]
    command += [
        f"--num-cpus={cpus}",
        "--object-store-memory=100000000",
        "--disable-usage-stats",
        '--resources={"spare": 1}',
    ]
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            env=child_environment(cluster.local.environment()),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def _joined(cluster: RayCluster, node: "subprocess.Popen[bytes]", before: set[str]) -> str | None:
    deadline = time.monotonic() + _JOIN_TIMEOUT_S
    while time.monotonic() < deadline and node.poll() is None:
        new = {one.id for one in cluster.view().alive} - before
        if new:
            return new.pop()
        time.sleep(0.1)
    return None


def _end(node: "subprocess.Popen[bytes]") -> None:
    node.terminate()
    try:
        node.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(node.pid, signal.SIGKILL)
        node.wait(20)
