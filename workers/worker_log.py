"""Where a worker's own words go: its standard output, its errors and its structured lines, in one file."""

import faulthandler
import os
import sys
from pathlib import Path

import structlog


def redirect(path: Path) -> None:
    """Send this process's stdout and stderr, C and C++ code included, to the end of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
    sys.stdout.flush()
    sys.stderr.flush()
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
    # Ray replaces sys.stdout and sys.stderr by streams of its own; back to the plain descriptors.
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    faulthandler.enable(file=2)


def logger(worker: str) -> structlog.typing.FilteringBoundLogger:
    """A logger that writes a line to stderr, with the worker's name in it."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.dev.ConsoleRenderer(colors=False, pad_event_to=0),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    bound: structlog.typing.FilteringBoundLogger = structlog.get_logger().bind(worker=worker)
    return bound
