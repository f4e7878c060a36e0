"""`server.json` in the data folder: where the running service is, for the command line on the same machine.

Written by the service when it answers, removed when it ends. After a crash it stays behind, so readers check
that the process it names is still that one.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

_NAME = "server.json"
_SAME_START_S = 1.0


@dataclass(frozen=True, slots=True)
class ServerRecord:
    """A running service: its address, and its process by id and time of start (ids are used again)."""

    url: str
    pid: int
    started: float

    @property
    def alive(self) -> bool:
        """Whether that very process still runs."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started) < _SAME_START_S
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


def write(data_dir: Path, url: str) -> None:
    """Record this process as the service that answers at `url`."""
    process = psutil.Process()
    record = ServerRecord(url=url, pid=process.pid, started=process.create_time())
    draft = data_dir / f"{_NAME}.new"
    draft.write_text(json.dumps(asdict(record)) + "\n")
    draft.replace(data_dir / _NAME)


def read(data_dir: Path) -> ServerRecord | None:
    """The record, or None where there is none or it is not readable as one."""
    try:
        return ServerRecord(**json.loads((data_dir / _NAME).read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def remove(data_dir: Path) -> None:
    """Take the record away."""
    (data_dir / _NAME).unlink(missing_ok=True)
