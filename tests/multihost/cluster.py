"""A Ray cluster of several hosts on this machine: each host a network namespace with a real Ray node in it.

Owns the nodes' processes, their folders and what becomes of the wires: a node is killed, its link is cut,
healed or delayed. The hosts share the file system, which is their shared storage, and the memory; they reach
each other only over their links, so ranks on two of them exchange over the network. Everything is ended by
process id, found by the namespace it runs in. Knows nothing of jobs: see `tests.multihost.served`.

Needs root and `ip`; `tests.distributed.namespaces.refusal` says why it cannot be had.
"""

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.distributed.namespaces import Host, Switch, inside, processes, switched_hosts
from tests.multihost import delay_line

PATIENCE_S = 240.0
"""Longest wait for anything: a machine with other work to do is slow, and only a hang is to fail."""

PORT = 6379
_POLL_S = 0.05
_OBJECT_STORE_BYTES = 80 << 20
_MEMORY_BYTES = 4 << 30
"""What a node says it has to give; nothing is held to it."""
_ROOT = Path(__file__).parents[2]

HEAD_MEMORY_BYTES = 1 << 30
"""What the head says it has to give: a worker that wants more is placed on another host."""

HEALTH_CHECK = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 3,
}
"""How soon the head takes a silent node for dead: as deploy/README.md advises."""

_QUIET = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    # Workers started ahead of need only take memory here, on every host.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
}

_UNTIL_DEAD = """
import sys, time, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
deadline = time.monotonic() + {patience_s}
while any(node["Alive"] and node["NodeManagerAddress"] == {address!r} for node in ray.nodes()):
    assert time.monotonic() < deadline, "the node on {address} counts as alive"
    time.sleep(0.1)
"""


@dataclass(slots=True)
class Node:
    """One host with its Ray node, from its start to its end."""

    host: Host
    port: str
    """Of the switch: where the host is plugged in."""
    log: Path
    """What the node's start has written."""
    resources: tuple[str, ...]
    process: subprocess.Popen[bytes]
    cut: bool = False

    @property
    def address(self) -> str:
        return self.host.address


@dataclass(slots=True)
class Cluster:
    """The hosts, and those that have joined; the first is the head, which must stay."""

    switch: Switch
    folder: Path
    """Of the nodes' sessions, logs and token: short, as socket paths lie below it."""
    nodes: list[Node] = field(default_factory=list)

    @property
    def head(self) -> Node:
        return self.nodes[0]

    @property
    def address(self) -> str:
        """Where Ray is joined, as host:port."""
        return f"{self.switch.hosts[0].address}:{PORT}"

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to run our packages and to talk to this cluster."""
        inherited = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        paths = [str(_ROOT), *filter(None, (os.environ.get("PYTHONPATH"),))]
        return {
            **inherited,
            **_QUIET,
            "PYTHONPATH": os.pathsep.join(paths),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.folder / "token"),
            "ELASTIC_ZERO_RAY_ADDRESS": self.address,
        }

    @property
    def serving(self) -> Sequence[str]:
        """Options of a service on the head's host, which has all ports to itself."""
        return ("--port", "8400")

    def network(self) -> AbstractContextManager[None]:
        """Puts this thread on the head's host."""
        return inside(self.head.host.namespace)

    def join(self, *cpus: int, memory_bytes: int = _MEMORY_BYTES) -> list[Node]:
        """Start Ray nodes with so many CPUs on the next hosts without one; returns once they have joined."""
        nodes = []
        for count in cpus:
            index = len(self.nodes)
            host, log = self.switch.hosts[index], self.folder / f"node-{index}.log"
            resources = (f"--num-cpus={count}", "--num-gpus=0", f"--memory={memory_bytes}")
            process = self._start(host, log, resources)
            nodes.append(Node(host, f"p{index}", log, resources, process))
            self.nodes.append(nodes[-1])
        self._wait(nodes)
        return nodes

    def revive(self, nodes: Iterable[Node]) -> None:
        """Connect these hosts where their link is cut, and start a new Ray node where theirs has ended."""
        dead = []
        for node in nodes:
            if node.cut:
                self.heal(node)
                # It learns that the others have given it up, and ends by itself.
            if node.process.poll() is not None:
                _end_all(node.host.namespace)
                node.process = self._start(node.host, node.log, node.resources)
                dead.append(node)
        self._wait(dead)

    def _start(self, host: Host, log: Path, resources: Sequence[str]) -> subprocess.Popen[bytes]:
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"),
            *(f"--node-ip-address={host.address}", f"--temp-dir={log.with_suffix('')}", *resources),
            *(f"--object-store-memory={_OBJECT_STORE_BYTES}", "--include-log-monitor=false"),
        ]
        if host is self.switch.hosts[0]:
            system = f"--system-config={json.dumps(HEALTH_CHECK)}"
            command += ["--head", f"--port={PORT}", "--include-dashboard=false", system]
        else:
            command.append(f"--address={self.address}")
        with inside(host.namespace), log.open("wb") as output:
            return subprocess.Popen(
                command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self.folder,
                start_new_session=True,
            )

    def _wait(self, nodes: Sequence[Node]) -> None:
        def started() -> bool:
            texts = [node.log.read_text(errors="replace") for node in nodes]
            for node, text in zip(nodes, texts, strict=True):
                assert node.process.poll() is None, f"the node on {node.address} ended: {text}"
            return all("Ray runtime started" in text for text in texts)

        until(started, f"the Ray nodes on {[node.address for node in nodes]}")

    # What befalls a host

    def kill(self, node: Node) -> None:
        """SIGKILL every process on the host, as if it lost its power; the link stays."""
        _end_all(node.host.namespace)
        node.process.wait()

    def running(self, title: str, *, on: Node | None = None) -> list[int]:
        """Ids of processes whose command line begins with `title`, as Ray's actors have it; on any host."""
        nodes = self.nodes if on is None else [on]
        pids = [pid for node in nodes for pid in processes(node.host.namespace)]
        return [pid for pid in pids if _title(pid).startswith(title)]

    def cut(self, node: Node) -> None:
        """Nothing passes between this host and the others any more; neither side is told."""
        self.switch.ip("link", "set", node.port, "nomaster")
        node.cut = True

    def heal(self, node: Node) -> None:
        """What a cut has broken is whole again."""
        self.switch.ip("link", "set", node.port, "master", "br0")
        node.cut = False

    @contextmanager
    def delayed(self, node: Node, delay_s: float) -> Iterator[None]:
        """Every packet from and to this host takes so much longer meanwhile."""
        near, far = f"{node.port}-near", f"{node.port}-far"
        self.switch.ip("link", "add", near, "type", "veth", "peer", "name", far)
        self.switch.ip("link", "set", near, "up")
        self.switch.ip("link", "set", far, "master", "br0", "up")
        command = [sys.executable, "-m", "tests.multihost.delay_line", node.port, near, str(delay_s)]
        with inside(self.switch.namespace):
            wire = subprocess.Popen(
                command, env=self.environment, cwd=_ROOT, stdout=subprocess.PIPE, text=True
            )
        try:
            assert wire.stdout is not None
            assert wire.stdout.readline().strip() == delay_line.READY
            self.switch.ip("link", "set", node.port, "nomaster")
            yield
        finally:
            self.switch.ip("link", "set", node.port, "master", "br0")
            wire.kill()
            wire.wait()
            if wire.stdout is not None:
                wire.stdout.close()
            self.switch.ip("link", "delete", near)

    def reaches(self, one: Node, other: Node, *, timeout_s: float = 2.0) -> float | None:
        """Seconds that a TCP connection between two hosts takes to open; None where it does not."""
        with inside(other.host.namespace):
            listener = socket.create_server((other.address, 0))
        with listener, inside(one.host.namespace):
            began = time.monotonic()
            try:
                socket.create_connection(listener.getsockname(), timeout=timeout_s).close()
            except OSError:
                return None
            return time.monotonic() - began

    def ask(self, program: str) -> str:
        """Run a Python program on the head's host, with Ray's address as its argument: what it prints."""
        with self.network():
            done = subprocess.run(
                [sys.executable, "-c", program, self.address],
                env=self.environment,
                cwd=self.folder,
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
                check=False,
            )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def wait_until_given_up(self, node: Node) -> None:
        """Until Ray has declared the host's node dead."""
        self.ask(_UNTIL_DEAD.format(address=node.address, patience_s=PATIENCE_S / 2))

    def end(self) -> None:
        """End all that runs on the hosts."""
        for host in self.switch.hosts:
            _end_all(host.namespace)
        for node in self.nodes:
            node.process.wait()


@contextmanager
def ray_hosts(cpus: Sequence[int], *, spare: int = 0) -> Iterator[Cluster]:
    """A cluster of so many hosts, the head's first, each with so many CPUs; `spare` more may join later."""
    folder = Path(tempfile.mkdtemp(prefix="ezh-"))
    try:
        with switched_hosts(len(cpus) + spare) as switch:
            cluster = Cluster(switch, folder)
            try:
                token = folder / "token"
                token.touch(0o600)
                token.write_text(secrets.token_hex(32))
                cluster.join(cpus[0], memory_bytes=HEAD_MEMORY_BYTES)
                cluster.join(*cpus[1:])
                yield cluster
            finally:
                cluster.end()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def until(
    holds: Callable[[], object],
    what: str,
    *,
    timeout_s: float = PATIENCE_S,
    told: Callable[[], object] = lambda: "",
) -> None:
    """Wait until a condition holds; what it was, and what is `told` then, is the error if it does not."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s; {told()}"
        time.sleep(_POLL_S)


def _end_all(namespace: str) -> None:
    """SIGKILL what runs in a namespace until nothing does."""

    def ended() -> bool:
        left = [pid for pid in processes(namespace) if pid != os.getpid()]
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not left

    until(ended, f"the end of all processes in {namespace}", timeout_s=30)


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
