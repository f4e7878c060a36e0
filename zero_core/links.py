"""How two ranks tell each other what they are about to do, and find out that they disagree.

Every collective is announced: each rank tells every other a `Notice`, and compares the ones it hears with
its own, in order. Ranks that diverge (another branch, another number of calls, another size) get an error
that names both, before any data are read. A notice also says which reductions its rank is through with:
what it has not read to the end must stay as it is.

Ranks on one host are linked by a Unix socket, which also hands over the memory they read from each other and
ends when the other process does. Other pairs exchange notices as small messages over the process group.
Knows nothing of gradients, parameters or sums.
"""

import contextlib
import secrets
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from pathlib import Path

import torch
import torch.distributed as dist

from zero_core.errors import ConfigError, DivergenceError, PeerLostError
from zero_core.sharing import PeerMemory, SharedArena

_HEADER = struct.Struct("<iiqqqi")
_HELLO = struct.Struct("<i16s")
_NOTICE_TAG = (1 << 30) + 1
_PATIENCE_BYTES = 1 << 14
"""Notices that nobody waits for travel together, up to so many bytes."""


_HANDSHAKE_S = 30.0
"""Longest wait for another rank of this host while links are made: all are building their engines then."""


class Kind(IntEnum):
    """What a notice announces."""

    REDUCE = 1
    GATHER = 2
    NUMBERS = 3
    FENCE = 4
    ACCESS = 5
    BROADCAST = 6


class Purpose(IntEnum):
    """What a row of numbers is for."""

    STEP = 0
    TRAINED = 1
    WHOLE = 2
    OUTCOME = 3


_ROWS = {
    Purpose.STEP: "the end of a step",
    Purpose.TRAINED: "the first forward of a step",
    Purpose.WHOLE: "full_parameters",
    Purpose.OUTCOME: "the outcome of a save, a load or the like",
}
_VERBS = {
    Kind.REDUCE: "the reduction",
    Kind.GATHER: "the gathering",
    Kind.ACCESS: "the reading outside of a step",
}


@dataclass(frozen=True, slots=True)
class Notice:
    """One collective as one rank sees it.

    unit    the unit's index, or the purpose of a row of numbers; -1 where there is none
    numel   elements of the unit, or of the row of numbers
    offset  where the rank's contribution lies in its own shared memory; may differ between ranks
    row     fp64 numbers that travel with it
    finished  number of the notice of the newest reduction that the rank has finished; may differ too
    """

    kind: Kind
    unit: int = -1
    numel: int = 0
    offset: int = 0
    row: tuple[float, ...] = ()
    finished: int = 0

    def agrees(self, other: "Notice") -> bool:
        return (self.kind, self.unit, self.numel) == (other.kind, other.unit, other.numel)

    def pack(self) -> bytes:
        head = _HEADER.pack(self.kind, self.unit, self.numel, self.offset, self.finished, len(self.row))
        return head + struct.pack(f"<{len(self.row)}d", *self.row)

    def describe(self, unit_names: Sequence[str]) -> str:
        if self.kind is Kind.NUMBERS:
            return f"{_ROWS[Purpose(self.unit)]} ({self.numel} numbers)"
        if self.kind is Kind.FENCE:
            return "the end of a round or an update"
        if self.kind is Kind.BROADCAST:
            return f"a broadcast of {self.numel:,} elements"
        known = 0 <= self.unit < len(unit_names)
        name = (unit_names[self.unit] or "the root unit") if known else f"unit {self.unit}"
        return f"{_VERBS[self.kind]} of {name} ({self.numel:,} elements)"


class Agreement:
    """The notices of this rank that one peer's have not been compared with yet."""

    def __init__(self, rank: int, peer: int, unit_names: Callable[[], Sequence[str]]) -> None:
        self.rank = rank
        self.peer = peer
        self._unit_names = unit_names
        self._open: deque[Notice] = deque()

    def expect(self, mine: Notice) -> None:
        self._open.append(mine)

    def compare(self, theirs: Notice) -> None:
        """Raise DivergenceError unless the peer's next notice is what this rank's was."""
        mine, names = self._open.popleft(), self._unit_names()
        if not mine.agrees(theirs):
            raise DivergenceError(
                f"rank {self.rank} is at {mine.describe(names)} where rank {self.peer} is at "
                f"{theirs.describe(names)}: every rank must use the same modules in the same order, with the "
                "same sizes; look for a branch, loop or evaluation that depends on the rank or on its data"
            )


class LocalLink:
    """The link to a rank on this host."""

    def __init__(
        self, agreement: Agreement, connection: socket.socket, memory: PeerMemory, *, timeout_s: float
    ) -> None:
        self.peer = agreement.peer
        self.memory = memory
        self.published: dict[int, int] = {}
        """Where the peer's own part of each unit lies in its memory."""
        self.contributions: dict[int, int] = {}
        """Where the peer's contributions to reductions lie that were heard of, by the notice's number."""
        self.row: tuple[float, ...] = ()
        """The newest row of numbers that was heard."""
        self.finished = 0
        """The newest reduction, by its notice's number, that the peer has said to have finished."""
        self.heard = 0
        """How many of the peer's notices have been compared."""
        self._agreement = agreement
        self._connection = connection
        self._timeout_s = timeout_s
        self._outgoing = bytearray()
        self._incoming = bytearray()
        connection.setblocking(False)
        self._poll = select.poll()

    def tell(self, notice: Notice, *, at_once: bool) -> None:
        """Announce a collective. What nobody waits for may travel with the next one that somebody does."""
        self._agreement.expect(notice)
        self._outgoing += notice.pack()
        if at_once or len(self._outgoing) > _PATIENCE_BYTES:
            self._flush()

    def hear(self, through: int) -> None:
        """Wait until the peer has told `through` notices in all, and compare each with this rank's.

        Raises DivergenceError, or PeerLostError if the peer's process or its engine is gone, if it does not
        answer in time, or if `abort` was called.
        """
        self._flush()
        while not self._take_in(through):
            self._wait(select.POLLIN)
            self._pump()

    def catch_up(self, through: int) -> None:
        """Take in what the peer has told by now, but no more than `through` notices in all; never waits.

        Raises what `hear` raises.
        """
        if not self._take_in(through):
            self._pump()
            self._take_in(through)

    def abort(self) -> None:
        """From any thread: whoever waits on this link fails now."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()
        self.memory.close()

    def _flush(self) -> None:
        """Send what is waiting; where the socket is full, take in what comes: the peer may be sending too."""
        while self._outgoing:
            try:
                sent = self._connection.send(self._outgoing)
            except BlockingIOError:
                self._wait(select.POLLIN | select.POLLOUT)
                self._pump()
                continue
            except OSError as error:
                raise self._lost() from error
            del self._outgoing[:sent]

    def _wait(self, events: int) -> None:
        self._poll.register(self._connection, events)
        if not self._poll.poll(self._timeout_s * 1e3):
            raise PeerLostError(
                f"rank {self._agreement.rank} waited {self._timeout_s:g} s for rank {self.peer}, which said "
                "nothing: it hangs, or is slower than collective_timeout_s allows"
            )

    def _pump(self) -> None:
        """Take in what has come, if anything has."""
        try:
            received = self._connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError as error:
            raise self._lost() from error
        if not received:
            raise self._lost()
        self._incoming += received

    def _take_in(self, through: int) -> bool:
        """Compare the notices that have come whole; returns whether `through` have been compared in all."""
        while self.heard < through:
            notice = self._unpack()
            if notice is None:
                return False
            self._agreement.compare(notice)
            self.heard += 1
            self.finished = notice.finished
            if notice.kind is Kind.REDUCE:
                self.contributions[self.heard] = notice.offset
            elif notice.kind is Kind.NUMBERS:
                self.row = notice.row
        return True

    def _unpack(self) -> Notice | None:
        """The next notice, if it has come whole."""
        if len(self._incoming) < _HEADER.size:
            return None
        kind, unit, numel, offset, finished, count = _HEADER.unpack_from(self._incoming)
        end = _HEADER.size + 8 * count
        if len(self._incoming) < end:
            return None
        row = struct.unpack_from(f"<{count}d", self._incoming, _HEADER.size)
        del self._incoming[:end]
        return Notice(Kind(kind), unit, numel, offset, row, finished)

    def _lost(self) -> PeerLostError:
        return PeerLostError(
            f"rank {self.peer} has left the group of rank {self._agreement.rank}: its process ended, its "
            "engine was closed, or the group was aborted"
        )


class RemoteNotices:
    """Notices between this rank and one on another host, over the process group."""

    def __init__(self, agreement: Agreement, group: dist.ProcessGroup, *, timeout_s: float) -> None:
        self.peer = agreement.peer
        self._agreement = agreement
        self._group = group
        self._timeout_s = timeout_s
        self._sent: dist.Work | None = None
        self._out = torch.zeros(4, dtype=torch.int64)
        self._in = torch.zeros(4, dtype=torch.int64)

    def tell(self, notice: Notice) -> int:
        """Announce a collective; returns the bytes sent."""
        self._agreement.expect(notice)
        self._out.copy_(torch.tensor([notice.kind, notice.unit, notice.numel, 0]))
        self._sent = dist.isend(self._out, group=self._group, group_dst=self.peer, tag=_NOTICE_TAG)
        return self._out.numel() * self._out.element_size()

    def hear(self) -> None:
        """Wait for the peer's notice and compare it. Raises DivergenceError."""
        received = dist.irecv(self._in, group=self._group, group_src=self.peer, tag=_NOTICE_TAG)
        assert received is not None
        assert self._sent is not None
        wait_for([received, self._sent], timeout_s=self._timeout_s)
        kind, unit, numel, _ = self._in.tolist()
        self._agreement.compare(Notice(Kind(kind), unit, numel))


def wait_for(works: Sequence["dist.Work | None"], *, timeout_s: float) -> None:
    """Wait for messages between hosts. Raises PeerLostError after `timeout_s`, or if a connection broke."""
    for work in works:
        assert work is not None, "this rank belongs to its own group"
        try:
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise PeerLostError(
                f"a message from or to another host was not done within {timeout_s:g} s, or its connection "
                f"broke: a rank hangs, ended, or the group was aborted ({error})"
            ) from error


def host_identity() -> str:
    """The same for two processes that can share memory and a Unix socket, different otherwise."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    network = Path("/proc/self/ns/net")
    if not boot.exists() or not network.exists():
        return secrets.token_hex(16)  # not Linux: nobody is near
    return f"{boot.read_text().strip()}:{network.stat().st_ino}"


def connect(
    group: dist.ProcessGroup,
    arena: SharedArena,
    unit_names: Callable[[], Sequence[str]],
    *,
    timeout_s: float,
) -> dict[int, LocalLink]:
    """Link this rank with all others of the group that run on this host. Collective."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    token = secrets.token_bytes(16)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(b"\0elastic-zero-" + token.hex().encode())
        listener.listen(world_size)
        listener.settimeout(_HANDSHAKE_S)
        table: list[tuple[str, bytes]] = [("", b"")] * world_size
        dist.all_gather_object(table, (host_identity(), token), group=group)
        near = [peer for peer, (host, _) in enumerate(table) if peer != rank and host == table[rank][0]]
        links = {}
        try:
            for peer in (p for p in near if p < rank):
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                connection.settimeout(_HANDSHAKE_S)
                connection.connect(b"\0elastic-zero-" + table[peer][1].hex().encode())
                socket.send_fds(connection, [_HELLO.pack(rank, table[peer][1])], [arena.descriptor])
                links[peer] = _linked(connection, rank, peer, token, unit_names, timeout_s)
            for _ in (p for p in near if p > rank):
                connection, _ = listener.accept()
                connection.settimeout(_HANDSHAKE_S)
                link = _linked(connection, rank, None, token, unit_names, timeout_s)
                socket.send_fds(connection, [_HELLO.pack(rank, table[link.peer][1])], [arena.descriptor])
                links[link.peer] = link
        except OSError as error:
            raise ConfigError(
                f"rank {rank} cannot share memory with ranks {near} of this host: {error}; "
                "let the processes see each other, or set transport to 'network'"
            ) from error
    return links


def _linked(
    connection: socket.socket,
    rank: int,
    peer: int | None,
    token: bytes,
    unit_names: Callable[[], Sequence[str]],
    timeout_s: float,
) -> LocalLink:
    """Take the other side's greeting, which must show this rank's token, and the memory beside it."""
    greeting, descriptors, _, _ = socket.recv_fds(connection, _HELLO.size, 1)
    if len(greeting) != _HELLO.size or len(descriptors) != 1:
        raise ConnectionError(f"a greeting of {len(greeting)} bytes with {len(descriptors)} descriptors")
    sender, shown = _HELLO.unpack(greeting)
    if not secrets.compare_digest(shown, token) or peer not in (None, sender):
        raise ConnectionError(f"a greeting from rank {sender} that does not know this rank")
    agreement = Agreement(rank, sender, unit_names)
    return LocalLink(agreement, connection, PeerMemory(descriptors[0]), timeout_s=timeout_s)
