"""How a generation's participants meet: a key-value store at rank 0's worker, and a process group of them.

Those that are leaving take part as well, behind the others; the ranks that train then have a second group to
themselves. A live process joins, leaves and joins again; each generation's keys are apart. Ports are chosen
by the operating system at the moment of binding. Another thread may abort the groups: a rank that waits in a
collective then fails at once instead of at the collective's timeout.

Knows torch.distributed; neither Ray nor the engine.
"""

import ipaddress
import os
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _set_pg_timeout

from workers.errors import DeviceError, RendezvousError

FORM_TIMEOUT_S = 30.0
"""Longest wait for the other ranks of a generation to arrive."""

CONNECT_TIMEOUT_S = 8.0
"""Longest wait for a connection to a rank that has arrived. An abort does not reach a rank that waits here,
so it must come to its end sooner than it would be given up as stuck."""

_ARRIVAL_POLL_S = 0.002
_ABORT_TAG = 1 << 30
"""No message of the engine carries it."""


@dataclass(frozen=True, slots=True)
class Groups:
    """What a worker has joined. `training` is None for one that is leaving, and `everyone` if nobody is."""

    everyone: dist.ProcessGroup
    training: dist.ProcessGroup | None


class Rendezvous:
    """One worker's way into process groups, and out of them."""

    def __init__(self, *, address: str, device: torch.device) -> None:
        """`address` is the node's, as the other nodes reach it; the device decides between NCCL and gloo."""
        self._address = address
        self._device = device
        self._own_store: TCPStore | None = None
        self._lock = threading.Lock()
        self._aborted: int | None = None
        self._generation: int | None = None
        self._groups: tuple[dist.ProcessGroup, ...] = ()

    def host(self) -> str:
        """Open this worker's store, once, and return its host:port."""
        if self._own_store is None:
            try:
                self._own_store = _connect(self._address, 0, host=True)
            except (dist.DistError, RuntimeError) as error:
                raise RendezvousError(f"no store could be opened at {self._address}: {error}") from error
        return f"{self._address}:{self._own_store.port}"

    def form(
        self,
        *,
        generation: int,
        rank: int,
        world_size: int,
        store: str,
        collective_timeout_s: float,
        participants: int | None = None,
    ) -> Groups:
        """Join a generation as `rank`; all its participants become torch.distributed's default group.

        participants: the ranks that meet; those from `world_size` on are leaving. Default: none is.
        Raises RendezvousError if the others do not arrive in time, or if the generation was aborted.
        """
        backend = use_interface(self._address, self._device)
        everyone = world_size if participants is None else participants
        timeout = timedelta(seconds=collective_timeout_s)
        connecting = min(timeout, timedelta(seconds=CONNECT_TIMEOUT_S)) if backend == "gloo" else timeout
        host, _, port = store.rpartition(":")
        try:
            own = self._own_store
            client = own if own and own.port == int(port) and host == self._address else None
            met = PrefixStore(f"generation-{generation}", client or _connect(host, int(port), host=False))
            self._arrive(met, generation, rank, everyone)
            dist.init_process_group(
                backend,
                store=met,
                rank=rank,
                world_size=everyone,
                timeout=connecting,
                device_id=self._device if backend == "nccl" else None,
            )
            groups = [dist.group.WORLD]
            if everyone > world_size:
                ranks = list(range(world_size))
                groups.append(dist.new_group(ranks, timeout=connecting))
            joined = tuple(group for group in groups if group is not None and _is_member(group))
            for group in joined:
                _set_pg_timeout(timeout, group)
        except (dist.DistError, RuntimeError) as error:
            raise RendezvousError(
                f"generation {generation}: rank {rank} of {everyone} could not join at {store} "
                f"over {backend}: {error}"
            ) from error
        with self._lock:
            self._generation = generation
            self._groups = joined
            aborted = generation == self._aborted
        if aborted:
            raise RendezvousError(f"generation {generation} was aborted while it formed")
        return Groups(everyone=self._groups[0], training=self._groups[-1] if rank < world_size else None)

    def _arrive(self, store: Store, generation: int, rank: int, world_size: int) -> None:
        """Wait until all ranks are there: a missing one costs this timeout, not the collective's."""
        store.set(f"arrived-{rank}", "")
        everyone = [f"arrived-{other}" for other in range(world_size)]
        deadline = time.monotonic() + FORM_TIMEOUT_S
        while not store.check(everyone):
            if self.aborted(generation):
                raise RendezvousError(f"generation {generation} was aborted while it formed")
            if time.monotonic() > deadline:
                missing = [other for other in range(world_size) if not store.check([f"arrived-{other}"])]
                raise RendezvousError(f"ranks {missing} did not arrive within {FORM_TIMEOUT_S:g} s")
            time.sleep(_ARRIVAL_POLL_S)

    def abort(self, generation: int) -> None:
        """From another thread: make whatever waits in the generation's group fail now. Idempotent."""
        with self._lock:
            if self._aborted == generation:
                return
            self._aborted = generation
            if self._generation != generation:
                return
            for group in self._groups:
                if self._device.type == "cuda":
                    group.abort()
                else:
                    _break_pairs(group)

    def aborted(self, generation: int) -> bool:
        with self._lock:
            return generation == self._aborted

    def leave(self) -> None:
        """Give up the current group, whole or broken. The process can join another afterwards."""
        with self._lock:
            self._generation, self._groups = None, ()
            if dist.is_initialized():
                dist.destroy_process_group()


def choose_device(*, gpus: int) -> torch.device:
    """The device of a worker that was given `gpus` GPUs. Raises DeviceError if torch sees none."""
    if not gpus:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise DeviceError(
            f"resources.gpus is {gpus}, but torch {torch.__version__} sees no CUDA device on this worker: "
            "install a CUDA build of torch there, or set resources.gpus to 0"
        )
    return torch.device("cuda", 0)


def use_interface(address: str, device: torch.device) -> str:
    """Point the backend at the network interface that carries `address`, and return the backend's name.

    Left alone, gloo resolves the host's name and falls back to loopback when that fails, where no other
    node can reach it.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    interface = interface_of(address, _interfaces())
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    os.environ["NCCL_SOCKET_IFNAME"] = f"={interface}"
    return backend


def interface_of(address: str, interfaces: Mapping[str, frozenset[str]]) -> str:
    """The name of the interface that carries an IP address. Raises RendezvousError if none does."""
    wanted = ipaddress.ip_address(address)
    for name, addresses in sorted(interfaces.items()):
        if any(ipaddress.ip_address(known) == wanted for known in addresses):
            return name
    known = ", ".join(f"{name} {'/'.join(sorted(held))}" for name, held in sorted(interfaces.items()))
    raise RendezvousError(f"no network interface of this node carries its address {address}: it has {known}")


def _interfaces() -> dict[str, frozenset[str]]:
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: frozenset(a.address.partition("%")[0] for a in addresses if a.family in families)
        for name, addresses in psutil.net_if_addrs().items()
    }


def _connect(address: str, port: int, *, host: bool) -> TCPStore:
    return TCPStore(
        address, port, is_master=host, wait_for_workers=False, timeout=timedelta(seconds=FORM_TIMEOUT_S)
    )


def _is_member(group: object) -> bool:
    return group is not dist.GroupMember.NON_GROUP_MEMBER


def _break_pairs(group: dist.ProcessGroup) -> None:
    """Close all of this rank's connections of a gloo group, under whoever waits on them.

    gloo's own abort leaves waiting sends and receives alone. But a receive that times out closes every
    connection of its group, and so one is made to: for a message that nobody ever sends.
    """
    for peer in range(group.size()):
        if peer == group.rank():
            continue
        try:
            work = dist.irecv(torch.empty(1), src=peer, group=group, tag=_ABORT_TAG)
            if work is not None:
                work.wait(timedelta(milliseconds=1))
        except RuntimeError:
            continue  # the timeout, or a connection that was closed already
