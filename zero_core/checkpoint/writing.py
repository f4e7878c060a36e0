"""The files of one save: written, told about, and committed or gone.

Owns the order of these. Every rank fills its own file in a temporary folder and leaves a receipt there; rank
0 looks at all receipts, writes the manifest and renames the folder. So ranks need no collective while they
write, and none of them waits for ever. Knows bytes, and nothing of engines or process groups.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from zero_core.checkpoint import manifest as manifests
from zero_core.checkpoint.container import (
    Contents,
    Digests,
    digest,
    digests_of,
    header,
    kinds_of,
)
from zero_core.checkpoint.manifest import LATEST, MANIFEST, SAVING, Manifest
from zero_core.checkpoint.store import Store
from zero_core.errors import CheckpointError, FencedError
from zero_core.layout import Layout

_LOOKS = 3
"""How often a rename that failed is looked at again, and a tenth of a second between."""

_FAREWELL_S = 5.0
"""How long what failed is left for the other ranks to read."""

Part = tuple[str, int, int, int]
"""A kind of state, a unit, and the elements [start, stop) of it."""


@dataclass(frozen=True, slots=True)
class Payload:
    """What one file is to hold: `pieces` are the bytes of its data section, in order, however cut."""

    contents: Contents
    pieces: Sequence[memoryview]


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a rank has written: bytes and header digest of its file, and of the buffers' one (rank 0).

    error   or why it has not
    fenced  whether that was because a newer generation has begun
    """

    files: tuple[tuple[int, str], ...] = ()
    parts: tuple[Part, ...] = ()
    error: str | None = None
    fenced: bool = False


def write_file(store: Store, path: str, payload: Payload) -> tuple[int, str]:
    """Write one file to stay; returns its bytes and the digest of its header.

    A chunk is read for its digest right before it is written, while the cache has it.
    """
    contents = payload.contents
    of_chunks: list[str] = []
    of_blocks: list[str] = []

    def take(chunk: list[memoryview]) -> None:
        of_blocks.extend(digests_of(chunk, contents.block_bytes))
        of_chunks.append(digest(*chunk))

    def front() -> bytes:
        return header(contents, Digests("".join(of_chunks), "".join(of_blocks)))

    if store.sequential:  # the header comes first, and needs all digests
        for chunk in _chunks(payload):
            take(chunk)
    with store.writing(path, contents.file_bytes) as out:
        if store.sequential:
            out.write(0, [memoryview(front())])
        offset = contents.header_bytes
        for chunk in _chunks(payload):
            if not store.sequential:
                take(chunk)
            out.write(offset, chunk)
            offset += sum(map(len, chunk))
        if not store.sequential:
            out.write(0, [memoryview(front())])
    return contents.file_bytes, digest(front())


def _chunks(payload: Payload) -> Iterator[list[memoryview]]:
    """Each chunk, in the pieces it lies in."""
    pieces = iter(payload.pieces)
    piece = memoryview(b"")
    for index in range(payload.contents.chunks):
        start, stop = payload.contents.chunk(index)
        missing, parts = stop - start, list[memoryview]()
        while missing:
            if not piece:
                piece = next(pieces)
                continue
            parts.append(piece[:missing])
            piece = piece[len(parts[-1]) :]
            missing -= len(parts[-1])
        yield parts


@dataclass(frozen=True, slots=True)
class Work:
    """One rank's share of one save.

    draft   the manifest as it will be, without files
    token   tells this save from any other
    fenced  whether only the generation that was opened last may commit
    patience_s  how long another rank may do nothing
    payloads  by file; rank 0 has the buffers' one as well
    """

    store: Store
    draft: Manifest
    rank: int
    token: str
    fenced: bool
    patience_s: float
    payloads: Mapping[str, Payload]
    parts: tuple[Part, ...]

    @property
    def final(self) -> str:
        """The folder's name once it is a checkpoint."""
        return manifests.folder_name(self.draft.step, self.draft.generation)

    @property
    def place(self) -> str:
        """The folder under the root in which it is filled."""
        return manifests.staging_name(self.draft.generation) if self.fenced and self.store.moves else ""

    @property
    def temporary(self) -> str:
        """The folder that is filled; where nothing can be renamed, already the final one."""
        return temporary_name(self.store, self.place, self.final, self.token)

    def write(self) -> None:
        """This rank's files, and its receipt."""
        files = tuple(
            write_file(self.store, f"{self.temporary}/{name}", payload)
            for name, payload in self.payloads.items()
        )
        self._tell(Receipt(files, self.parts))

    def tell_failure(self, error: Exception) -> None:
        """Let rank 0 know that this rank failed: by a receipt, or by taking the folder away."""
        for name in self.payloads:
            with suppress(OSError):
                self.store.remove(f"{self.temporary}/{name}")  # no space left? here is some
        try:
            self._tell(Receipt(error=_said(self.rank, error), fenced=isinstance(error, FencedError)))
        except OSError:
            if self.store.moves:
                self.abandon()

    def commit(self, receipts: Sequence[Receipt]) -> int:
        """Rank 0: what all ranks have written becomes a checkpoint, or none of it. Returns its bytes."""
        files = (*(receipt.files[0] for receipt in receipts), receipts[0].files[1])
        check_tiling(self.draft.layout, self.draft, [receipt.parts for receipt in receipts])
        sizes = self.store.sizes(self.temporary)
        names = manifests.expected_files(self.draft.world_size)
        for name, (size, _) in zip(names, files, strict=True):
            if sizes.get(name) != size:
                raise CheckpointError(
                    f"{self.store.location(self.temporary)}/{name} has {sizes.get(name)} bytes after {size} "
                    "were written: do all ranks see the same storage?"
                )
        manifest = replace(self.draft, files=files, created=time.time())
        text = manifest.to_json().encode()
        self.check_fence()
        if self.store.moves:
            self.store.write(f"{self.temporary}/{MANIFEST}", text)
        # As late as can be: while they are there, a failure can be told, see `give_up`.
        for rank in range(self.draft.world_size):
            self.store.remove(self._receipt(rank))
        if self.store.moves:
            self.store.sync_folder(self.temporary)
            self._publish(text)
        else:
            self._put_last(text)
        with suppress(OSError):  # a hint only
            self.store.write(LATEST, f"{self.final}\n".encode(), durable=False)
        return manifest.bytes

    def _publish(self, text: bytes) -> None:
        try:
            self.store.rename(self.temporary, self.final)
        except OSError:
            # On some network file systems an answer gets lost, and the second try finds nothing to rename.
            if not self._has_moved(text):
                raise
        try:
            if self.place:
                self.store.sync_folder(self.place)
            self.store.sync_folder()
        except OSError:
            # Whether it would still be there after a crash, nobody knows: so it is none.
            with suppress(OSError):
                self.store.rename(self.final, self.temporary)
            raise

    def _has_moved(self, text: bytes) -> bool:
        for look in range(_LOOKS):
            time.sleep(0.1 if look else 0)
            with suppress(OSError):
                if self.store.size(f"{self.temporary}/{MANIFEST}") is not None:
                    continue
                if self.store.read(f"{self.final}/{MANIFEST}") == text:
                    return True
        return False

    def _put_last(self, text: bytes) -> None:
        path = f"{self.final}/{MANIFEST}"
        try:
            self.store.write(path, text)
        except OSError:
            with suppress(OSError):
                if self.store.read(path) == text:
                    return
            raise

    def abandon(self) -> None:
        """Leave nothing of a save that failed, as far as the storage lets us.

        The folder is moved away first: a rank that is still writing can put nothing into it any more.
        """
        away = f"{self.temporary}.failed"
        if self.store.moves:
            with suppress(OSError):
                self.store.rename(self.temporary, away)
        else:
            with suppress(OSError):
                self.store.remove(f"{self.temporary}/{MANIFEST}")
        for folder in (away, self.temporary) if self.store.moves else (self.temporary,):
            with suppress(OSError):
                self.store.remove_tree(folder)

    def check_fence(self) -> None:
        """Raises FencedError where a newer generation has begun."""
        if self.fenced and (newest := manifests.opened(self.store)) > self.draft.generation:
            raise FencedError(
                f"generation {self.draft.generation} may commit nothing to {self.store}: generation {newest} "
                "has begun"
            )

    def understood(self, error: Exception) -> CheckpointError:
        """What came of this rank's failure; see `understood`."""
        return understood(self.store, self.place, self.what, self.rank, error)

    @property
    def what(self) -> str:
        """For errors."""
        return f"saving step {self.draft.step} to {self.store.location(self.final)}"

    # -- without a collective: receipts ----------------------------------------------------------

    def receipts(self) -> list[Receipt]:
        """Rank 0, when all ranks have written: what they say."""
        found = [self._told(self._receipt(rank)) for rank in range(self.draft.world_size)]
        for rank, receipt in enumerate(found):
            if receipt is None:
                raise CheckpointError(
                    f"rank {rank} left no receipt in {self.store.location(self.temporary)}: do all ranks see "
                    "the same storage?"
                )
        return [_good(receipt) for receipt in found if receipt is not None]

    def collect(self) -> list[Receipt]:
        """Rank 0: wait until all ranks have written. Raises CheckpointError as soon as one has failed."""
        found: dict[int, Receipt] = {}
        paths = {rank: self._receipt(rank) for rank in range(self.draft.world_size)}
        for _ in self._looking(lambda: len(found), "the other ranks have not written their parts"):
            there = set(self.store.names(self.temporary))
            if not there:
                raise CheckpointError(f"a rank took {self.store.location(self.temporary)} away: it failed")
            for rank, path in paths.items():
                if rank in found or path.rpartition("/")[2] not in there:
                    continue
                receipt = self._told(path)
                if receipt is not None:
                    found[rank] = _good(receipt)
            if len(found) == len(paths):
                break
        return [found[rank] for rank in sorted(found)]

    def outcome(self) -> int:
        """Other ranks: wait until rank 0 has committed; returns the bytes. Raises CheckpointError if not."""
        own = f"{self.temporary}/{next(iter(self.payloads))}"
        for _ in self._looking(lambda: 0, "rank 0 has neither committed nor given up"):
            gone = self.store.size(own) is None
            size = self._committed()
            if size is not None:
                return size
            told = self._told(self._farewell)
            if told is not None:
                try:
                    _good(told)
                except CheckpointError as error:
                    self.tell_failure(error)
                    raise
            if gone:
                raise CheckpointError(f"rank 0 gave up on {self.store.location(self.final)}: see its error")
        raise AssertionError("looking ends by an error")

    def give_up(self, error: CheckpointError) -> None:
        """Rank 0: tell the others why, give them time to read it, and leave nothing.

        A rank that is still writing then finds the folder gone; where folders cannot go, what tells it why
        stays there.
        """
        told = Receipt(error=str(error), fenced=isinstance(error, FencedError))
        waiting = self._unaware(range(1, self.draft.world_size))
        try:
            if waiting:
                self.store.write(self._farewell, _receipt_text(told), durable=False)
            until = time.monotonic() + _FAREWELL_S
            while waiting and time.monotonic() < until:
                time.sleep(0.02 if self.store.moves else 0.2)
                waiting = self._unaware(waiting)
            if waiting and not self.store.moves:
                for name in self.store.names(self.temporary):
                    if not self._farewell.endswith(f"/{name}"):
                        self.store.remove(f"{self.temporary}/{name}")
                return
        except OSError:
            pass  # then the folder will be gone
        self.abandon()

    def _unaware(self, ranks: Iterable[int]) -> list[int]:
        """Those of other ranks that can still be told of a failure."""
        return [rank for rank in ranks if not self._knows(rank)]

    def _knows(self, rank: int) -> bool:
        try:
            found = self._told(self._receipt(rank))
        except OSError:
            return True
        # One that writes still will find the folder gone.
        return self.store.moves if found is None else found.error is not None

    def _looking(self, progress: Callable[[], int], what: str) -> Iterator[None]:
        """Come back again and again, more and more seldom; an error when nothing happens for too long."""
        pause, most = (0.002, 0.1) if self.store.moves else (0.05, 1.0)
        before, since = progress(), time.monotonic()
        while True:
            yield
            if progress() != before:
                before, since = progress(), time.monotonic()
            if time.monotonic() - since > self.patience_s:
                raise CheckpointError(f"{what} in {self.patience_s:g} s: step {self.draft.step} is not saved")
            if self.place and not self._place_stands():
                raise FencedError(
                    f"{self.place} is gone: a newer generation has begun, this one commits nothing"
                )
            time.sleep(pause)
            pause = min(1.5 * pause, most)

    def _place_stands(self) -> bool:
        return self.place in self.store.names()

    @property
    def _farewell(self) -> str:
        return f"{self.temporary}/failed-{self.token}.json"

    def _receipt(self, rank: int) -> str:
        return f"{self.temporary}/receipt-{self.token}-{rank:05d}.json"

    def _tell(self, receipt: Receipt) -> None:
        self.store.write(self._receipt(self.rank), _receipt_text(receipt), durable=False)

    def _told(self, path: str) -> Receipt | None:
        """What a receipt says; None while it is not there, or not all of it."""
        try:
            data = json.loads(self.store.read(path))
        except (FileNotFoundError, ValueError):
            return None
        return Receipt(
            tuple((size, digest) for size, digest in data["files"]),
            tuple((kind, unit, start, stop) for kind, unit, start, stop in data["parts"]),
            data["error"],
            data["fenced"],
        )

    def _committed(self) -> int | None:
        """Bytes of the checkpoint, once it is one."""
        try:
            text = self.store.read(f"{self.final}/{MANIFEST}").decode()
            return Manifest.from_json(text, self.store.location(self.final)).bytes
        except (OSError, ValueError):
            return None
        except CheckpointError:
            if self.store.moves:
                raise
            return None  # a part of it, in a store that lets one see that


def _good(receipt: Receipt) -> Receipt:
    """The same receipt. Raises what the rank failed with."""
    if receipt.error is not None:
        raise (FencedError if receipt.fenced else CheckpointError)(receipt.error)
    return receipt


def write_behind(work: Work, first: Callable[[], None] | None = None) -> int:
    """One rank's whole save, without a collective; returns the bytes of all files. `first` comes first."""
    try:
        try:
            if first is not None:
                first()
            work.write()
        except Exception as error:
            work.tell_failure(work.understood(error))
            raise
        return work.commit(work.collect()) if work.rank == 0 else work.outcome()
    except Exception as error:
        failure = work.understood(error)
        if work.rank == 0:
            work.give_up(failure)
        raise failure from error


def temporary_name(store: Store, place: str, final: str, token: str) -> str:
    """The folder that a save fills before it is a checkpoint."""
    if not store.moves:
        return final
    return f"{place}/{SAVING}{final}-{token}".lstrip("/")


def understood(store: Store, place: str, what: str, rank: int, error: Exception) -> CheckpointError:
    """A failure as one of ours: FencedError, where the generation's own folder `place` was taken away."""
    if isinstance(error, FencedError):
        return error
    found: CheckpointError
    with suppress(OSError):
        if place and place not in store.names():
            found = FencedError(
                f"{store.location(place)} is gone: a newer generation has begun, this one commits nothing"
            )
            found.__cause__ = error
            return found
    if isinstance(error, CheckpointError):
        return error
    found = CheckpointError(f"{what} failed on rank {rank}: {error!r}")
    found.__cause__ = error
    return found


def check_tiling(layout: Layout, described: Any, parts: Sequence[Sequence[Part]]) -> None:
    """Raises CheckpointError unless all ranks' parts, in order, make up every unit of every kind once."""
    reached: dict[tuple[str, int], int] = {}
    for rank, mine in enumerate(parts):
        for kind, unit, start, stop in mine:
            before = reached.get((kind, unit), 0)
            if start != before or stop < start:
                raise CheckpointError(
                    f"rank {rank} saved elements {start} to {stop} of {kind} of unit {unit}, and the ranks "
                    f"before it up to {before}: they must follow each other"
                )
            reached[kind, unit] = stop
    wanted = {
        (kind, index): unit.numel
        for index, unit in enumerate(layout.units)
        for kind in kinds_of(described, index)
        if unit.numel
    }
    if {key: stop for key, stop in reached.items() if stop} != wanted:
        wrong = sorted(key for key in wanted.keys() | reached.keys() if wanted.get(key) != reached.get(key))
        raise CheckpointError(f"the ranks' parts of (kind, unit) {wrong[:5]} do not make up the whole")


def _said(rank: int, error: Exception) -> str:
    text = str(error) if isinstance(error, CheckpointError) else repr(error)
    return f"rank {rank}: {text}"


def _receipt_text(receipt: Receipt) -> bytes:
    return json.dumps(
        {
            "files": receipt.files,
            "parts": receipt.parts,
            "error": receipt.error,
            "fenced": receipt.fenced,
        }
    ).encode()
