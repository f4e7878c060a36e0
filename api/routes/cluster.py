"""The machines that jobs run on."""

from fastapi import APIRouter

from api.routes.parameters import Plane
from api.schemas import ClusterOut

router = APIRouter(prefix="/v1/cluster", tags=["cluster"])


@router.get("")
def cluster(plane: Plane) -> ClusterOut:
    """The nodes, and what they have free of CPUs, GPUs and memory."""
    return ClusterOut.of(plane.cluster())
