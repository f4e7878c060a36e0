"""Who may talk to the service: the token, the dashboard's session cookie, and where requests come from.

Everything is refused unless it is named here as public, so a route added later is guarded without
doing anything. The module knows paths and headers; it does not know what the routes do.
"""

import hashlib
import hmac
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.problems import Problem
from api.schemas import WHO_HEADER

SESSION_COOKIE = "elastic_zero_session"
SESSION_LIFETIME_S = 7 * 24 * 3600

PUBLIC = frozenset({("GET", "/healthz"), ("HEAD", "/healthz"), ("GET", "/readyz"), ("HEAD", "/readyz")})
SIGN_IN = frozenset({("GET", "/dashboard"), ("HEAD", "/dashboard"), ("POST", "/dashboard/session")})
"""Reached without a token, but they decide themselves: the page answers 401 with the sign-in form."""

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
_SAFE_METHODS = frozenset({"GET", "HEAD"})
_WHO = re.compile(r"[\w.@:+-]{1,64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Identity:
    """How a request proved itself. `who` is what events record as the asker."""

    kind: Literal["token", "session"]
    who: str


@dataclass(frozen=True, slots=True)
class Auth:
    """The secrets and names that decide whether a request is let in."""

    token: str = field(repr=False)
    allowed_hosts: tuple[str, ...] = LOOPBACK_HOSTS
    now_s: Callable[[], float] = time.time

    def accepts_token(self, candidate: str) -> bool:
        return hmac.compare_digest(candidate.encode(), self.token.encode())

    def issue_session(self) -> str:
        """A fresh session cookie: when it ends, signed with the token, so that a new token ends it too."""
        ends = str(int(self.now_s()) + SESSION_LIFETIME_S)
        return f"{ends}.{self._signature(ends)}"

    def accepts_session(self, cookie: str) -> bool:
        ends, _, signature = cookie.partition(".")
        if not hmac.compare_digest(signature.encode(), self._signature(ends).encode()):
            return False
        return int(ends) > self.now_s()

    def _signature(self, ends: str) -> str:
        message = f"elastic-zero dashboard session until {ends}"
        return hmac.new(self.token.encode(), message.encode(), hashlib.sha256).hexdigest()

    def identify(self, headers: Headers) -> Identity | None:
        """Who the headers prove the sender to be; None if they prove nothing."""
        scheme, _, credential = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self.accepts_token(credential.strip()):
            who = headers.get(WHO_HEADER, "")
            return Identity("token", who if _WHO.fullmatch(who) else "api")
        cookie = cookie_parser(headers.get("cookie", "")).get(SESSION_COOKIE, "")
        if cookie and self.accepts_session(cookie):
            return Identity("session", "dashboard")
        return None

    def refuse_foreign(self, method: str, headers: Headers, identity: Identity | None) -> Problem | None:
        """The refusal of a request that another site had a browser send, or None.

        A browser tells where a page came from in Origin, and where it believes to be talking to in Host:
        after DNS rebinding that is still the attacker's name. Ports count: another local server is another
        site.
        """
        hosts = headers.getlist("host")
        if len(hosts) != 1 or _host_name(hosts[0]) not in self.allowed_hosts:
            return Problem(
                403,
                "foreign_host",
                f"requests for host {', '.join(hosts) or '(none)'} are not served here; "
                f"allowed are {', '.join(self.allowed_hosts)} (setting ELASTIC_ZERO_ALLOWED_HOSTS)",
            )
        origins = headers.getlist("origin")
        if any(urlsplit(origin).netloc.lower() != hosts[0].lower() for origin in origins):
            return Problem(
                403, "foreign_origin", f"requests from pages of {', '.join(origins)} are not served here"
            )
        if identity and identity.kind == "session" and method not in _SAFE_METHODS and not origins:
            return Problem(
                403, "foreign_origin", "a change asked for with the session cookie needs an Origin header"
            )
        return None


class Guard:
    """ASGI middleware before every route: lets in what `Auth` accepts, refuses the rest with a problem."""

    def __init__(self, app: ASGIApp, auth: Auth) -> None:
        self._app = app
        self._auth = auth

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            # There are no websocket routes; closing before accepting answers 403.
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = Headers(scope=scope)
        method, path = scope["method"], scope["path"]
        identity = self._auth.identify(headers)
        refusal = self._auth.refuse_foreign(method, headers, identity)
        if refusal is None and identity is None and (method, path) not in PUBLIC | SIGN_IN:
            refusal = Problem(
                401,
                "unauthorized",
                "this needs the header 'Authorization: Bearer <token>' with the service's token",
                headers={"WWW-Authenticate": 'Bearer realm="elastic-zero"'},
            )
        if refusal is not None:
            await refusal.response(path)(scope, receive, _hardened(send))
            return
        scope.setdefault("state", {})["identity"] = identity
        await self._app(scope, receive, _hardened(send))


def _host_name(host: str) -> str:
    """`host` of a Host header without its port, in lower case; empty if it is malformed."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""


_HARDENING = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
)


def _hardened(send: Send) -> Send:
    """`send` that adds the headers that keep answers out of frames, guesses and caches."""

    async def hardened(message: Message) -> None:
        if message["type"] == "http.response.start":
            present = {name.lower() for name, _ in message["headers"]}
            extra = [pair for pair in _HARDENING if pair[0] not in present]
            if b"cache-control" not in present:
                extra.append((b"cache-control", b"no-store"))
            message = {**message, "headers": [*message["headers"], *extra]}
        await send(message)

    return hardened
