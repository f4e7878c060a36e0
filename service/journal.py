"""How the service logs: structured events, rendered as `event key=value ...`, through the standard library.

Levels, destinations and formats are left to whoever runs the process and sets up `logging`; nothing is
printed by itself. Knows nothing of what is logged.
"""

import logging
from typing import Any, cast

import structlog
from structlog.processors import LogfmtRenderer
from structlog.stdlib import BoundLogger, filter_by_level
from structlog.typing import EventDict, WrappedLogger

_logfmt = LogfmtRenderer()


def logger(name: str) -> BoundLogger:
    """The structured logger of a module."""
    wrapped = structlog.wrap_logger(
        logging.getLogger(name), processors=[filter_by_level, _rendered], wrapper_class=BoundLogger
    )
    return cast(BoundLogger, wrapped)


def _rendered(wrapped: WrappedLogger, method: str, event: EventDict) -> tuple[tuple[str], dict[str, Any]]:
    """The event in words, its values as logfmt, and a traceback where there is one."""
    exc_info = event.pop("exc_info", None)
    message = event.pop("event")
    values = {key: str(value) for key, value in event.items()}
    text = f"{message} {_logfmt(wrapped, method, values)}" if values else str(message)
    # Percent signs in values are not a format: the logging library formats only where there are arguments.
    return (text,), {"exc_info": exc_info}
