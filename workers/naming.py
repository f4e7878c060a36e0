"""Where a job's things are: the controller's name on the cluster, and the folders under the storage root.

The control plane and the cluster both compute these; neither sends a path to the other.
"""

import re
from dataclasses import dataclass
from pathlib import Path

RAY_NAMESPACE = "elastic-zero"

_JOB_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_WORKER = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")


def controller_name(job_id: str) -> str:
    """Name of the job's controller actor within `RAY_NAMESPACE`."""
    return f"controller-{_checked(_JOB_ID, job_id, 'job id')}"


@dataclass(frozen=True, slots=True)
class JobFolder:
    """The folder of one job under the storage root, which every node of the cluster can reach."""

    storage: Path
    job_id: str

    def __post_init__(self) -> None:
        _checked(_JOB_ID, self.job_id, "job id")

    @property
    def path(self) -> Path:
        return self.storage / "jobs" / self.job_id

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def checkpoint_root(self, location: str | None) -> str | Path:
        """Where the job's checkpoints are. location: the job's `checkpoints.location`."""
        if location is None:
            return self.checkpoints
        inside = f"{location.rstrip('/')}/{self.job_id}"
        return inside if "://" in location else Path(inside)

    def export(self, step: int, dtype: str) -> Path:
        """Where the parameters of a checkpoint are exported to."""
        return self.path / "exports" / f"step-{step:08d}-{dtype}"

    @property
    def log(self) -> Path:
        """The controller's numbered log, one JSON entry a line, appended only."""
        return self.path / "log.jsonl"

    @property
    def worker_logs(self) -> Path:
        return self.path / "logs"

    def worker_log(self, worker: str) -> Path:
        return self.worker_logs / f"{_checked(_WORKER, worker, 'worker name')}.log"


def _checked(pattern: re.Pattern[str], value: str, what: str) -> str:
    if not pattern.fullmatch(value):
        raise ValueError(f"{what} {value!r} must match {pattern.pattern}")
    return value
