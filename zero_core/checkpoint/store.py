"""Where checkpoints lie: the seam to file systems, local ones and, through fsspec, any other.

Owns how bytes get there and back: every write is looked at, nothing is taken for written before it is
synced. Paths are relative to a root, with "/", and never lead out of it. Knows nothing of what the bytes
are, nor when a checkpoint is committed. Failures are OSError, whatever lies below.
"""

import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from fsspec.core import url_to_fs

from zero_core.errors import CheckpointError

_MOST_BUFFERS = 512
"""Given to one call of the operating system, which takes 1,024."""

_REMOTE_PART_BYTES = 16 << 20
"""Asked of a remote store at a time; several at once."""

Fill = Callable[[int, Sequence[memoryview]], None]
"""Fills all buffers, in order, from an offset on."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Files:
    """The calls of the operating system that change anything. Tests put one in its place that fails."""

    def open(self, path: Path, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC, 0o666)

    def fallocate(self, descriptor: int, size: int) -> None:
        os.posix_fallocate(descriptor, 0, size)

    def pwrite(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(descriptor, buffers, offset)

    def fsync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def mkdir(self, path: Path) -> None:
        path.mkdir()

    def unlink(self, path: Path) -> None:
        path.unlink()

    def rmdir(self, path: Path) -> None:
        path.rmdir()

    def free_bytes(self, path: Path) -> int:
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize


class Writer(ABC):
    """A file being written; see `Store.writing`."""

    @abstractmethod
    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """All bytes of `buffers`, in order, from `offset` on. Where the store is sequential: at its end."""


class Store(ABC):
    """Files under one root, by their path from there.

    moves       whether a folder can be renamed as a whole
    sequential  whether files are written from the first byte to the last
    """

    moves: bool
    sequential: bool

    def __init__(self, root: str) -> None:
        self.root = root

    def __str__(self) -> str:
        return self.root

    def location(self, path: str = "") -> str:
        """Where that is: the root joined with `path`."""
        return f"{self.root.rstrip('/')}/{checked(path)}" if path else self.root

    @abstractmethod
    def names(self, folder: str = "") -> list[str]:
        """Of all that is in a folder, sorted; none where there is no such folder."""

    @abstractmethod
    def sizes(self, folder: str = "") -> dict[str, int]:
        """Bytes of each file in a folder, by name; links are none."""

    @abstractmethod
    def size(self, path: str) -> int | None:
        """Bytes of a file; None where there is none, or something else."""

    @abstractmethod
    def read(self, path: str) -> bytes:
        """A whole file."""

    @abstractmethod
    def read_into(self, path: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill all buffers, in order, from `offset` on. Raises CheckpointError if the file ends before."""

    @contextmanager
    def reading(self, path: str) -> Iterator[Fill]:
        """A context in which many parts of one file are read: by a function as `read_into`, less the path."""
        yield partial(self.read_into, path)

    @abstractmethod
    def make_folder(self, path: str, *, parents: bool = True) -> None:
        """A new folder. Raises FileExistsError where there is one, FileNotFoundError without its parent."""

    @abstractmethod
    def writing(self, path: str, size: int, *, durable: bool = True) -> AbstractContextManager[Writer]:
        """A context in which a new file of `size` bytes is written; at its end they are there to stay.

        If it fails, in whatever way, no such file is left as far as that can be had.
        """

    @abstractmethod
    def write(self, path: str, data: bytes, *, durable: bool = True) -> None:
        """A small file, there as a whole or not at all, in the place of one that was there.

        durable  whether to wait until it is there to stay
        """

    @abstractmethod
    def rename(self, source: str, target: str) -> None:
        """Move a file, or a folder where the store `moves`."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Delete a file, if there is one."""

    @abstractmethod
    def remove_tree(self, path: str) -> None:
        """Delete a folder with all that is in it, if there is one. Goes on where a part of it fails."""

    @abstractmethod
    def sync_folder(self, path: str = "") -> None:
        """Let the names in a folder be there to stay."""

    @abstractmethod
    def free_bytes(self) -> int | None:
        """How much can still be written; None where nobody knows."""


def open_store(root: "str | Path | Store") -> Store:
    """The store of a local folder, or of anything with a scheme (`s3://bucket/folder`) through fsspec."""
    if isinstance(root, Store):
        return root
    text = str(root)
    return RemoteStore(text) if "://" in text else LocalStore(text)


def split(location: str | Path) -> tuple[str, str]:
    """A folder's parent and its name, of a path or a URI."""
    parent, _, name = str(location).rstrip("/").rpartition("/")
    return parent or ("/" if str(location).startswith("/") else "."), name


def checked(path: str) -> str:
    """The same path, if it stays within its root. Raises CheckpointError."""
    parts = path.split("/")
    if path and (any(part in ("", ".", "..") for part in parts) or "\\" in path or "\0" in path):
        raise CheckpointError(f"path {path!r} must be relative and stay within its folder")
    return path


class LocalStore(Store):
    """A folder of a file system that the operating system has mounted."""

    moves = True
    sequential = False

    def __init__(self, root: str | Path, files: Files | None = None) -> None:
        super().__init__(str(root))
        self._folder = Path(root)
        self.files = files or Files()

    def path(self, path: str = "") -> Path:
        return self._folder / checked(path)

    def names(self, folder: str = "") -> list[str]:
        try:
            return sorted(child.name for child in self.path(folder).iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def sizes(self, folder: str = "") -> dict[str, int]:
        try:
            with os.scandir(self.path(folder)) as entries:
                return {
                    entry.name: entry.stat(follow_symlinks=False).st_size
                    for entry in entries
                    if entry.is_file(follow_symlinks=False)
                }
        except (FileNotFoundError, NotADirectoryError):
            return {}

    def size(self, path: str) -> int | None:
        try:
            found = self.path(path).lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def read(self, path: str) -> bytes:
        with _reading(self.path(path)) as descriptor:
            found = bytearray(os.fstat(descriptor).st_size)
            _fill(descriptor, self.location(path), 0, [memoryview(found)])
            return bytes(found)

    def read_into(self, path: str, offset: int, buffers: Sequence[memoryview]) -> None:
        with self.reading(path) as fill:
            fill(offset, buffers)

    @contextmanager
    def reading(self, path: str) -> Iterator[Fill]:
        with _reading(self.path(path)) as descriptor:
            yield partial(_fill, descriptor, self.location(path))

    def make_folder(self, path: str, *, parents: bool = True) -> None:
        folder = self.path(path)
        if parents and not folder.parent.is_dir():
            missing = [one for one in folder.parents if not one.is_dir()]
            for one in reversed(missing):
                with suppress(FileExistsError):  # another rank was quicker
                    self.files.mkdir(one)
        self.files.mkdir(folder)

    @contextmanager
    def writing(self, path: str, size: int, *, durable: bool = True) -> Iterator[Writer]:
        target = self.path(path)
        descriptor = self.files.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        try:
            try:
                if size:
                    self.files.fallocate(descriptor, size)
                yield _LocalWriter(self.files, descriptor)
                if durable:
                    self.files.fsync(descriptor)
            except BaseException:
                with suppress(OSError):
                    self.files.close(descriptor)
                raise
            self.files.close(descriptor)
        except BaseException:
            with suppress(OSError):
                self.files.unlink(target)
            raise

    def write(self, path: str, data: bytes, *, durable: bool = True) -> None:
        draft = f"{path}.part"
        with suppress(FileNotFoundError):
            self.path(draft).unlink()  # what a killed process left
        with self.writing(draft, len(data), durable=durable) as out:
            out.write(0, [memoryview(data)])
        try:
            self.rename(draft, path)
        except OSError:
            with suppress(OSError):
                self.files.unlink(self.path(draft))
            raise

    def rename(self, source: str, target: str) -> None:
        self.files.rename(self.path(source), self.path(target))

    def remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self.files.unlink(self.path(path))

    def remove_tree(self, path: str) -> None:
        folder = self.path(path)
        try:
            entries = list(os.scandir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                self.remove_tree(f"{path}/{entry.name}")
            else:
                with suppress(OSError):
                    self.files.unlink(folder / entry.name)
        with suppress(OSError):
            self.files.rmdir(folder)

    def sync_folder(self, path: str = "") -> None:
        descriptor = self.files.open(self.path(path), os.O_RDONLY | os.O_DIRECTORY)
        try:
            self.files.fsync(descriptor)
        finally:
            self.files.close(descriptor)

    def free_bytes(self) -> int | None:
        there = next((one for one in (self._folder, *self._folder.absolute().parents) if one.is_dir()), None)
        return None if there is None else self.files.free_bytes(there)


class _LocalWriter(Writer):
    def __init__(self, files: Files, descriptor: int) -> None:
        self._files = files
        self._descriptor = descriptor

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        left = [buffer for buffer in buffers if len(buffer)]
        while left:
            written = self._files.pwrite(self._descriptor, left[:_MOST_BUFFERS], offset)
            if written <= 0:
                raise OSError(f"the file system took {written} of {sum(map(len, left))} bytes")
            offset += written
            left = _behind(left, written)


def _behind(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What is left of buffers whose first `count` bytes are done with."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return []


@contextmanager
def _reading(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _fill(descriptor: int, location: str, offset: int, buffers: Sequence[memoryview]) -> None:
    left = [buffer for buffer in buffers if len(buffer)]
    while left:
        count = os.preadv(descriptor, left[:_MOST_BUFFERS], offset)
        if count == 0:
            raise _ended(location, offset, sum(map(len, left)))
        offset += count
        left = _behind(left, count)


def _ended(location: str, offset: int, missing: int) -> CheckpointError:
    return CheckpointError(f"{location} ends at byte {offset}, {missing} bytes early: it is damaged")


def _as_os_error(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Each kind of remote store has errors of its own."""

    @wraps(method)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return method(*args, **kwargs)
        except (OSError, CheckpointError):
            raise
        except Exception as error:
            raise OSError(f"remote store: {error!r}") from error

    return wrapped


class RemoteStore(Store):
    """Whatever fsspec has a file system for. Nothing is renamed, and files are written in order."""

    moves = False
    sequential = True

    def __init__(self, root: str) -> None:
        super().__init__(root)
        try:
            options = {"auto_mkdir": True} if root.startswith(("file://", "local://")) else {}
            self._system, self._base = url_to_fs(root, **options)
        except Exception as error:
            raise CheckpointError(f"fsspec cannot open {root}: {error!r}") from error

    def _at(self, path: str) -> str:
        return f"{self._base.rstrip('/')}/{checked(path)}" if path else self._base

    @_as_os_error
    def _listed(self, folder: str) -> list[dict[str, Any]]:
        self._system.invalidate_cache()
        try:
            return list(self._system.ls(self._at(folder), detail=True))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def names(self, folder: str = "") -> list[str]:
        base = self._at(folder).strip("/")
        found = {str(entry["name"]).strip("/") for entry in self._listed(folder)}
        return sorted(name.rpartition("/")[2] for name in found if name != base)

    def sizes(self, folder: str = "") -> dict[str, int]:
        return {
            str(entry["name"]).rpartition("/")[2]: int(entry["size"])
            for entry in self._listed(folder)
            if entry["type"] == "file" and not entry.get("islink")
        }

    @_as_os_error
    def size(self, path: str) -> int | None:
        self._system.invalidate_cache()
        try:
            found = self._system.info(self._at(path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return int(found["size"]) if found["type"] == "file" and not found.get("islink") else None

    @_as_os_error
    def read(self, path: str) -> bytes:
        return bytes(self._system.cat_file(self._at(path)))

    @_as_os_error
    def read_into(self, path: str, offset: int, buffers: Sequence[memoryview]) -> None:
        end = offset + sum(map(len, buffers))
        starts = list(range(offset, end, _REMOTE_PART_BYTES))
        stops = [min(start + _REMOTE_PART_BYTES, end) for start in starts]
        parts = self._system.cat_ranges([self._at(path)] * len(starts), starts, stops, on_error="raise")
        left = [buffer for buffer in buffers if len(buffer)]
        for start, stop, part in zip(starts, stops, parts, strict=True):
            if len(part) != stop - start:
                raise _ended(self.location(path), start + len(part), end - start - len(part))
            view = memoryview(part)
            while view:
                count = min(len(view), len(left[0]))
                left[0][:count] = view[:count]
                view, left = view[count:], _behind(left, count)

    @_as_os_error
    def make_folder(self, path: str, *, parents: bool = True) -> None:  # noqa: ARG002
        # Stores of objects know no folders, and some of them refuse to make one: then a write will tell.
        with suppress(Exception):
            self._system.makedirs(self._at(path), exist_ok=True)

    @contextmanager
    def writing(self, path: str, size: int, *, durable: bool = True) -> Iterator[Writer]:  # noqa: ARG002
        out = self._open(path)
        try:
            yield _RemoteWriter(out)
            self._close(out)
        except BaseException:
            for undo in (getattr(out, "discard", None), out.close):
                if undo is not None:
                    with suppress(Exception):
                        undo()
            with suppress(Exception):
                self.remove(path)
            raise

    @_as_os_error
    def _open(self, path: str) -> Any:
        return self._system.open(self._at(path), "wb")

    @_as_os_error
    def _close(self, out: Any) -> None:
        out.close()

    @_as_os_error
    def write(self, path: str, data: bytes, *, durable: bool = True) -> None:  # noqa: ARG002
        self._system.pipe_file(self._at(path), data)

    def rename(self, source: str, target: str) -> None:
        raise OSError(f"{self.root}: {source} cannot be renamed to {target} in a remote store")

    @_as_os_error
    def remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._system.rm_file(self._at(path))

    @_as_os_error
    def remove_tree(self, path: str) -> None:
        self._system.invalidate_cache()
        with suppress(FileNotFoundError):
            self._system.rm(self._at(path), recursive=True)

    def sync_folder(self, path: str = "") -> None:
        """A name is there when its file is."""

    def free_bytes(self) -> int | None:
        return None


class _RemoteWriter(Writer):
    def __init__(self, out: Any) -> None:
        self._out = out
        self._at = 0

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        assert offset == self._at, "from the first byte to the last"
        self._put(buffers)
        self._at += sum(map(len, buffers))

    @_as_os_error
    def _put(self, buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            self._out.write(buffer)
