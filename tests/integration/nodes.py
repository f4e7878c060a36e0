"""A second Ray node on this machine, of a cluster that a test has started itself."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from service.settings import child_environment


@contextmanager
def second_node(address: str, environment: Mapping[str, str], *, cpus: int) -> Iterator[None]:
    """A node joins the cluster at `address`, and is ended."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--address={address}"]
    command += [f"--num-cpus={cpus}", "--object-store-memory=100000000", "--disable-usage-stats"]
    node = subprocess.Popen(
        command,
        env=child_environment(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        node.terminate()
        try:
            node.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(node.pid, 9)
            node.wait(20)
