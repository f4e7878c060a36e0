"""What each rank of a job reported: memory, throughput, loss."""

from fastapi import APIRouter

from api.routes.parameters import After, JobId, Limit, Plane, Rank
from api.schemas import RankHistoryOut, RanksOut

router = APIRouter(prefix="/v1/jobs/{job_id}/ranks", tags=["ranks"])


@router.get("")
def latest(job_id: JobId, plane: Plane) -> RanksOut:
    """The newest report of each rank of the current generation."""
    return RanksOut.of(plane.latest_ranks(job_id))


@router.get("/{rank}/history")
def history(job_id: JobId, rank: Rank, plane: Plane, after: After = 0, limit: Limit = 100) -> RankHistoryOut:
    """One rank's reports over all generations, oldest first."""
    return RankHistoryOut.of(plane.rank_history(job_id, rank, after=after, limit=limit), after)
