"""Every error as `application/problem+json` with a stable `code`: one table, one shape.

Knows the service's error tree and HTTP; of the routes only which take a specification.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from service import errors
from workers.spec import DEFAULT_OPTIMIZER

logger = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"

STATUS: Mapping[type[errors.ServiceError], int] = {
    errors.NotFound: 404,
    errors.InvalidSpec: 422,
    errors.InvalidRequest: 422,
    errors.WrongState: 409,
    errors.ImpossibleResize: 409,
    errors.DoesNotFit: 409,
    errors.Conflict: 412,
    errors.KeyReused: 409,
    errors.DamagedCheckpoint: 409,
    errors.Busy: 503,
    errors.ClusterUnavailable: 503,
}
"""HTTP status of each branch of the service's error tree; what is not here is a fault of ours, 500."""

_SPEC_PATHS = frozenset({"/v1/jobs", "/v1/plan"})
"""Where the body is a job specification, and a fault in it is an `invalid_spec`."""

_RETRY_AFTER_S = "5"
_SHOWN_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class Problem:
    """One error answer (RFC 9457): status, stable code, what went wrong, and further members."""

    status: int
    code: str
    detail: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)

    def response(self, instance: str) -> JSONResponse:
        """The answer to a request for the path `instance`."""
        body = {
            **self.extra,
            "type": f"urn:elastic-zero:problem:{self.code}",
            "title": HTTPStatus(self.status).phrase,
            "status": self.status,
            "detail": self.detail,
            "code": self.code,
            "instance": instance,
        }
        return JSONResponse(body, self.status, headers=dict(self.headers), media_type=MEDIA_TYPE)


def install(app: FastAPI) -> None:
    """Make `app` answer every exception with a problem."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        problem = problem_of(error, path=request.url.path)
        if problem.status >= 500:
            logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return problem.response(request.url.path)

    for kind in (errors.ServiceError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)


def problem_of(error: Exception, *, path: str) -> Problem:
    """What a client of `path` is told about `error`; internals of unexpected errors stay in the log."""
    match error:
        case errors.ServiceError():
            return _of_service_error(error)
        case RequestValidationError():
            return _of_validation(error, is_spec=path in _SPEC_PATHS)
        case HTTPException():
            return _of_http(error, path)
    return Problem(500, "internal_error", "the service failed on this request; its log says why")


def _of_service_error(error: errors.ServiceError) -> Problem:
    status = next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), 500)
    headers = {"Retry-After": _RETRY_AFTER_S} if status == 503 else {}
    return Problem(status, error.code, error.message, extra=error.details, headers=headers)


def _of_http(error: HTTPException, path: str) -> Problem:
    headers = dict(error.headers or {})
    match error.status_code:
        case 404:
            code, detail = "unknown_route", f"nothing is served under {path}"
        case 405:
            code, detail = (
                "method_not_allowed",
                f"{path} answers {headers.get('Allow', 'other methods')} only",
            )
        case 413:
            code, detail = "body_too_large", str(error.detail)
        case status:
            code, detail = f"http_{status}", str(error.detail)
    return Problem(error.status_code, code, detail, headers=headers)


def _of_validation(error: RequestValidationError, *, is_spec: bool) -> Problem:
    found = error.errors()
    broken = next((item for item in found if item["type"] == "json_invalid"), None)
    if broken is not None:
        reason = broken.get("ctx", {}).get("error", "unreadable")
        return Problem(400, "malformed_json", f"the body is not valid JSON: {reason}")
    listed = [_field_error(item, error.body) for item in found]
    in_body = any(item["loc"][0] == "body" for item in found)
    more = f" (and {len(listed) - 1} more)" if len(listed) > 1 else ""
    return Problem(
        422,
        "invalid_spec" if is_spec and in_body else "invalid_request",
        f"{listed[0]['field']}: {listed[0]['message']}{more}",
        extra={"errors": listed},
    )


def _field_error(item: Mapping[str, Any], body: object) -> dict[str, str]:
    """One complaint of pydantic as {field, message, value}, with the field as the user wrote it."""
    source, *path = item["loc"]
    name = field_name(path, body) if source == "body" else ".".join(map(str, path))
    message = item["msg"].removeprefix("Value error, ")
    complaint = {"field": name or str(source), "message": message}
    # At a missing field pydantic shows the whole section around it, which says nothing.
    if item["type"] != "missing":
        complaint["value"] = repr(item["input"])[:_SHOWN_CHARACTERS]
    return complaint


def field_name(path: Sequence[str | int], body: object) -> str:
    """`path` joined by dots, less the names of union members that pydantic puts in (model.gpt.layers)."""
    names: list[str] = []
    inside = body
    for part in path:
        if (
            isinstance(inside, Mapping)
            and part not in inside
            and part == inside.get("kind", DEFAULT_OPTIMIZER)
        ):
            continue
        names.append(str(part))
        try:
            inside = inside[part]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            inside = None
    return ".".join(names)
