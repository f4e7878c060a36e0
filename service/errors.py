"""The control plane's errors.

    ServiceError
    |- NotFound             unknown_job, unknown_rank, unknown_worker, unknown_node, unknown_checkpoint
    |- InvalidSpec          invalid_spec
    |- InvalidRequest       invalid_request, invalid_cursor, no_checkpoint, checkpoints_unreachable
    |- WrongState           wrong_state, node_gone, head_node
    |- ImpossibleResize     impossible_resize
    |- DoesNotFit           job_does_not_fit
    |- Conflict             version_conflict
    |- KeyReused            idempotency_conflict
    |- DamagedCheckpoint    damaged_checkpoint
    |- Busy                 busy
    |- ClusterUnavailable   cluster_unavailable
    |  `- ControllerGone    controller_gone
    `- StoreError           schema_mismatch, store_unavailable

`code` is stable and part of the API's contract; `message` is for people; `details` holds the values seen,
JSON-ready. Knows nothing of HTTP.
"""

# Named for the outcome, as `raise NotFound(...)` reads, without the suffix Error.
# ruff: noqa: N818

from typing import Any, ClassVar


class ServiceError(Exception):
    """Root of the tree."""

    default_code: ClassVar[str] = "service_error"

    def __init__(
        self, message: str, *, code: str | None = None, details: dict[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.details = details or {}

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.code, self.details))


def _rebuild(kind: type[ServiceError], message: str, code: str, details: dict[str, Any]) -> ServiceError:
    return kind(message, code=code, details=details)


class NotFound(ServiceError):
    """There is no such thing."""

    default_code = "unknown_job"


class InvalidSpec(ServiceError):
    """The job specification is not valid; `details` names the field."""

    default_code = "invalid_spec"


class InvalidRequest(ServiceError):
    """A parameter of the request, other than a job specification, is not valid."""

    default_code = "invalid_request"


class WrongState(ServiceError):
    """The job's state does not allow this."""

    default_code = "wrong_state"


class ImpossibleResize(ServiceError):
    """The wanted number of workers cannot be had, now or ever."""

    default_code = "impossible_resize"


class DoesNotFit(ServiceError):
    """The job would not fit on the cluster as it is."""

    default_code = "job_does_not_fit"


class Conflict(ServiceError):
    """Someone else was first."""

    default_code = "version_conflict"


class KeyReused(ServiceError):
    """The idempotency key was used with another specification."""

    default_code = "idempotency_conflict"


class DamagedCheckpoint(ServiceError):
    """A checkpoint cannot be read whole."""

    default_code = "damaged_checkpoint"


class Busy(ServiceError):
    """As much of this as is done at a time is under way."""

    default_code = "busy"


class ClusterUnavailable(ServiceError):
    """The cluster did not answer in time, or is not there."""

    default_code = "cluster_unavailable"


class ControllerGone(ClusterUnavailable):
    """The cluster answers, but the job has no controller on it."""

    default_code = "controller_gone"


class StoreError(ServiceError):
    """The database cannot be used."""

    default_code = "schema_mismatch"
