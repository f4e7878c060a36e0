"""Serves the dashboard: the page, its files, and the session that a browser signs in to.

Knows the files in this folder, and of authentication only how to check a token and issue a session; the
checks themselves are `api.auth`'s. The page draws everything from the REST routes and the stream.
"""

import base64
import hashlib
import html
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import Template
from urllib.parse import parse_qs

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse

from api.auth import SESSION_COOKIE, SESSION_LIFETIME_S, Auth, Identity
from api.problems import Problem

router = APIRouter(include_in_schema=False)

_HERE = Path(__file__).parent
_MEDIA_TYPES = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
_LOCKED = "default-src 'none'; base-uri 'none'; frame-ancestors 'none'; form-action 'self'"
_PAGE_POLICY = (
    f"{_LOCKED}; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
# Under `no-referrer` a browser sends `Origin: null` with a form, which api.auth refuses as foreign.
_REFERRER_POLICY = "same-origin"


@dataclass(frozen=True, slots=True)
class Asset:
    """One file of the dashboard, as it is sent."""

    content: bytes
    media_type: str
    etag: str


@cache
def _assets() -> dict[str, Asset]:
    """Every file under `assets`, by its path there: a request names a key, never a path on the disk."""
    root = _HERE / "assets"
    found = {}
    for path in sorted(root.rglob("*")):
        if path.suffix in _MEDIA_TYPES:
            content = path.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            found[path.relative_to(root).as_posix()] = Asset(content, _MEDIA_TYPES[path.suffix], etag)
    return found


@cache
def _page(name: str) -> str:
    return (_HERE / "pages" / name).read_text(encoding="utf-8")


@router.api_route("/dashboard", methods=["GET", "HEAD"])
def dashboard(request: Request) -> Response:
    """The page; without a session 401 with the sign-in form."""
    identity: Identity | None = request.state.identity
    if identity is None:
        return _sign_in_form(problem="")
    return HTMLResponse(_page("index.html"), headers=_headers(_PAGE_POLICY))


@router.post("/dashboard/session")
async def sign_in(request: Request) -> Response:
    """Exchange the form's token for the session cookie."""
    auth: Auth = request.app.state.auth
    # The form has one field, and bodies are bounded by api.limits.
    fields = parse_qs((await request.body()).decode("utf-8", errors="replace"))
    token = fields.get("token", [""])[0].strip()
    if not auth.accepts_token(token):
        return _sign_in_form(problem="That is not this service's token.")
    response = RedirectResponse("/dashboard", status_code=303)
    response.set_cookie(
        SESSION_COOKIE,
        auth.issue_session(),
        max_age=SESSION_LIFETIME_S,
        path="/",
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return response


@router.delete("/dashboard/session", status_code=204)
def sign_out(request: Request) -> Response:
    """Take the session cookie from the browser."""
    response = Response(status_code=204)
    response.delete_cookie(
        SESSION_COOKIE, path="/", httponly=True, samesite="strict", secure=request.url.scheme == "https"
    )
    return response


@router.get("/dashboard/assets/{name:path}")
def asset(name: str, request: Request) -> Response:
    """One file of the page. Always asked for again, and not sent again while it is the same."""
    found = _assets().get(name)
    if found is None:
        return Problem(404, "unknown_route", f"the dashboard has no file {name}").response(request.url.path)
    headers = {"Cache-Control": "no-cache", "ETag": found.etag, "Content-Security-Policy": _LOCKED}
    if found.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(found.content, media_type=found.media_type, headers=headers)


def _sign_in_form(*, problem: str) -> HTMLResponse:
    """The form, which needs no file that a session guards: its style is in it, and allowed by its hash."""
    style = _page("sign_in.css")
    note = f'<p class="problem" id="problem" role="alert">{html.escape(problem)}</p>' if problem else ""
    page = Template(_page("sign_in.html")).substitute(
        style=style, problem=note, invalid='aria-invalid="true" aria-describedby="problem"' if problem else ""
    )
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"{_LOCKED}; style-src 'sha256-{digest}'; img-src data:"
    return HTMLResponse(
        page, status_code=401, headers={**_headers(policy), "WWW-Authenticate": 'Bearer realm="elastic-zero"'}
    )


def _headers(policy: str) -> dict[str, str]:
    return {
        "Content-Security-Policy": policy,
        "Referrer-Policy": _REFERRER_POLICY,
        "Cache-Control": "no-store",
    }
