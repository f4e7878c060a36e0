"""What can be asked of jobs' checkpoints: list, find, verify, export, and where a new job begins from one.

Owns the folders: every one is computed from a job's id and specification, none is taken from a request.
Checks and exports read whole checkpoints, which takes as long as it takes: a few at a time, each in its
caller's thread. The code that reads tensors is loaded with the first of them.
"""

import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from service.errors import Busy, DamagedCheckpoint, InvalidRequest, NotFound, ServiceError
from service.jobs import Job
from workers.committed import committed
from workers.naming import JobFolder
from workers.spec import JobSpec, StartFrom
from zero_core.checkpoint import manifest
from zero_core.checkpoint.manifest import CheckpointInfo, Unusable
from zero_core.checkpoint.store import open_store
from zero_core.errors import CheckpointError

AT_ONCE = 2
"""Checks and exports under way at the same time."""

Dtype = Literal["master", "fp32", "bf16", "fp16"]


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes [start, stop) of a file of a checkpoint, and what is wrong with them."""

    file: str
    start: int
    stop: int
    what: str


@dataclass(frozen=True, slots=True)
class Verified:
    """A checkpoint that was read whole, `bytes` of files: whole if there is no damage."""

    step: int
    generation: int
    location: str
    bytes: int
    damage: tuple[Damage, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Exported:
    """Parameters as safetensors: names of the files in `folder`, and their bytes in all."""

    info: CheckpointInfo
    folder: Path
    files: tuple[str, ...]
    bytes: int
    seconds: float


class Checkpoints:
    """Thread-safe."""

    def __init__(self, storage: Path, job: Callable[[str], Job]) -> None:
        """job: finds a job, or raises NotFound."""
        self._storage = storage
        self._job = job
        self._places = threading.BoundedSemaphore(AT_ONCE)

    def root(self, job_id: str) -> str | Path:
        """Folder or address of a job's checkpoints."""
        job = self._job(job_id)
        return JobFolder(self._storage, job.id).checkpoint_root(job.spec.checkpoints.location)

    def survey(self, job_id: str) -> tuple[list[CheckpointInfo], list[Unusable]]:
        """The committed ones, newest last: what can be loaded, and what is seen to be damaged."""
        root = self.root(job_id)
        with self._reachable(job_id, root):
            return manifest.survey(root)

    def listed(self, job_id: str) -> list[CheckpointInfo]:
        """The committed ones that can be loaded, newest last."""
        return self.survey(job_id)[0]

    def find(self, job_id: str, step: int) -> CheckpointInfo:
        """The one of this step. Raises NotFound (unknown_checkpoint)."""
        for info in self.listed(job_id):
            if info.step == step:
                return info
        raise self._unknown(job_id, step)

    def verify(self, job_id: str, step: int) -> Verified:
        """Read all of it, and say what is damaged. Raises Busy.

        Also of one that is not listed, as what is damaged may be its manifest.
        """
        root = self.root(job_id)
        with self._reachable(job_id, root):
            found = [one for one in committed(root) if one.step == step]
        if not found:
            raise self._unknown(job_id, step)
        one = found[-1]
        with self._place():
            from zero_core.checkpoint import inspection

            began = time.perf_counter()
            damaged = inspection.verify(one.location)
        damage = tuple(Damage(part.file, part.start, part.stop, part.what) for part in damaged)
        size = sum(open_store(one.location).sizes().values())
        seconds = time.perf_counter() - began
        return Verified(one.step, one.generation, one.location, size, damage, seconds)

    def export(self, job_id: str, step: int, *, dtype: Dtype, max_shard_bytes: int) -> Exported:
        """Write its parameters into the job's own folder, in the place of an earlier export of the same.

        Raises Busy, DamagedCheckpoint where it cannot be read whole, and ServiceError (export_failed) where
        the export cannot be written; then nothing is left.
        """
        info = self.find(job_id, step)
        target = JobFolder(self._storage, job_id).export(step, dtype)
        with self._place():
            from zero_core.checkpoint import interchange

            began = time.perf_counter()
            draft = target.parent / f".exporting-{secrets.token_hex(8)}"
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                interchange.export_model(info.location, draft, dtype=dtype, max_shard_bytes=max_shard_bytes)
                sizes = {path.name: path.stat().st_size for path in sorted(draft.iterdir())}
                _put_in_place(draft, target)
            except CheckpointError as error:
                raise DamagedCheckpoint(
                    f"step {step} of job {job_id} cannot be exported: {error}",
                    details={"job_id": job_id, "step": step},
                ) from error
            except OSError as error:
                raise ServiceError(
                    f"the export of step {step} of job {job_id} cannot be written to {target}: {error}",
                    code="export_failed",
                    details={"job_id": job_id, "step": step},
                ) from error
            finally:
                shutil.rmtree(draft, ignore_errors=True)
        return Exported(info, target, tuple(sizes), sum(sizes.values()), time.perf_counter() - began)

    def check(self, spec: JobSpec) -> None:
        """Of a new job: raise InvalidRequest where its checkpoints are to go to an unknown kind of place.

        And NotFound or InvalidRequest where it is to begin with what another job has not.
        """
        try:
            open_store(spec.checkpoints.location or self._storage)
        except CheckpointError as error:
            raise InvalidRequest(
                f"checkpoints.location: {error}",
                code="checkpoints_unreachable",
                details={"location": spec.checkpoints.location},
            ) from error
        given = spec.start_from
        if given is None or given.job is None:
            return
        if given.step is not None:
            self.find(given.job, given.step)
        elif not self.listed(given.job):
            raise InvalidRequest(
                f"start_from: job {given.job} has no checkpoint yet: save one, or begin without",
                code="no_checkpoint",
                details={"job_id": given.job},
            )

    def resolved(self, spec: JobSpec) -> JobSpec:
        """The job as its controller gets it: a folder in the place of another job's id.

        Fails for nothing: whether that is still there matters only to an attempt that has to read it.
        """
        given = spec.start_from
        if given is None or given.job is None:
            return spec
        root = self.root(given.job)
        location = str(root)
        if given.step is not None:
            try:
                location = self.find(given.job, given.step).location
            except (NotFound, InvalidRequest):
                location = f"{location}/{manifest.folder_name(given.step, 0)}"
        return spec.model_copy(update={"start_from": StartFrom(checkpoint=location, cast=given.cast)})

    def _unknown(self, job_id: str, step: int) -> NotFound:
        steps = ", ".join(str(info.step) for info in self.listed(job_id)[-10:]) or "none"
        return NotFound(
            f"job {job_id} has no checkpoint of step {step}; the newest are of: {steps}",
            code="unknown_checkpoint",
            details={"job_id": job_id, "step": step},
        )

    @contextmanager
    def _reachable(self, job_id: str, root: str | Path) -> Iterator[None]:
        """What goes wrong with the place itself is said as such."""
        try:
            yield
        except (CheckpointError, OSError, ImportError) as error:
            raise InvalidRequest(
                f"the checkpoints of job {job_id} in {root} cannot be read from the service: {error}",
                code="checkpoints_unreachable",
                details={"job_id": job_id, "location": str(root)},
            ) from error

    @contextmanager
    def _place(self) -> Iterator[None]:
        if not self._places.acquire(blocking=False):
            raise Busy(
                f"{AT_ONCE} checks or exports of checkpoints are under way; ask again when one has ended",
                details={"at_once": AT_ONCE},
            )
        try:
            yield
        finally:
            self._places.release()


def _put_in_place(draft: Path, target: Path) -> None:
    if target.exists():
        old = target.with_name(f".exporting-{secrets.token_hex(8)}")
        target.rename(old)
        draft.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    else:
        draft.rename(target)
