"""The web application: puts routes, guard, errors and streams around a control plane.

Built from its parts by `create_app`; reads no setting, opens no file, starts no cluster.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

import anyio.to_thread
from fastapi import FastAPI, Security
from fastapi.security import HTTPBearer

from api import problems
from api.auth import Auth, Guard
from api.dashboard import routes as dashboard
from api.limits import BodyLimit
from api.routes import checkpoints, cluster, health, jobs, plan, ranks
from api.schemas import ProblemOut
from api.stream import MAX_STREAMS, Streams
from service.control_plane import ControlPlane

_TOKEN_DOCUMENTED = Security(HTTPBearer(auto_error=False, description="The service's token."))
"""For the OpenAPI document only: the guard has checked before any route is reached."""

_PROBLEMS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ProblemOut, "description": "Refused"},
    "5XX": {"model": ProblemOut, "description": "Not possible now, or a fault of the service"},
}


def create_app(plane: ControlPlane, auth: Auth, *, max_streams: int = MAX_STREAMS) -> FastAPI:
    """The application; the control plane starts and stops with it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await anyio.to_thread.run_sync(plane.start)
        try:
            yield
        finally:
            await anyio.to_thread.run_sync(plane.stop)

    app = FastAPI(
        title="elastic-zero",
        version=version("elastic-zero"),
        description="Trains models too large for one device, as a service: ZeRO on Ray, elastic by request.",
        lifespan=lifespan,
        openapi_url="/v1/openapi.json",
        docs_url="/docs",
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        # A path with and without a slash at the end are not the same; guessing would hide typing errors.
        redirect_slashes=False,
    )
    app.state.plane = plane
    app.state.auth = auth
    app.state.streams = Streams(plane, limit=max_streams)
    problems.install(app)
    # The last one added is the outermost: nobody's body is read before the sender is known.
    app.add_middleware(BodyLimit)
    app.add_middleware(Guard, auth=auth)
    app.include_router(health.router)
    app.include_router(dashboard.router)
    for part in (jobs, checkpoints, ranks, cluster, plan):
        app.include_router(part.router, dependencies=[_TOKEN_DOCUMENTED], responses=_PROBLEMS)
    return app
