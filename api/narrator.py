"""Tells a running job on a terminal or in a log, from the items of its stream."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from api.client import StreamItem
from api.render import event_line, loss
from api.schemas import EventOut, JobOut, ReportOut

LINE_EVERY_S = 4.0

_PLAIN_EVENTS = frozenset({"command", "request", "state"})
"""What the phases and the outcomes say again."""


class Narrator:
    """Events become lines. Steps become a bar on a terminal, and a line every few seconds elsewhere."""

    def __init__(self, console: Console, *, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock_s = clock_s
        self._last_line_s = float("-inf")
        self._job: JobOut | None = None
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.completed}/{task.total}  {task.fields[told]}"),
                console=console,
                transient=True,
            )

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def tell(self, item: StreamItem) -> None:
        """Show one item."""
        match item:
            case JobOut():
                self._job = item
                self._progress(item.step, f"loss {loss(item.loss)}")
            case EventOut() if item.kind not in _PLAIN_EVENTS:
                self._console.print(event_line(item), soft_wrap=True)
            case ReportOut(rank=0):
                skipped = f", {item.skipped_steps} skipped" if item.skipped_steps else ""
                self._progress(item.step, f"loss {loss(item.loss)}{skipped}{self._speed(item)}")

    def _speed(self, report: ReportOut) -> str:
        """All ranks take a step together, so one of them tells the speed of all."""
        if self._job is None:
            return ""
        tokens = self._job.spec.global_batch * self._job.spec.sequence_length
        return f"  {report.world_size} workers, {tokens / report.step_s:,.0f} tokens/s"

    def _progress(self, step: int, told: str) -> None:
        if self._job is None:
            return
        if self._bar is not None:
            if self._task is None:
                self._task = self._bar.add_task("training", total=self._job.steps, told=told)
            self._bar.update(self._task, completed=step, told=told)
            return
        now_s = self._clock_s()
        if step and now_s - self._last_line_s >= LINE_EVERY_S:
            self._last_line_s = now_s
            self._console.print(f"{f'step {step}':>10}  of {self._job.steps}  {told}")
