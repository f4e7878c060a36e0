"""What is required of checkpoints, and whether a run's figures meet it. Pure: figures in, verdicts out.

Times are compared within a round, and the median of the ratios over rounds is judged; bytes by the worst of
the cells.
"""

import statistics
from collections.abc import Iterator

from benchmarks.bars import Verdict
from benchmarks.checkpoint_results import (
    LOADS,
    OURS,
    PEER,
    PLAIN,
    SAVE,
    BytesResult,
    Grid,
    PlanResult,
    Results,
    SpeedResult,
    StallResult,
    load_title,
)
from benchmarks.limits import Limit, failure_of, judged, not_measured

_PLAN = Limit(value=50, strictly=True, unit=" ms", decimals=1)
_MANIFEST = Limit(value=1, strictly=True, unit=" MB", decimals=3)
_AT_MOST_READ = Limit(value=1.01, decimals=4)
_OVER_PLAIN = Limit(value=1.5)
_OVER_COPY = Limit(value=1.1)
_OVER_PEER = {SAVE: 1.0, load_title(4): 1.0, load_title(7): 2.5}


def verdicts(results: Results, *, missing: str) -> list[Verdict]:
    """One for each bar, in the order of the requirements. missing: why a part that is None is not there."""
    return [
        *_plan(results.plan, missing),
        _bytes(results.read, missing),
        *_speed(results.speed, missing),
        _stall(results.stall, missing),
    ]


def _plan(result: PlanResult | None, missing: str) -> Iterator[Verdict]:
    """The plan that takes longest, each by its median."""
    where = f"N = {result.saved_at:,} and {result.parameters:,} parameters, " if result is not None else ""
    times_ms = [statistics.median(times) * 1e3 for times in result.plans_s.values()] if result else []
    yield judged(f"{where}plan of one rank", times_ms, _PLAN, missing, worst=True)
    yield judged(f"{where}manifest", [result.manifest_bytes / 1e6] if result else [], _MANIFEST, missing)


def _bytes(result: BytesResult | None, missing: str) -> Verdict:
    name = "load, bytes read over bytes needed, less the rounding to blocks"
    if result is None:
        return not_measured(name, _AT_MOST_READ, missing)
    name = f"{result.size}, {name}"
    cells = result.cells.get(OURS, [])
    if not cells or OURS in result.failures:
        return not_measured(name, _AT_MOST_READ, result.failures.get(OURS, missing))
    uncounted = [cell.title for cell in cells if cell.read < cell.needed + cell.rounding]
    if uncounted:
        reason = f"the system counted less than the verified blocks hold at {', '.join(uncounted[:3])}"
        return not_measured(name, _AT_MOST_READ, reason)
    worst = max(cells, key=lambda cell: cell.rounded)
    measured = f"{worst.rounded:.4f} (worst of {len(cells)} cells, at {worst.title}; {_whole(cells)})"
    outcome = "ok" if _AT_MOST_READ.met(worst.rounded) else "short"
    return Verdict(name, measured, str(_AT_MOST_READ), outcome)


def _whole(cells: list[Grid]) -> str:
    ratios = [cell.ratio for cell in cells]
    return f"{min(ratios):.2f} to {max(ratios):.2f} with it"


def _speed(result: SpeedResult | None, missing: str) -> Iterator[Verdict]:
    found = result if result is not None else SpeedResult("")
    prefix = f"{found.size}, " if found.size else ""
    for action in (*reversed(LOADS), SAVE):
        limit = Limit(value=_OVER_PEER[action], at_least=True)
        yield judged(
            f"{prefix}{action}, times faster than {PEER}",
            found.ratios(PEER, OURS, action),
            limit,
            missing,
            failed=failure_of(found.failures, [OURS, PEER]),
        )
    for action, what in ((SAVE, "write"), *((load, "read") for load in LOADS)):
        yield judged(
            f"{prefix}{action}, time over a plain {what} of the same bytes",
            found.ratios(OURS, PLAIN, action),
            _OVER_PLAIN,
            missing,
            failed=failure_of(found.failures, [OURS, PLAIN]),
        )


def _stall(result: StallResult | None, missing: str) -> Verdict:
    found = result if result is not None else StallResult("", 0)
    prefix = f"{found.size} N={found.world_size}, " if found.size else ""
    return judged(
        f"{prefix}asynchronous save, stall over one copy of the shard",
        [one.ratio for one in found.rounds],
        _OVER_COPY,
        missing,
        failed=found.failure or None,
    )
