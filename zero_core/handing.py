"""Shared memory handed to another process of this host, for as long as a handover takes.

Owns a small server, one thread, that gives this process's descriptors to whoever shows the right token and
runs as the same user; and the asking. Knows nothing of what lies in the memory. A process that was killed no
longer answers, so nobody waits for it.
"""

import contextlib
import os
import secrets
import socket
import struct
import threading
from collections.abc import Sequence

from zero_core.errors import PeerLostError

TOKEN_BYTES = 16
_CREDENTIALS = struct.Struct("3i")
_ANSWER_S = 30.0
"""Longest wait for a process of this host to answer, or to say what it wants."""

_MOST_DESCRIPTORS = 250


class DescriptorServer:
    """Gives away `descriptors`, which stay open here, until it is closed."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        assert len(descriptors) <= _MOST_DESCRIPTORS, "as many as fit into one message"
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.name = secrets.token_hex(TOKEN_BYTES)
        self._descriptors = list(descriptors)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(_address(self.name))
        self._listener.listen(socket.SOMAXCONN)
        self._thread = threading.Thread(target=self._serve, name="descriptors", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            with connection, contextlib.suppress(OSError):  # what one asker does wrong must not end it
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(_ANSWER_S)
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(raw)
        shown = connection.recv(TOKEN_BYTES, socket.MSG_WAITALL)
        if user == os.getuid() and secrets.compare_digest(shown, self.token):
            socket.send_fds(connection, [b"."], self._descriptors)


def fetch(name: str, token: bytes) -> list[int]:
    """The descriptors of the server called `name`; they are this process's to close.

    Raises PeerLostError if it does not answer.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_ANSWER_S)
        try:
            connection.connect(_address(name))
            connection.sendall(token)
            answer, descriptors, _, _ = socket.recv_fds(connection, 1, _MOST_DESCRIPTORS)
        except OSError as error:
            raise PeerLostError(
                f"a process of this host does not hand over the memory that holds its state: {error}"
            ) from error
    if not answer:
        raise PeerLostError("a process of this host refused to hand over the memory that holds its state")
    return list(descriptors)


def _address(name: str) -> bytes:
    return b"\0elastic-zero-" + name.encode()
