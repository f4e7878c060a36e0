"""A figure against its limit, over rounds: what the bars of several benchmarks have in common. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.bars import Verdict


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


def judged(
    name: str,
    figures: Sequence[float],
    limit: Limit,
    missing: str,
    *,
    failed: str | None = None,
    worst: bool = False,
) -> Verdict:
    """The median of the rounds' figures against the limit, or the worst.

    missing  why there are none
    failed   why there are not as many as there should be: fewer are not enough to be ok
    """
    if not figures:
        return not_measured(name, limit, failed or missing)
    rounds = " ".join(f"{figure:.{limit.decimals}f}" for figure in figures)
    figure = (min(figures) if limit.at_least else max(figures)) if worst else statistics.median(figures)
    how = "worst" if worst else "median"
    measured = f"{limit.shown(figure)} ({how} of {rounds})" if len(figures) > 1 else limit.shown(figure)
    met = "ok" if failed is None else f"not measured in every round ({failed})"
    return Verdict(name, measured, str(limit), met if limit.met(figure) else "short")


def failure_of(failures: Mapping[str, str], names: Sequence[str]) -> str | None:
    """Why the first of these contestants that failed did."""
    return next((failures[name] for name in names if name in failures), None)


def not_measured(name: str, limit: Limit, missing: str) -> Verdict:
    return Verdict(name, "nothing", str(limit), f"not measured ({missing})")
