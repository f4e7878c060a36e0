"""Hosts for ranks, made of network namespaces: what leaves a rank is what its interface counts.

`separate_hosts` joins N of them by a veth pair (two) or by a bridge (more), each with an interface, an
address, a host name and a /dev/shm of its own, so that ranks have no other way to each other than the wire.
`one_host` is a single namespace with nothing but a loopback, whose counters see only the ranks within.
`switched_hosts` counts nothing and behaves as a network does: for whole programs, with a switch to pull the
plugs of. `inside` is the way of a thread, and of the processes it starts, into one.

Needs root and `ip` (iproute2). Nothing appears in the machine's own namespace, and all is removed at the end.
"""

import ctypes
import os
import shutil
import socket
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_NAMESPACES = Path("/run/netns")
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC, _CLONE_NEWNET = 0x00020000, 0x04000000, 0x08000000, 0x40000000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_COMMAND_TIMEOUT_S = 20.0

# What would be counted and is no data: IPv6's own chatter, and segments sent again though nothing was lost,
# only because a busy machine was late to acknowledge them (tail loss probes, early timeouts).
_SET_UP = """
for file in /proc/sys/net/ipv6/conf/*/disable_ipv6; do echo 1 > "$file" || true; done
ip link set lo up
"""
_NO_PROBES = "echo 0 > /proc/sys/net/ipv4/tcp_early_retrans"
_PATIENCE = "20s"
# For the same end: all packets are received on one core, or they overtake each other when their sender moves.
_IN_ORDER = "for file in /sys/class/net/*/queues/rx-0/rps_cpus; do echo 1 > $file; done"

HEADER_BYTES = 66
"""Ethernet 14, IPv4 20, TCP 20 and its timestamps 12: what every packet carries beside its payload.

A packet here may hold up to 64 KiB: nothing cuts it into frames, since no wire is reached.
"""


@dataclass(frozen=True, slots=True)
class Host:
    """Where a rank runs. `apart`: with a host name and shared memory of its own."""

    namespace: str
    interface: str
    address: str
    apart: bool


@dataclass(frozen=True, slots=True)
class Sent:
    """What an interface has sent so far."""

    bytes: int
    packets: int

    @property
    def payload(self) -> int:
        """Bytes without the headers, if all were TCP over IPv4."""
        return self.bytes - self.packets * HEADER_BYTES

    def since(self, before: "Sent") -> "Sent":
        return Sent(self.bytes - before.bytes, self.packets - before.packets)


def refusal() -> str | None:
    """Why no namespace can be made here; None if one can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need `ip` (iproute2)"
    try:
        with _namespaces(1):
            return None
    except subprocess.CalledProcessError as error:
        return f"no network namespace can be made here: {error.stderr.strip()}"


@contextmanager
def separate_hosts(count: int) -> Iterator[list[Host]]:
    """`count` hosts that reach each other and nothing else."""
    with _namespaces(count if count <= 2 else count + 1) as names:
        hosts = [Host(names[i], "e0", f"10.0.0.{i + 1}", apart=True) for i in range(count)]
        if count == 2:
            _ip(*f"link add e0 netns {names[0]} type veth peer name e0 netns {names[1]}".split())
        elif count > 2:
            _switch(names[count], hosts)
        if count > 1:
            for host in hosts:
                _address(host)
                _ip(*f"-n {host.namespace} route change 10.0.0.0/24 dev e0 rto_min {_PATIENCE}".split())
            for name in names:
                _ip("netns", "exec", name, "sh", "-c", f"{_NO_PROBES}; {_IN_ORDER}")
        yield hosts


@dataclass(frozen=True, slots=True)
class Switch:
    """What hosts are plugged into: a namespace with the bridge `br0`; the i-th host is on its port `p<i>`."""

    namespace: str
    hosts: Sequence[Host]

    def ip(self, *words: str) -> None:
        """`ip` within the switch."""
        _ip("-n", self.namespace, *words)


@contextmanager
def switched_hosts(count: int) -> Iterator[Switch]:
    """`count` hosts on one switch, for whole programs: their packets are resent as everywhere."""
    with _namespaces(count + 1) as names:
        hosts = [Host(names[i], "e0", f"10.0.0.{i + 1}", apart=False) for i in range(count)]
        _switch(names[count], hosts)
        for host in hosts:
            _address(host)
        yield Switch(names[count], hosts)


@contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Put this thread into a namespace's network: its new sockets and its new processes belong there.

    Nothing but the network changes, and it is this thread's alone.
    """
    with Path("/proc/thread-self/ns/net").open("rb") as own, (_NAMESPACES / namespace).open("rb") as there:
        _call("setns", there.fileno(), _CLONE_NEWNET)
        try:
            yield
        finally:
            _call("setns", own.fileno(), _CLONE_NEWNET)


def processes(namespace: str) -> list[int]:
    """Ids of the processes in a namespace's network."""
    listed = _ip("netns", "pids", namespace)
    return [int(pid) for pid in listed.split()]


@contextmanager
def one_host() -> Iterator[Host]:
    """A namespace with a loopback of its own, for all ranks of a run."""
    with _namespaces(1) as names:
        _ip("netns", "exec", names[0], "sh", "-c", _NO_PROBES)
        yield Host(names[0], "lo", "127.0.0.1", apart=False)


def enter(host: Host) -> None:
    """Move this process, while it has one thread, to `host`."""
    descriptor = os.open(_NAMESPACES / host.namespace, os.O_RDONLY)
    try:
        _call("setns", descriptor, _CLONE_NEWNET)
    finally:
        os.close(descriptor)
    if host.apart:
        _call("unshare", _CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWIPC)
        _call("mount", None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None)
        _call("mount", b"tmpfs", b"/dev/shm", b"tmpfs", ctypes.c_ulong(0), None)
        socket.sethostname(host.namespace)


def sent(interface: str) -> Sent:
    """The counters of an interface of this process's own namespace."""
    for line in Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            fields = counters.split()
            return Sent(int(fields[8]), int(fields[9]))
    raise LookupError(f"no interface {interface!r} here")


@contextmanager
def _namespaces(count: int) -> Iterator[Sequence[str]]:
    """New namespaces, with the loopback up."""
    stem = f"ez-{os.getpid()}-{uuid.uuid4().hex[:6]}"
    names: list[str] = []
    try:
        for index in range(count):
            _ip("netns", "add", f"{stem}-{index}")
            names.append(f"{stem}-{index}")
            _ip("netns", "exec", names[-1], "sh", "-c", _SET_UP)
        yield names
    finally:
        for name in names:
            _ip("netns", "delete", name)


def _switch(name: str, hosts: Sequence[Host]) -> None:
    """Plug the hosts into a bridge."""
    _ip(*f"-n {name} link add br0 type bridge".split())
    _ip(*f"-n {name} link set br0 up".split())
    for index, host in enumerate(hosts):
        _ip(*f"link add e0 netns {host.namespace} type veth peer name p{index} netns {name}".split())
        _ip(*f"-n {name} link set p{index} master br0 up".split())


def _address(host: Host) -> None:
    _ip(*f"-n {host.namespace} address add {host.address}/24 dev {host.interface}".split())
    _ip(*f"-n {host.namespace} link set {host.interface} up".split())


def _call(name: str, *args: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _ip(*words: str) -> str:
    """`ip` with these words; what it printed."""
    done = subprocess.run(
        ["ip", *words], check=True, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S
    )
    return done.stdout
