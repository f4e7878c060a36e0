"""What is required of resizes, recoveries and replicas, and whether a run's figures meet it. Pure.

Times are judged by their median over rounds, ratios to Ray Train are taken within a round first, and what
must hold every time (steps repeated, bytes) is judged by the worst round.
"""

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.bars import Verdict
from benchmarks.elastic_model import SCALAR
from benchmarks.elastic_results import OURS, PEER, ReplicaResult, SizeResult
from benchmarks.elastic_timeline import GROW, KILL, SHRINK
from benchmarks.limits import Limit, failure_of, judged

_TITLES = {GROW: "grow 2 -> 4", SHRINK: "shrink 4 -> 2", KILL: "SIGKILL to the next new step"}
_PAUSE_S = {SCALAR: 0.3}
_LARGE_PAUSE_S = 1.0


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
    return judged(
        f"{result.size}, pause of {_TITLES[kind]}",
        figures,
        limit,
        _missing(result, [OURS], absent),
        failed=failure_of(result.failures, [OURS]),
    )


def _ratio(result: SizeResult, kind: str, limit: Limit, absent: Mapping[str, str]) -> Verdict:
    pairs = zip(result.changes(PEER, kind), result.changes(OURS, kind), strict=False)
    figures = [theirs.seconds / ours.seconds for theirs, ours in pairs]
    return judged(
        f"{result.size}, {_TITLES[kind]}, times shorter than Ray Train's",
        figures,
        limit,
        _missing(result, [OURS, PEER], absent),
        failed=failure_of(result.failures, [OURS, PEER]),
    )


def _recovery(result: SizeResult, absent: Mapping[str, str]) -> Iterator[Verdict]:
    name = f"{result.size}, {_TITLES[KILL]}"
    missing, failed = _missing(result, [OURS], absent), failure_of(result.failures, [OURS])
    changes = result.changes(OURS, KILL)
    seconds = [change.seconds for change in changes]
    yield judged(name, seconds, Limit(value=2, strictly=True, unit=" s"), missing, failed=failed)
    yield _ratio(result, KILL, Limit(value=5, at_least=True), absent)
    repeated = [float(change.steps_repeated) for change in changes]
    limit = Limit(value=1, decimals=0)
    yield judged(f"{name}, steps repeated", repeated, limit, missing, failed=failed, worst=True)


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
    failed = failure_of(result.failures, [OURS])
    return judged(name, figures, Limit(value=1.05, decimals=3), missing, failed=failed, worst=True)


def _replicas(result: ReplicaResult | None, large: str, absent: Mapping[str, str]) -> Iterator[Verdict]:
    missing = absent.get("replicas", "not in this run")
    pairs = zip(result.with_s, result.without_s, strict=True) if result else ()
    name = f"{result.size if result else large} N=4, replica every step"
    yield judged(f"{name}, step time over none", [a / b for a, b in pairs], Limit(value=1.1), missing)
    off = [float(sum(result.off))] if result else []
    limit = Limit(value=0, decimals=0)
    yield judged(f"{name} off: seconds, bytes sent and bytes held", off, limit, missing, worst=True)


def _missing(result: SizeResult, names: Sequence[str], absent: Mapping[str, str]) -> str:
    for key in (result.size, *names):
        if key in absent:
            return absent[key]
    return "not in this run"
