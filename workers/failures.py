"""Telling whose fault an exception is, and turning it into data."""

import traceback

import torch.distributed as dist

from workers.errors import RendezvousError, UntoldError, UserError
from workers.protocol import Failure, Fault
from zero_core.errors import FencedError, PeerLostError, ZeroError

_COLLECTIVE_CODE = ("/torch/distributed/", "/zero_core/collectives.py", "/zero_core/links.py")
"""Where a broken group surfaces. gloo raises plain RuntimeErrors: only their origin tells them apart."""


def describe(error: BaseException, *, aborted: bool) -> Failure:
    """The exception as data. `aborted`: the controller has aborted this worker's group."""
    fault = Fault.USER
    if isinstance(error, FencedError):
        fault = Fault.ABORTED  # another generation has begun: nobody listens to this one any more
    elif _broken_group(error):
        fault = Fault.ABORTED if aborted else Fault.COLLECTIVE
    return Failure(
        fault=fault,
        message=f"{type(error).__name__}: {error}",
        traceback="".join(traceback.format_exception(error)),
    )


def _broken_group(error: BaseException) -> bool:
    if isinstance(error, (RendezvousError, UntoldError, dist.DistError, PeerLostError)):
        return True
    if isinstance(error, (UserError, ZeroError)) or not isinstance(error, RuntimeError):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and any(part in frames[-1].filename.replace("\\", "/") for part in _COLLECTIVE_CODE)
