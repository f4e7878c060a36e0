"""The bound on request bodies, so that no client can fill the service's memory."""

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.problems import Problem

MAX_BODY_BYTES = 1 << 20


class BodyLimit:
    """ASGI middleware that answers 413 to a body of more than `max_bytes`, announced or not."""

    def __init__(self, app: ASGIApp, max_bytes: int = MAX_BODY_BYTES) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "0")
        if not announced.isdecimal() or int(announced) > self._max_bytes:
            refusal = Problem(413, "body_too_large", self._detail())
            await refusal.response(scope["path"])(scope, receive, send)
            return
        await self._app(scope, self._counting(receive), send)

    def _counting(self, receive: Receive) -> Receive:
        received = 0

        async def counting() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                # Raised into whoever reads the body; the handlers of `api.problems` answer it.
                raise HTTPException(413, self._detail())
            return message

        return counting

    def _detail(self) -> str:
        return f"a request body may have {self._max_bytes} bytes at most"
