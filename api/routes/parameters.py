"""What the routes share: the control plane, who is asking, and the bounds on parameters."""

from typing import Annotated

from fastapi import Depends, Header, Path, Query, Request

from api.auth import Identity
from api.schemas import MAX_ID
from service.control_plane import ControlPlane
from service.errors import InvalidRequest


def _plane(request: Request) -> ControlPlane:
    plane: ControlPlane = request.app.state.plane
    return plane


def _who(request: Request) -> str:
    identity: Identity = request.state.identity
    return identity.who


def _expected_version(
    if_match: Annotated[
        str | None, Header(max_length=64, description="The version that was read, as a number or an ETag.")
    ] = None,
) -> int | None:
    if if_match is None:
        return None
    digits = if_match.strip().removeprefix("W/").strip('"')
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 18):
        raise InvalidRequest(
            f"the header If-Match is {if_match!r}, not a job's version: send the number that the job showed"
        )
    return int(digits)


Plane = Annotated[ControlPlane, Depends(_plane)]
Who = Annotated[str, Depends(_who)]
ExpectedVersion = Annotated[int | None, Depends(_expected_version)]

JobId = Annotated[str, Path(max_length=64, description="Id of the job.")]
Rank = Annotated[int, Path(ge=0, le=1_000_000, description="Place in the group, from 0.")]
After = Annotated[int, Query(ge=0, le=MAX_ID, description="Only what has a greater id.")]
Limit = Annotated[int, Query(ge=1, le=1000, description="At most so many.")]
