"""What a job would need, before it is submitted."""

from fastapi import APIRouter

from api.routes.parameters import Plane
from api.schemas import PlanOut
from workers.spec import JobSpec

router = APIRouter(prefix="/v1/plan", tags=["plan"])


@router.post("")
def plan(spec: JobSpec, plane: Plane) -> PlanOut:
    """The bytes each rank would hold, by category, and whether the cluster has room for them."""
    return PlanOut.of(plane.plan(spec))
