"""Whether the service lives, and whether it can work. Answered without a token."""

from fastapi import APIRouter, Response

from api.routes.parameters import Plane
from api.schemas import HealthOut, ReadinessOut

router = APIRouter(tags=["health"])


@router.head("/healthz", include_in_schema=False)
@router.get("/healthz")
def healthz() -> HealthOut:
    """The process answers."""
    return HealthOut()


@router.head("/readyz", include_in_schema=False)
@router.get("/readyz")
def readyz(plane: Plane, response: Response) -> ReadinessOut:
    """The database and the cluster answer; 503 if not, with what each said."""
    readiness = plane.ready()
    response.status_code = 200 if readiness.ok else 503
    return ReadinessOut.of(readiness)
