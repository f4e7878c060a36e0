"""Our own Ray on this machine: one head, started, found again after a restart of ours, and ended exactly.

Owns the head's process tree, its token and its temporary folder. The head runs in a session of its own and
outlives the service, so that jobs run on while the service restarts. Which processes belong to it is known
from the record in `ray.json`: the first one's pid, and a random mark that the tree has in its environment.
Nothing else is ever signalled. Imports no Ray: it only runs its command.
"""

import fcntl
import json
import os
import secrets
import shutil
import signal
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path

import psutil

from service.errors import ClusterUnavailable
from service.journal import logger
from service.settings import child_environment

START_TIMEOUT_S = 60.0
"""How long a head may take until it has written its address."""

_DRAIN_TIMEOUT_S = 3.0
_KILL_TIMEOUT_S = 10.0
_POLL_S = 0.1
_OBJECT_STORE_BYTES = 256 << 20
"""Ray's object store carries control messages only; its default would take a third of the memory."""

_SOCKET_PATH_BYTES = 107
_SOCKET_SUFFIX_BYTES = len("/session_2000-01-01_00-00-00_000000_0000000/sockets/plasma_store.1")
_MARK = "ELASTIC_ZERO_RAY_HEAD"
_ADDRESS_FILE = "ray_current_cluster"

_log = logger(__name__)


@dataclass(frozen=True, slots=True)
class _Record:
    """What `ray.json` says of a head: its first process, which leads its session, and where it is.

    The mark, and not the pid alone, tells the process from a later one that was given the same pid.
    """

    pid: int
    mark: str
    temp_dir: str
    address: str


class LocalRay:
    """The local head of one data folder. Processes that share the folder share the head."""

    def __init__(self, data_dir: Path, *, cpus: int | None = None) -> None:
        self._data_dir = data_dir
        self._cpus = cpus
        self._record_file = data_dir / "ray.json"
        self._token_file = data_dir / "ray-token"
        self._log_file = data_dir / "ray-head.log"

    @property
    def running(self) -> bool:
        """Whether the recorded head's first process lives."""
        record = self._read_record()
        return record is not None and _first_process(record) is not None

    def environment(self) -> dict[str, str]:
        """What a process needs in its environment to talk to the head."""
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self._token_file)}

    def ensure_running(self) -> str:
        """The address (host:port) of the head, which is started unless it runs and answers.

        Raises ClusterUnavailable, with the end of the head's own log, where it does not come up.
        """
        with self._locked():
            record = self._read_record()
            if record is not None:
                if _first_process(record) is not None and _accepts(record.address):
                    return record.address
                _log.warning("the local Ray head is gone; what is left of it is ended", pid=record.pid)
                self._end(record)
            return self._start().address

    def stop(self) -> bool:
        """End the head and all that it started, remove its temporary folder; False where there was none."""
        with self._locked():
            record = self._read_record()
            if record is None:
                return False
            self._end(record)
            return True

    def _start(self) -> _Record:
        temp_dir = _make_temp_dir(self._data_dir)
        self._write_token()
        mark = secrets.token_hex(16)
        changes = self.environment() | {_MARK: mark} | _HEAD_ENVIRONMENT
        environment = child_environment(changes)
        # An address inherited from somewhere else would make the head join that cluster.
        environment.pop("RAY_ADDRESS", None)
        # Not subprocess: its objects complain about a child that is meant to outlive them.
        with self._log_file.open("w") as log, Path(os.devnull).open() as nothing:
            pid = os.posix_spawn(
                sys.executable,
                self._start_command(temp_dir),
                environment,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, nothing.fileno(), 0),
                    (os.POSIX_SPAWN_DUP2, log.fileno(), 1),
                    (os.POSIX_SPAWN_DUP2, log.fileno(), 2),
                ],
                setsid=True,
            )
        record = _Record(pid, mark, str(temp_dir), "")
        self._write_record(record)
        try:
            address = self._wait_for_address(record)
        except ClusterUnavailable:
            self._end(record)
            raise
        record = replace(record, address=address)
        self._write_record(record)
        _log.info("local Ray head started", address=address, pid=record.pid, temp_dir=record.temp_dir)
        return record

    def _start_command(self, temp_dir: Path) -> list[str]:
        cpus = [] if self._cpus is None else [f"--num-cpus={self._cpus}"]
        return [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port=0"),
            *("--include-dashboard=false", "--disable-usage-stats", f"--temp-dir={temp_dir}"),
            f"--object-store-memory={_OBJECT_STORE_BYTES}",
            *cpus,
        ]

    def _wait_for_address(self, record: _Record) -> str:
        address_file = Path(record.temp_dir) / _ADDRESS_FILE
        # Our own child: it is known by its pid, and has no environment to be read for its first moment.
        child = psutil.Process(record.pid)
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if not _alive({child}):
                raise self._no_start("it ended at once")
            address = address_file.read_text().strip() if address_file.exists() else ""
            if address and _accepts(address):
                return address
            time.sleep(_POLL_S)
        raise self._no_start(f"no address after {START_TIMEOUT_S:.0f} s")

    def _no_start(self, what: str) -> ClusterUnavailable:
        tail = self._log_file.read_text(errors="replace").strip().splitlines()[-5:]
        return ClusterUnavailable(
            f"the local Ray head did not start: {what}; see {self._log_file}, which ends with: "
            + " | ".join(tail)
        )

    def _end(self, record: _Record) -> None:
        """Ask the head to end, then end by id whatever is left of its tree."""
        first = _first_process(record)
        known = _members(record)
        if first is not None:
            first.send_signal(signal.SIGTERM)
            # Ray waits half a minute for its actors to drain; they have been told all there is to tell.
            psutil.wait_procs([first], timeout=_DRAIN_TIMEOUT_S)
        deadline = time.monotonic() + _KILL_TIMEOUT_S
        while members := _alive(known | _members(record)):
            if time.monotonic() > deadline:
                pids = sorted(member.pid for member in members)
                raise ClusterUnavailable(
                    f"processes {pids} of the local Ray head do not end; end them by hand"
                )
            for member in members:
                with suppress(psutil.NoSuchProcess):
                    member.kill()
            psutil.wait_procs(members, timeout=_POLL_S * 5)
        folder = Path(record.temp_dir).parent
        # The name is computed again: a damaged record must not get anything else removed.
        if folder.name == _folder_name(self._data_dir) and folder.exists():
            shutil.rmtree(_checked(folder), ignore_errors=True)
        self._record_file.unlink(missing_ok=True)
        _log.info("local Ray head ended", pid=record.pid)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the folder's lock: two services must not start two heads."""
        self._data_dir.mkdir(parents=True, exist_ok=True)
        with (self._data_dir / "ray.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _write_token(self) -> None:
        if not self._token_file.exists():
            descriptor = os.open(self._token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(32))

    def _read_record(self) -> _Record | None:
        try:
            return _Record(**json.loads(self._record_file.read_text()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise ClusterUnavailable(
                f"{self._record_file} is not readable as the record of a local Ray head ({error}); end the "
                "head by hand if one runs, then remove the file"
            ) from error

    def _write_record(self, record: _Record) -> None:
        fresh = self._record_file.with_suffix(".new")
        fresh.write_text(json.dumps(asdict(record)))
        fresh.replace(self._record_file)


_HEAD_ENVIRONMENT = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
}


def _make_temp_dir(data_dir: Path) -> Path:
    """A short folder for Ray: its sockets lie deep below it, and a socket's path has 107 bytes at most.

    Ray opens its folder to everyone, so it gets one inside of a folder that only we may enter.
    """
    name = _folder_name(data_dir)
    candidates = [Path(tempfile.gettempdir()) / name / "r", Path("/tmp") / name / "r"]
    for path in candidates:
        if len(os.fsencode(path)) + _SOCKET_SUFFIX_BYTES <= _SOCKET_PATH_BYTES:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            _checked(path.parent)
            path.mkdir(exist_ok=True)
            # What an earlier head wrote there would be read as this one's.
            (path / _ADDRESS_FILE).unlink(missing_ok=True)
            return path
    raise ClusterUnavailable(
        f"no folder for Ray's sockets: {candidates[0]} is {len(os.fsencode(candidates[0]))} bytes long, and "
        f"with what Ray adds it exceeds the {_SOCKET_PATH_BYTES} bytes of a socket's path; set TMPDIR to a "
        "shorter one"
    )


def _folder_name(data_dir: Path) -> str:
    """Short, and another for each user and data folder."""
    key = blake2b(f"{os.getuid()}\n{data_dir.resolve()}".encode(), digest_size=6).hexdigest()
    return f"elastic-zero-{key}"


def _checked(path: Path) -> Path:
    """The folder, provided that it is one, ours, and closed to others: its name can be guessed."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ClusterUnavailable(
            f"{path} must be a folder of user {os.getuid()} with mode 0700, but is owned by {found.st_uid} "
            f"with mode {stat.filemode(found.st_mode)}; remove it"
        )
    return path


def _accepts(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=2.0):
            return True
    except (OSError, ValueError):
        return False


def _first_process(record: _Record) -> psutil.Process | None:
    """The head's first process, unless it has ended (its pid may be someone else's by now)."""
    try:
        process = psutil.Process(record.pid)
    except psutil.NoSuchProcess:
        return None
    return process if _marked(process, record) else None


def _members(record: _Record) -> set[psutil.Process]:
    """Every process of the head that lives, orphans included.

    All that carry the mark and the trees below them; and, as some of Ray's overwrite their environment with
    a title, what is in the session that the first process led and has a file of the head's folder open.
    """
    members: set[psutil.Process] = set()
    for process in psutil.process_iter():
        if _marked(process, record):
            with suppress(psutil.Error):
                members |= {process, *process.children(recursive=True)}
        elif _session(process) == record.pid and _has_open(process, Path(record.temp_dir)):
            members.add(process)
    return members - {psutil.Process()}


def _marked(process: psutil.Process, record: _Record) -> bool:
    try:
        return process.environ().get(_MARK) == record.mark
    except (psutil.Error, OSError):
        return False


def _session(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except OSError:
        return None


def _has_open(process: psutil.Process, folder: Path) -> bool:
    try:
        return any(Path(file.path).is_relative_to(folder) for file in process.open_files())
    except psutil.Error:
        return False


def _alive(members: set[psutil.Process]) -> list[psutil.Process]:
    alive = []
    for member in members:
        with suppress(psutil.NoSuchProcess):
            if member.is_running() and member.status() != psutil.STATUS_ZOMBIE:
                alive.append(member)
    return alive
