"""Who holds the others up: a rank that does not move while they wait, and one that is slower than they are.

Pure: what the workers last said of themselves, their reports and the time come in, findings come out; nothing
is waited for, logged or ended here. Knows no Ray and no torch.

A rank counts as stuck only where all the others have stood still as long, in a collective or done with the
generation: a long forward on every rank is no hang, and the limit runs from the moment at which the last of
the others began to wait. A rank that no longer answers counts as stuck wherever it was last seen. Where all
of them wait and answer, as when the network is cut, there is nobody to be named, and none is.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from workers.protocol import Heartbeat, Poll
from zero_core.ledger import WAITING

STUCK = "worker_stuck"
SLOW = "worker_slow"

_WARN_AT = 1 / 3
"""A warning comes after this part of the limit."""
_WARN_AFTER_S = 20.0
"""The same where there is no limit."""
_LONGEST_LOOK_S = 1.0
"""What one look adds to a silence at most: if the looking itself was held up, nobody was silent meanwhile."""
_OWN_PACE = frozenset({"checkpoint"})
"""Phases that storage makes long: named late and not treated as dead. Those that wait have their timeout."""
_NOT_OWN = ("reduce", "gather", "control", "replica", "idle")
"""Phases of a report in which a rank waits for others, or works for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """A member of the group as it was last heard of. `poll` is the newest answer; another object is news."""

    rank: int
    worker: str
    node: str
    generation: int
    poll: Poll | None

    @property
    def _current(self) -> Poll | None:
        return self.poll if self.poll and self.poll.generation == self.generation else None

    @property
    def heartbeat(self) -> Heartbeat | None:
        """None until the worker trains in this generation."""
        return self._current.heartbeat if self._current else None

    @property
    def done(self) -> bool:
        """Whether its part in the generation has ended, well or not."""
        return self._current is not None and self._current.outcome is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something to be told: the event's kind and data. `dead`: the worker that is to be treated as dead."""

    kind: str
    data: dict[str, Any]
    dead: str | None = None
    cause: str = ""


@dataclass(slots=True)
class _Silence:
    """How long a worker has not answered, and how long it has not trained yet, in seconds."""

    poll: Poll | None = None
    silent_s: float = 0.0
    forming_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Standing:
    """A pulse, and what follows from it."""

    pulse: Pulse
    silent_s: float
    still_s: float

    @property
    def phase(self) -> str:
        beat = self.pulse.heartbeat
        return "done" if self.pulse.done else beat.phase if beat else "forming"

    @property
    def waits(self) -> bool:
        return self.pulse.done or self.phase in WAITING

    @property
    def where(self) -> str:
        beat = self.pulse.heartbeat
        if beat is None or self.pulse.done:
            return self.phase
        return beat.collective if self.waits else f"{beat.phase}, after {beat.collective or 'no collective'}"

    @property
    def mark(self) -> tuple[int, int]:
        """The same for as long as the rank has not moved."""
        beat = self.pulse.heartbeat
        return self.pulse.generation, beat.moves if beat else -1


class Vigil:
    """Keeps watch over one group after another. `look` is to be called every second or more often."""

    def __init__(self, *, stuck_after_s: float | None, slow_share: float | None, slow_steps: int) -> None:
        """The three are `elastic`'s fields of the job specification."""
        self._stuck_after_s = stuck_after_s
        self._warn_after_s = _WARN_AFTER_S if stuck_after_s is None else stuck_after_s * _WARN_AT
        self._paces = None if slow_share is None else _Paces(slow_share, slow_steps)
        self._generation = 0
        self._looked_at: float | None = None
        self._silences: dict[str, _Silence] = {}
        self._warned: dict[str, tuple[int, int]] = {}
        self._dead: set[str] = set()
        self._told_all_wait = False

    def look(
        self, *, now: float, pulses: Sequence[Pulse], reports: Iterable[Mapping[str, Any]] = ()
    ) -> list[Finding]:
        """What is new. `now`: seconds of a monotonic clock; `pulses`: all ranks of the group, or none yet."""
        elapsed_s = 0.0 if self._looked_at is None else min(now - self._looked_at, _LONGEST_LOOK_S)
        self._looked_at = now
        if pulses and pulses[0].generation != self._generation:
            self._begin(pulses[0].generation)
        standings = [self._standing(pulse, elapsed_s) for pulse in pulses]
        found = self._hangs(standings) if standings else []
        if self._paces:
            found += self._paces.look(reports, {pulse.rank: pulse for pulse in pulses})
        return found

    def _begin(self, generation: int) -> None:
        self._generation = generation
        self._silences.clear()
        self._warned.clear()
        self._dead.clear()
        self._told_all_wait = False

    def _standing(self, pulse: Pulse, elapsed_s: float) -> _Standing:
        silence = self._silences.setdefault(pulse.worker, _Silence(pulse.poll))
        silence.silent_s = silence.silent_s + elapsed_s if pulse.poll is silence.poll else 0.0
        silence.poll = pulse.poll
        if pulse.done:
            still_s = math.inf
        elif pulse.heartbeat is None:
            silence.forming_s += elapsed_s
            still_s = silence.forming_s
        else:
            still_s = pulse.heartbeat.still_s + silence.silent_s
        return _Standing(pulse, silence.silent_s, still_s)

    def _hangs(self, ranks: Sequence[_Standing]) -> list[Finding]:
        still_s = min(rank.still_s for rank in ranks)
        if still_s < self._warn_after_s or math.isinf(still_s):
            self._warned.clear()
            self._told_all_wait = False
            return []
        limit = self._stuck_after_s
        found = []
        if limit is not None and still_s >= limit:
            for rank in suspects(ranks, limit):
                if rank.phase not in _OWN_PACE or rank.silent_s >= limit:
                    found += self._give_up(rank, ranks, limit)
        named = suspects(ranks, self._warn_after_s)
        found += [finding for rank in named for finding in self._warn(rank, ranks, still_s)]
        if not named and all(rank.waits for rank in ranks) and not self._told_all_wait:
            self._told_all_wait = True
            found.append(_all_wait(ranks, still_s))
        return found

    def _give_up(self, rank: _Standing, ranks: Sequence[_Standing], limit: float) -> list[Finding]:
        worker = rank.pulse.worker
        if worker in self._dead:
            return []
        self._dead.add(worker)
        self._warned[worker] = rank.mark
        told = _stuck(rank, ranks, dead=True)
        cause = f"it was stuck: {told['said']}, longer than elastic.stuck_after_s {limit:g}"
        return [Finding(kind=STUCK, data=told, dead=worker, cause=cause)]

    def _warn(self, rank: _Standing, ranks: Sequence[_Standing], still_s: float) -> list[Finding]:
        if self._warned.get(rank.pulse.worker) == rank.mark:
            return []
        patience_s = self._warn_after_s / _WARN_AT if rank.phase in _OWN_PACE else 0.0
        if max(still_s, rank.silent_s) < patience_s:
            return []
        self._warned[rank.pulse.worker] = rank.mark
        return [Finding(kind=STUCK, data=_stuck(rank, ranks, dead=False))]


def suspects(ranks: Sequence[_Standing], delay_s: float) -> list[_Standing]:
    """Those that hold the others up, where every rank has stood still for `delay_s`; none if all do.

    While one that answers is not training yet, nobody knows whether it waits: only those that do not answer
    are suspected then. One that is alone is suspected only if it does not answer.
    """
    silent = [rank for rank in ranks if rank.silent_s >= delay_s]
    answering = [rank for rank in ranks if rank.silent_s < delay_s]
    if any(rank.phase == "forming" for rank in answering):
        found = silent
    else:
        found = [rank for rank in ranks if rank in silent or not rank.waits]
    alone = len(ranks) == 1 and bool(silent)
    return found if len(found) < len(ranks) or alone else []


def _stuck(rank: _Standing, ranks: Sequence[_Standing], *, dead: bool) -> dict[str, Any]:
    pulse, beat = rank.pulse, rank.pulse.heartbeat
    held_s = min(one.still_s for one in ranks)
    waiting = {str(one.pulse.rank): one.where for one in ranks if one is not rank and one.waits}
    others = f", while ranks {', '.join(waiting)} wait for it" if waiting else ""
    answers = ", and its process does not answer" if rank.silent_s >= _LONGEST_LOOK_S * 2 else ""
    return {
        "rank": pulse.rank,
        "worker": pulse.worker,
        "node": pulse.node,
        "step": beat.step if beat else None,
        "phase": rank.phase,
        "collective": beat.collective if beat else "",
        "seconds": held_s,
        "silent_s": rank.silent_s,
        "dead": dead,
        "waiting": waiting,
        "said": f"it has not moved for {rank.still_s:.0f} s in {rank.where}{answers}{others}",
    }


def _all_wait(ranks: Sequence[_Standing], still_s: float) -> Finding:
    waiting = {str(rank.pulse.rank): rank.where for rank in ranks}
    steps = [rank.pulse.heartbeat.step for rank in ranks if rank.pulse.heartbeat]
    told = "; ".join(f"rank {rank} in {where}" for rank, where in waiting.items())
    data = {
        "rank": None,
        "worker": None,
        "node": None,
        "step": min(steps, default=None),
        "phase": None,
        "collective": "",
        "seconds": still_s,
        "silent_s": 0.0,
        "dead": False,
        "waiting": waiting,
        "said": f"all ranks wait for each other since {still_s:.0f} s, and nobody can be named: {told}; "
        "look at the network between their nodes",
    }
    return Finding(kind=STUCK, data=data)


@dataclass(frozen=True, slots=True)
class _Pace:
    """One rank's step: seconds of its own, tokens, and the step's wall time in seconds."""

    worker: str
    own_s: float
    tokens: int
    step_s: float


@dataclass(slots=True)
class _Spell:
    """How many steps in a row a rank was slow, or not, and whether that has been told."""

    steps: int = 0
    told: bool = False
    shares: list[float] = field(default_factory=list)


class _Paces:
    """Compares the ranks of each step. One is slow if the others lose at least `share` of the step to it."""

    def __init__(self, share: float, steps: int) -> None:
        self._share = share
        self._steps = steps
        self._generation = 0
        self._open: dict[int, dict[int, _Pace]] = {}
        self._spells: dict[int, _Spell] = {}

    def look(self, reports: Iterable[Mapping[str, Any]], pulses: Mapping[int, Pulse]) -> list[Finding]:
        found = []
        for report in reports:
            if report.get("type") != "report" or report["world_size"] < 2 or report["step_s"] <= 0:
                continue
            if report["generation"] != self._generation:
                self._generation = report["generation"]
                self._open.clear()
                self._spells.clear()
            step = report["step"]
            ranks = self._open.setdefault(step, {})
            ranks[report["rank"]] = _pace(report)
            if len(ranks) == report["world_size"]:
                # A rank that was lost leaves its last step incomplete: that goes with the next one.
                self._open = {number: open for number, open in self._open.items() if number > step}
                found += self._compare(step, ranks, pulses)
        return found

    def _compare(self, step: int, ranks: Mapping[int, _Pace], pulses: Mapping[int, Pulse]) -> list[Finding]:
        found = []
        for rank, pace in ranks.items():
            share = lost_share(pace, [other for number, other in ranks.items() if number != rank])
            spell = self._spells.setdefault(rank, _Spell())
            # A spell that was told is over at half the share: one at the border is not told again and again.
            turns = share < self._share / 2 if spell.told else share >= self._share
            spell.steps = spell.steps + 1 if turns else 0
            spell.shares = [*spell.shares[-(self._steps - 1) :], share] if self._steps > 1 else [share]
            if spell.steps < self._steps:
                continue
            spell.steps, spell.told = 0, not spell.told
            mean = sum(spell.shares) / len(spell.shares)
            pulse = pulses.get(rank)
            data = {
                "rank": rank,
                "worker": pace.worker,
                "node": pulse.node if pulse else None,
                "step": step,
                "share": mean,
                "seconds": mean * pace.step_s,
                "over": not spell.told,
            }
            found.append(Finding(kind=SLOW, data=data))
        return found


def lost_share(pace: _Pace, others: Sequence[_Pace]) -> float:
    """The part of the step that all lose to one rank, 0 to 1: its own seconds beyond the longest fair share.

    Fair is the others' median pace; ranks may have unequal numbers of micro-batches, so paces are by token.
    """
    if not pace.tokens or not all(other.tokens for other in others):
        return 0.0
    usual_s = median(other.own_s / other.tokens for other in others)
    fair_s = usual_s * max(pace.tokens, *(other.tokens for other in others))
    return min(1.0, max(0.0, pace.own_s - fair_s) / pace.step_s)


def _pace(report: Mapping[str, Any]) -> _Pace:
    not_own_s = sum(report["seconds"].get(phase, 0.0) for phase in _NOT_OWN)
    own_s = max(0.0, report["step_s"] - not_own_s)
    return _Pace(report["worker"], own_s, report["tokens"], report["step_s"])
