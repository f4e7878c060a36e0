"""A wire that takes its time: carries every packet between two interfaces, each a while after it came.

Not every kernel has the queue that delays packets (netem); a process with two raw sockets does the same.
Run within the network namespace of the interfaces: `python -m tests.multihost.delay_line A B SECONDS`.
Order is kept, nothing is lost, and offloaded packets stay whole.
"""

import selectors
import socket
import sys
import time
from collections import deque

_ALL_PROTOCOLS = 0x0003
_SOL_PACKET = 263
_PACKET_VNET_HDR = 15
_PACKET_IGNORE_OUTGOING = 23
_LARGEST_BYTES = (1 << 16) + 256
_BUFFER_BYTES = 64 << 20
READY = "carrying"
"""Printed once packets pass."""


def _end(interface: str) -> socket.socket:
    """A raw socket on an interface; packets come and go with their offloading header, and are not echoed."""
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS))
    end.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    end.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    end.bind((interface, 0))
    end.setblocking(False)
    return end


def carry(one: str, other: str, delay_s: float) -> None:
    """Carry packets between the two interfaces for ever."""
    ends = _end(one), _end(other)
    under_way: deque[tuple[float, socket.socket, bytes]] = deque()
    selector = selectors.DefaultSelector()
    for end, far in (ends, ends[::-1]):
        selector.register(end, selectors.EVENT_READ, far)
    sys.stdout.write(f"{READY}\n")
    sys.stdout.flush()
    while True:
        wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for key, _ in selector.select(wait_s):
            _take(key.fileobj, key.data, delay_s, under_way)
        while under_way and under_way[0][0] <= time.monotonic():
            _, far, packet = under_way.popleft()
            far.send(packet)


def _take(end: socket.socket, far: socket.socket, delay_s: float, under_way: deque) -> None:
    """Take what has come in at one end; it is due at the other after the delay."""
    while True:
        try:
            packet = end.recv(_LARGEST_BYTES)
        except BlockingIOError:
            return
        under_way.append((time.monotonic() + delay_s, far, packet))


if __name__ == "__main__":
    carry(sys.argv[1], sys.argv[2], float(sys.argv[3]))
