"""Checkpoints of a job: list, save one, verify and export."""

from typing import Annotated

from fastapi import APIRouter, Path, Response

from api.routes.parameters import JobId, Plane, Who
from api.schemas import MAX_ID, CheckpointsOut, ExportIn, ExportOut, JobOut, VerifyOut

router = APIRouter(prefix="/v1/jobs", tags=["checkpoints"])

Step = Annotated[int, Path(ge=0, le=MAX_ID, description="Step of the checkpoint.")]

# All of these run in threads, as the routes of jobs do: the service goes on answering meanwhile.


@router.get("/{job_id}/checkpoints")
def checkpoints(job_id: JobId, plane: Plane) -> CheckpointsOut:
    """The job's committed checkpoints, newest last."""
    return CheckpointsOut.of(*plane.checkpoints.survey(job_id))


@router.post("/{job_id}/checkpoints", status_code=202)
def save_checkpoint(job_id: JobId, plane: Plane, who: Who, response: Response) -> JobOut:
    """Save a checkpoint at the next step boundary; an event `checkpoint` tells when it is committed."""
    job = plane.save_checkpoint(job_id, who=who)
    response.headers["ETag"] = f'"{job.version}"'
    return JobOut.of(job)


@router.post("/{job_id}/checkpoints/{step}/verify")
def verify_checkpoint(job_id: JobId, step: Step, plane: Plane) -> VerifyOut:
    """Read a whole checkpoint and tell what is damaged. Takes as long as reading it does."""
    return VerifyOut.of(plane.checkpoints.verify(job_id, step))


@router.post("/{job_id}/checkpoints/{step}/export", status_code=201)
def export_checkpoint(job_id: JobId, step: Step, wanted: ExportIn, plane: Plane) -> ExportOut:
    """Write a checkpoint's parameters as Hugging Face style safetensors into the job's own folder.

    Takes as long as reading it does. An earlier export of the same step and dtype is replaced.
    """
    return ExportOut.of(
        plane.checkpoints.export(job_id, step, dtype=wanted.dtype, max_shard_bytes=wanted.max_shard_bytes)
    )
