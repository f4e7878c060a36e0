"""The machines that jobs run on: what they have, who is on them, and taking one out of service."""

from typing import Annotated

from fastapi import APIRouter, Path

from api.routes.parameters import Plane, Who
from api.schemas import DrainIn, NodeOut, NodesOut

router = APIRouter(prefix="/v1", tags=["cluster"])

NodeId = Annotated[str, Path(max_length=64, description="Id of the node.")]


@router.get("/cluster")
def cluster(plane: Plane) -> NodesOut:
    """The same as `/v1/nodes`."""
    return NodesOut.of(plane.nodes())


@router.get("/nodes")
def nodes(plane: Plane) -> NodesOut:
    """The nodes: what they have free of CPUs, GPUs and memory, whether they are drained, who is on them."""
    return NodesOut.of(plane.nodes())


@router.post("/nodes/{node_id}/drain", status_code=202)
def drain(node_id: NodeId, change: DrainIn, plane: Plane, who: Who) -> NodeOut:
    """Give a node no new work, and have jobs move off it without losing a step.

    A node that is drained already stays so; only an earlier deadline counts. Nobody ends the machine but its
    owner.
    """
    return NodeOut.of(plane.drain(node_id, why=change.reason, deadline_s=change.deadline_s, who=who))
