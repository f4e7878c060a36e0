"""What is required of the engine, and whether a run's figures meet it. Pure: figures in, verdicts out.

Ratios of time are taken within a round, between contestants that ran minutes apart at most, and their median
over rounds is judged. A bar is judged in every cell that was measured, by the worst.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.plan import PRECISIONS, Run
from benchmarks.results import BASE, FLOOR, CellResult, WireResult

RESHARD = "fsdp2 reshard"


@dataclass(frozen=True, slots=True)
class RunResult:
    """The rounds of every contestant of a run, by name; one that failed has a reason instead."""

    run: Run
    rounds: dict[str, list[CellResult]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def times(self, slower: str, faster: str) -> float | None:
        """How many times the speed of `slower` that of `faster` is; None where one of them is missing."""
        pairs = zip(self.rounds.get(slower, ()), self.rounds.get(faster, ()), strict=False)
        ratios = [a.step_s / b.step_s for a, b in pairs]
        return statistics.median(ratios) if ratios else None

    def peak_bytes(self, name: str) -> float | None:
        rounds = self.rounds.get(name)
        return statistics.median(r.peak_bytes for r in rounds) if rounds else None


@dataclass(frozen=True, slots=True)
class Verdict:
    """One bar: what was measured in each cell as text, `ok`, `short`, or `not measured` with the reason."""

    name: str
    measured: str
    required: str
    outcome: str

    def line(self) -> str:
        return f"{self.name}: {self.measured}; required {self.required}: {self.outcome}"


Measure = Callable[[RunResult], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A figure of a run that must reach, or not exceed, `required`.

    needs    the contestants it compares
    ceiling  what the floor itself would have, the most that any engine could reach; None: not told
    least    what the figure cannot be below; a cell where it is was disturbed, and is not judged
    """

    name: str
    precision: str
    required: float
    at_least: bool
    measure: Measure
    needs: tuple[str, ...]
    ceiling: Measure | None = None
    least: float | None = None
    only_world_size: int | None = None
    decimals: int = 2

    def judge(self, runs: Sequence[RunResult], absent: Mapping[str, str]) -> Verdict:
        required = f"{'at least' if self.at_least else 'at most'} {self.required:.{self.decimals}f}"
        found: list[float] = []
        texts: list[str] = []
        reasons: list[str] = []
        failed: list[str] = []
        for result in runs:
            if result.run.precision != self.precision or self._elsewhere(result.run):
                continue
            reasons += [absent[name] for name in self.needs if name in absent]
            value = self.measure(result)
            if value is None:
                broken = [result.failures[name] for name in self.needs if name in result.failures]
                reasons += broken
                failed += [f"{result.run.where}: {reason}" for reason in broken]
                continue
            limit = self.ceiling(result) if self.ceiling is not None else None
            note = f" of at most {limit:.2f}" if limit is not None else ""
            if self.least is not None and value < self.least:
                note += f", below {self.least:g}: disturbed"
                reasons.append("every cell was disturbed")
            else:
                found.append(value)
            texts.append(f"{value:.{self.decimals}f}{note} ({result.run.where})")
        measured = ", ".join(texts) or "nothing"
        if not found:
            reason = reasons[0] if reasons else "not in this run"
            return Verdict(self.name, measured, required, f"not measured ({reason})")
        short = min(found) < self.required if self.at_least else max(found) > self.required
        whole = f"not measured everywhere ({failed[0]})" if failed else "ok"
        return Verdict(self.name, measured, required, "short" if short else whole)

    def _elsewhere(self, run: Run) -> bool:
        return self.only_world_size is not None and run.world_size != self.only_world_size


def bars() -> list[Bar]:
    """All that are judged by runs, in the order of the engine's requirements."""
    return [bar for precision in PRECISIONS for bar in (*_speed(precision), *_memory(precision))]


def _speed(precision: str) -> list[Bar]:
    over_base = {"fp32": {1: 1.2, 2: 1.2, 3: 1.0}, "bf16": {1: 1.3, 2: 1.3, 3: 1.1}}[precision]
    peer = "DDP" if precision == "fp32" else "DDP with fp32 master"
    found = [_faster(precision, stage, BASE, peer, required) for stage, required in over_base.items()]
    found.append(_faster(precision, 3, RESHARD, "FSDP2 with reshard", 1.5))
    found += [_faster(precision, s, f"deepspeed {s}", f"DeepSpeed stage {s}", 1.3) for s in (1, 2, 3)]
    for stage, required in {1: 1.15, 2: 1.15, 3: 1.4}.items():
        ours = f"stage {stage}"
        found.append(
            Bar(
                name=f"{precision} stage {stage}, step time over the floor's at N=2",
                precision=precision,
                required=required,
                at_least=False,
                measure=lambda result, ours=ours: result.times(ours, FLOOR),
                needs=(ours, FLOOR),
                least=1.0,
                only_world_size=2,
            )
        )
    return found


def _faster(precision: str, stage: int, peer: str, peer_title: str, required: float) -> Bar:
    ours = f"stage {stage}"
    return Bar(
        name=f"{precision} stage {stage}, tokens/s over {peer_title}",
        precision=precision,
        required=required,
        at_least=True,
        measure=lambda result: result.times(peer, ours),
        needs=(peer, ours),
        ceiling=lambda result: result.times(peer, FLOOR),
    )


def _memory(precision: str) -> list[Bar]:
    pairs = [(3, RESHARD, "FSDP2 with reshard")]
    pairs += [(stage, f"deepspeed {stage}", f"DeepSpeed stage {stage}") for stage in (1, 2, 3)]
    found = []
    for stage, peer, title in pairs:
        ours = f"stage {stage}"
        found.append(
            Bar(
                name=f"{precision} stage {stage}, peak memory over {title}'s",
                precision=precision,
                required=1.0,
                at_least=False,
                measure=lambda result, ours=ours, peer=peer: _quotient(
                    result.peak_bytes(ours), result.peak_bytes(peer)
                ),
                needs=(peer, ours),
            )
        )
    for stage in (0, 1, 2, 3):
        ours = f"stage {stage}"
        found.append(
            Bar(
                name=f"{precision} stage {stage}, model states, bytes off formula and prediction",
                precision=precision,
                required=0.0,
                at_least=False,
                measure=lambda result, stage=stage: _states_off(result, stage),
                needs=(ours,),
                decimals=0,
            )
        )
    return found


def _quotient(value: float | None, by: float | None) -> float | None:
    return value / by if value is not None and by is not None else None


def states_formula(stage: int, precision: str, world_size: int, psi: int) -> int:
    """Bytes of model states over all ranks, one micro-batch a rank (ZeRO, arXiv 1910.02054, section 5).

    bf16: 16, 4 + 12/N, 2 + 14/N and 16/N bytes for each parameter and rank. fp32 has no separate master:
    16, 8 + 8/N, 4 + 12/N and 16/N.
    """
    item = 4 if precision == "fp32" else 2
    whole = {0: 16, 1: 2 * item, 2: item, 3: 0}[stage]
    return psi * (world_size * whole + 16 - whole)


def _states_off(result: RunResult, stage: int) -> float | None:
    """What was measured against the formula and the prediction: the larger distance, all ranks, bytes."""
    rounds = result.rounds.get(f"stage {stage}")
    if not rounds or rounds[-1].model_states is None:
        return None
    measured, predicted = rounds[-1].model_states
    formula = states_formula(stage, result.run.precision, result.run.world_size, rounds[-1].parameters)
    return float(max(abs(measured - formula), abs(measured - predicted)))


def judge_wire(wire: Sequence[WireResult], why_not: str) -> list[Verdict]:
    """For each precision and stage: the interface against the formula, the ledger against the interface."""
    found = []
    for precision in PRECISIONS:
        for stage in (0, 1, 2, 3):
            mine = [w for w in wire if (w.precision, w.stage) == (precision, stage)]
            volume = f"{3 if stage == 3 else 2} psi (N-1)/N"
            for name, figure in (
                (f"interface's bytes over {volume}", lambda w: w.counted / w.promised),
                ("ledger's bytes over the interface's payload", lambda w: w.ledger / w.payload),
            ):
                values = [(figure(w), f"{figure(w):.4f} ({w.size} N={w.world_size})") for w in mine]
                short = any(abs(value - 1) > 0.02 for value, _ in values)
                outcome = ("short" if short else "ok") if values else f"not measured ({why_not})"
                measured = ", ".join(text for _, text in values) or "nothing"
                found.append(
                    Verdict(f"{precision} stage {stage}, {name}", measured, "within 2% of 1", outcome)
                )
    return found
