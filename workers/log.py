"""A job's numbered log: one JSON entry a line, appended only, numbered from 1 without gaps.

Owns the file and the numbers, also over a restart of the controller: a last line torn by a crash is dropped,
as nobody can have read it. What the entries mean for a restarted controller is folded into a History.
Knows no Ray.
"""

import json
import os
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from workers.errors import LogError
from workers.reports import Event, Phase, RankReport

_REPORT = b'{"type":"report",'


@dataclass(frozen=True, slots=True)
class History:
    """What the log says so far; attempt, phase, wanted, losses and orders are those of the last attempt."""

    last_seq: int = 0
    time: float = 0.0
    """Unix seconds of the last entry."""
    generation: int = 0
    step: int = 0
    """Last step reported."""
    attempt: int = 0
    phase: Phase | None = None
    wanted: int = 0
    workers: int = 0
    """World size at the last phase event."""
    losses: int = 0
    """Lost workers, those of lost nodes left out."""
    nodes_lost: frozenset[str] = frozenset()
    began_at: float = 0.0
    """Unix seconds at which the attempt began."""
    saved_step: int = 0
    """Step of the attempt's last checkpoint, and its productive seconds up to there."""
    saved_productive_s: float = 0.0
    cancel: str | None = None
    """Who has asked for the end of this attempt, where it is still to be carried out."""
    pause: str | None = None

    def after(self, entry: dict[str, Any]) -> "History":
        """The history with one more entry."""
        seen = replace(
            self,
            last_seq=entry["seq"],
            time=max(self.time, entry["time"]),
            generation=max(self.generation, entry["generation"]),
        )
        if entry["type"] == "report":
            return replace(seen, step=entry["step"])
        data, changes = entry["data"], dict[str, Any]()
        match entry["kind"]:
            case "phase":
                if data["attempt"] != self.attempt:
                    seen = History(
                        last_seq=seen.last_seq,
                        time=seen.time,
                        generation=seen.generation,
                        step=seen.step,
                        attempt=data["attempt"],
                        began_at=entry["time"],
                    )
                changes = {
                    "phase": Phase(data["phase"]),
                    "wanted": data["wanted"],
                    "workers": data["workers"],
                }
            case "command" if "refused" not in data:
                name = {"resize": "wanted", "cancel": "cancel", "pause": "pause"}.get(data["kind"])
                if name:
                    changes = {name: data["workers"] if data["kind"] == "resize" else data["who"]}
            case "resize_refused":
                changes = {"wanted": data["workers"]}
            case "worker_lost" if data.get("budget") == "node":
                changes = {"nodes_lost": self.nodes_lost | {data["node"]}}
            case "worker_lost":
                changes = {"losses": self.losses + 1}
            case "checkpoint":
                changes = {
                    "saved_step": data["step"],
                    "saved_productive_s": data.get("saved_productive_s", data.get("productive_s", 0.0)),
                }
        return replace(seen, **changes)


class JobLog:
    """The log of one job. Thread-safe for one writer and any readers within a process."""

    def __init__(self, path: Path, *, wall: Callable[[], float] = time.time) -> None:
        """Open or create the log. Raises LogError if an entry other than a torn last one cannot be read."""
        self._path = path
        self._wall = wall
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
        # Where each entry begins, and where the next one will: the log itself stays on disk.
        self._starts = array("Q", [0])
        self.history = self._recover()

    @property
    def last_seq(self) -> int:
        return len(self._starts) - 1

    def event(self, kind: str, generation: int, data: dict[str, Any]) -> None:
        """Append an event; it is on disk when this returns."""
        with self._lock:
            entry = Event.model_validate(
                {
                    "seq": self.last_seq + 1,
                    "time": self._wall(),
                    "generation": generation,
                    "kind": kind,
                    "data": data,
                }
            )
            self._append([entry])
            os.fsync(self._file)

    def reports(self, bodies: list[dict[str, Any]]) -> None:
        """Append rank reports that lack nothing but their number."""
        if not bodies:
            return
        with self._lock:
            first = self.last_seq + 1
            self._append([RankReport(seq=first + i, **body) for i, body in enumerate(bodies)])

    def read(self, after: int, limit: int) -> list[dict[str, Any]]:
        """The entries numbered after + 1 .. after + limit, as far as there are any."""
        with self._lock:
            begin = min(max(after, 0), self.last_seq)
            end = min(begin + max(limit, 0), self.last_seq)
            start, stop = self._starts[begin], self._starts[end]
        raw = os.pread(self._file, stop - start, start)
        return [json.loads(line) for line in raw.splitlines()]

    def close(self) -> None:
        os.close(self._file)

    def _append(self, entries: list[Event] | list[RankReport]) -> None:
        lines = [entry.model_dump_json().encode() + b"\n" for entry in entries]
        data = b"".join(lines)
        written = os.write(self._file, data)
        if written != len(data):
            os.ftruncate(self._file, self._starts[-1])
            raise LogError(
                f"{self._path}: only {written} of {len(data)} bytes could be written: is the disk full?"
            )
        for line in lines:
            self._starts.append(self._starts[-1] + len(line))

    def _recover(self) -> History:
        """Read the file once: find the entries, drop a torn last line, fold events and the last report."""
        history, last_report = History(), b""
        with self._path.open("rb") as stream:
            for line in stream:
                if not line.endswith(b"\n"):
                    os.ftruncate(self._file, self._starts[-1])
                    break
                self._starts.append(self._starts[-1] + len(line))
                if line.startswith(_REPORT):
                    last_report = line  # there may be millions: only the last one is looked into
                else:
                    history = history.after(self._parse(line, self.last_seq))
        if last_report:
            history = history.after(self._parse(last_report, None))
        return replace(history, last_seq=self.last_seq)

    def _parse(self, line: bytes, number: int | None) -> dict[str, Any]:
        try:
            entry: dict[str, Any] = json.loads(line)
            (Event if entry["type"] == "event" else RankReport).model_validate(entry)
        except (ValueError, KeyError, TypeError) as error:
            raise LogError(
                f"{self._path}: entry {number or 'of the last report'} is damaged ({error}): "
                "restore the file, or move it away to start the job's log anew"
            ) from error
        if number is not None and entry["seq"] != number:
            raise LogError(f"{self._path}: line {number} carries the number {entry['seq']}")
        return entry
