"""What is required of resizes, recoveries and replicas, and whether a run's figures meet it. Pure.

Times are judged by their median over rounds, ratios to Ray Train are taken within a round first, and what
must hold every time (steps repeated, bytes) is judged by the worst round.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.bars import Verdict
from benchmarks.elastic_model import SCALAR
from benchmarks.elastic_results import OURS, PEER, ReplicaResult, SizeResult
from benchmarks.elastic_timeline import GROW, KILL, SHRINK

_TITLES = {GROW: "grow 2 -> 4", SHRINK: "shrink 4 -> 2", KILL: "SIGKILL to the next new step"}
_PAUSE_S = {SCALAR: 0.3}
_LARGE_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The most or the least that a figure may be. strictly: it may not be equal to it."""

    value: float
    at_least: bool = False
    strictly: bool = False
    unit: str = ""
    decimals: int = 2

    def __str__(self) -> str:
        word = "at least" if self.at_least else "under" if self.strictly else "at most"
        return f"{word} {self.value:.{self.decimals}f}{self.unit}"

    def shown(self, figure: float) -> str:
        return f"{figure:.{self.decimals}f}{self.unit}"

    def met(self, figure: float) -> bool:
        if self.at_least:
            return figure >= self.value
        return figure < self.value if self.strictly else figure <= self.value


def verdicts(
    sizes: Sequence[SizeResult],
    replicas: ReplicaResult | None,
    *,
    large: str,
    absent: Mapping[str, str],
) -> list[Verdict]:
    """One for each bar, in the order of the requirements.

    large   the size that the bars on pauses of a large job, on bytes and on replicas are judged at
    absent  why something is not in this run, by size, contestant, or "replicas"
    """
    found = {result.size: result for result in sizes}
    lines: list[Verdict] = []
    for size in (large, SCALAR):
        result = found.get(size, SizeResult(size))
        lines += [_pause(result, kind, absent) for kind in (GROW, SHRINK)]
        if size == large:
            lines += [_ratio(result, kind, Limit(value=8, at_least=True), absent) for kind in (GROW, SHRINK)]
    for size in (SCALAR, large):
        lines += _recovery(found.get(size, SizeResult(size)), absent)
    lines += [_bytes(found.get(large, SizeResult(large)), kind, absent) for kind in (GROW, SHRINK)]
    return [*lines, *_replicas(replicas, large, absent)]


def _pause(result: SizeResult, kind: str, absent: Mapping[str, str]) -> Verdict:
    limit = Limit(value=_PAUSE_S.get(result.size, _LARGE_PAUSE_S), strictly=True, unit=" s")
    figures = [change.seconds for change in result.changes(OURS, kind)]
    return _judged(
        f"{result.size}, pause of {_TITLES[kind]}", figures, limit, _missing(result, [OURS], absent)
    )


def _ratio(result: SizeResult, kind: str, limit: Limit, absent: Mapping[str, str]) -> Verdict:
    pairs = zip(result.changes(PEER, kind), result.changes(OURS, kind), strict=False)
    figures = [theirs.seconds / ours.seconds for theirs, ours in pairs]
    return _judged(
        f"{result.size}, {_TITLES[kind]}, times shorter than Ray Train's",
        figures,
        limit,
        _missing(result, [OURS, PEER], absent),
    )


def _recovery(result: SizeResult, absent: Mapping[str, str]) -> Iterator[Verdict]:
    name = f"{result.size}, {_TITLES[KILL]}"
    missing = _missing(result, [OURS], absent)
    changes = result.changes(OURS, KILL)
    seconds = [change.seconds for change in changes]
    yield _judged(name, seconds, Limit(value=2, strictly=True, unit=" s"), missing)
    yield _ratio(result, KILL, Limit(value=5, at_least=True), absent)
    repeated = [float(change.steps_repeated) for change in changes]
    yield _judged(f"{name}, steps repeated", repeated, Limit(value=1, decimals=0), missing, worst=True)


def _bytes(result: SizeResult, kind: str, absent: Mapping[str, str]) -> Verdict:
    name = f"{result.size}, {_TITLES[kind]}, bytes moved over those that ranks lack by the layout"
    changes, needed = result.changes(OURS, kind), result.bytes_needed.get(kind)
    moved = [change.event["bytes_moved"] for change in changes if "bytes_moved" in change.event]
    missing = _missing(result, [OURS], absent)
    if changes and not moved:
        missing = "the event does not tell bytes_moved"
    elif changes and needed is None:
        missing = "not worked out for this model"
    figures = [count / needed for count in moved] if needed else []
    return _judged(name, figures, Limit(value=1.05, decimals=3), missing, worst=True)


def _replicas(result: ReplicaResult | None, large: str, absent: Mapping[str, str]) -> Iterator[Verdict]:
    missing = absent.get("replicas", "not in this run")
    pairs = zip(result.with_s, result.without_s, strict=True) if result else ()
    name = f"{result.size if result else large} N=4, replica every step"
    yield _judged(f"{name}, step time over none", [a / b for a, b in pairs], Limit(value=1.1), missing)
    off = [float(sum(result.off))] if result else []
    limit = Limit(value=0, decimals=0)
    yield _judged(f"{name} off: seconds, bytes sent and bytes held", off, limit, missing, worst=True)


def _missing(result: SizeResult, names: Sequence[str], absent: Mapping[str, str]) -> str:
    for key in (result.size, *names):
        reason = result.failures.get(key) or absent.get(key)
        if reason:
            return reason
    return "not in this run"


def _judged(
    name: str, figures: Sequence[float], limit: Limit, missing: str, *, worst: bool = False
) -> Verdict:
    if not figures:
        return Verdict(name, "nothing", str(limit), f"not measured ({missing})")
    rounds = " ".join(f"{figure:.{limit.decimals}f}" for figure in figures)
    judged = (min(figures) if limit.at_least else max(figures)) if worst else statistics.median(figures)
    how = "worst" if worst else "median"
    measured = f"{limit.shown(judged)} ({how} of {rounds})" if len(figures) > 1 else limit.shown(judged)
    return Verdict(name, measured, str(limit), "ok" if limit.met(judged) else "short")
