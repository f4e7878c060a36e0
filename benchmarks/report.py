"""The dated table: figures in, Markdown out. Also what the machine is, and whether losses agree."""

import importlib.metadata
import math
import os
import platform
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks import deepspeed_peer
from benchmarks.bars import RunResult, Verdict, bars, judge_wire, states_formula
from benchmarks.first_touch import Touched
from benchmarks.plan import MICRO_BATCH, SEQUENCE, bf16_flags
from benchmarks.results import BASE, FLOOR, CellResult, WireResult, names

_PHASES = ("forward", "backward", "reduce", "gather", "control", "optimizer", "idle")
_MB = 1e6

_METHOD = """\
One thread per rank, micro-batch {micro_batch} x {sequence}, one micro-batch a rank and step, AdamW. Rounds
are interleaved: each runs every contestant once, in fresh processes, DDP first and the rest in an order that
changes. A step's time is the mean over ranks, then the median over steps, then over rounds; ratios are taken
within a round. bf16 contestants keep fp32 masters; "ddp" is then DDP on bf16 parameters with the masters kept
by hand. "floor": the same forward and backward without communication, AdamW on 1/N of the state.

In bf16 our stages and the floor compute products as the engine does by default: on a CPU without instructions
for bf16 widened to fp32, and rounded once. Peers run as their documentation shows, with torch's own products,
which are about ten times slower there, so most of what parts them from us in bf16 is this, not the exchange.
"stage 2 native" is stage 2 with torch's own products: beside DDP and the other peers it shows the exchange
alone.

Memory is the proportional set size beyond that before the model was built, worst rank, allocators at their
defaults, sampled every 2 ms by a thread in steps after the timed ones, for every contestant alike. Bytes are
those of a rank and step; psi is the number of parameters. "others": cores busy with anything else."""


def losses_off(result: RunResult) -> Iterator[str]:
    """What disagrees with DDP's losses, and by how much."""
    base = result.rounds.get(BASE)
    if not base:
        return
    for name in names(result.run.precision):
        rounds = result.rounds.get(name)
        if not rounds or name == FLOOR:  # the floor leaves parameters as they were
            continue
        pairs = [p for a, b in zip(base, rounds, strict=False) for p in zip(a.losses, b.losses, strict=True)]
        apart = [abs(theirs - reference) / reference for reference, theirs in pairs]
        worst = max(math.inf if math.isnan(value) else value for value in apart)
        allowed = _tolerance(name, result.run.precision)
        if worst > allowed:
            yield (
                f"{result.run.title}: losses of {name} are off DDP's by {worst:.1e} relative, "
                f"more than {allowed:.0e}"
            )


def _tolerance(name: str, precision: str) -> float:
    if precision == "fp32":
        return 1e-4
    # DeepSpeed takes its fp32 masters from weights that were rounded to bf16 before.
    return 6e-2 if name.startswith("deepspeed") else 2e-2


def render(
    results: Sequence[RunResult],
    wire: Sequence[WireResult],
    *,
    when: str,
    command: str,
    touched: Touched,
    absent: Mapping[str, str],
    no_wire: str,
    notes: Sequence[str],
) -> str:
    """The whole page; its last lines are the bars."""
    lines = [
        f"# Engines side by side, {when}",
        "",
        *machine(_deepspeed(), touched),
        f"Command: `{command}`",
        "",
        *notes,
        "",
    ]
    lines += _METHOD.format(micro_batch=MICRO_BATCH, sequence=SEQUENCE).splitlines()
    for result in results:
        lines += _table(result)
        lines += _phases(result)
    lines += _wire_table(wire)
    off = [line for result in results for line in losses_off(result)]
    lines += ["", "## Losses", "", *(off or ["All agree with DDP's of the same precision, every step."])]
    lines += ["", "## Bars", "", "A bar is judged in each cell that was measured, by the worst.", ""]
    lines += [f"- {verdict.line()}" for verdict in verdicts(results, wire, absent=absent, no_wire=no_wire)]
    return "\n".join(lines) + "\n"


def verdicts(
    results: Sequence[RunResult], wire: Sequence[WireResult], *, absent: Mapping[str, str], no_wire: str
) -> list[Verdict]:
    return [bar.judge(results, absent) for bar in bars()] + judge_wire(wire, no_wire)


def machine(peer: str, touched: Touched) -> list[str]:
    """What it ran on, in a few lines. peer: the name and version of what it is compared with."""
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.split(":")[1].strip() for line in cpuinfo if line.startswith("model name")), "?")
    flags = next((line for line in cpuinfo if line.startswith("flags")), "").split()
    vectors = [flag for flag in ("avx2", "avx512f") if flag in flags]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    bf16 = sorted(bf16_flags())
    own = (
        ", ".join(bf16) if bf16 else "none: torch's own bf16 products are about ten times slower than fp32's"
    )
    return [
        f"{os.cpu_count()} cores of {model} ({platform.machine()}; {', '.join(vectors)}; bf16 instructions: "
        f"{own}), {memory:.0f} GiB, Linux {platform.release()}.",
        f"Python {platform.python_version()}, torch {importlib.metadata.version('torch')}, {peer}.",
        str(touched),
    ]


def _deepspeed() -> str:
    version = deepspeed_peer.version()
    return f"DeepSpeed {version}" if version else "DeepSpeed not installed: its rows are left out"


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


def _table(result: RunResult) -> list[str]:
    run = result.run
    lines = [
        "",
        f"## {run.title} ({run.rounds} x {run.steps} steps)",
        "",
        "| engine | step, ms (range) | over DDP | over floor | tokens/s | interface / 4 psi | ledger / 4 psi "
        "| peak MB | building, MB | model states, MB (formula) | others | last loss |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in _names(result):
        lines.append("| " + " | ".join(_row(result, name, result.rounds[name])) + " |")
    lines += [f"| {name} | failed: {reason} |" + " |" * 10 for name, reason in result.failures.items()]
    return lines


def _names(result: RunResult) -> list[str]:
    """Those that were measured, in one order whatever the round's was."""
    return [name for name in names(result.run.precision) if name in result.rounds]


def _row(result: RunResult, name: str, rounds: list[CellResult]) -> Iterator[str]:
    run, last = result.run, rounds[-1]
    times_ms = [r.step_s * 1e3 for r in rounds]
    step_ms, psi = _median(times_ms), last.parameters
    yield name
    yield f"{step_ms:.0f} ({min(times_ms):.0f}-{max(times_ms):.0f})"
    for reference in (BASE, FLOOR):
        ratio = result.times(name, reference)
        yield "-" if ratio is None else f"{ratio:.2f}"
    yield f"{run.world_size * MICRO_BATCH * SEQUENCE / step_ms * 1e3:.0f}"
    yield f"{_median([r.wire_bytes for r in rounds]) / (4 * psi):.3f}"
    yield "-" if last.ledger_bytes is None else f"{last.ledger_bytes / (4 * psi):.3f}"
    yield f"{_median([r.peak_bytes for r in rounds]) / _MB:.0f}"
    yield f"{_median([r.building_bytes for r in rounds]) / _MB:.0f}"
    if last.model_states is None:
        yield "-"
    else:
        stage = int(name.split()[1])
        formula = states_formula(stage, run.precision, run.world_size, psi) / run.world_size / _MB
        yield f"{last.model_states[0] / run.world_size / _MB:.2f} ({formula:.2f})"
    yield f"{max(r.foreign_cores for r in rounds):.2f}"
    yield f"{last.losses[-1]:.5f}"


def _phases(result: RunResult) -> list[str]:
    """Mean milliseconds of a step by phase, of the engine, the floor and DDP."""
    told = [n for n in _names(result) if n in (BASE, FLOOR) or n.startswith("stage")]
    if not told:
        return []
    seen = {phase for name in told for cell in result.rounds[name] for phase in cell.seconds}
    phases = [p for p in _PHASES if p in seen] + sorted(seen - set(_PHASES))
    title = f"{result.run.title}; mean over steps and ranks; waiting for a peer counts where it happens"
    lines = ["", f"Milliseconds of a step by phase ({title}):", ""]
    lines += [f"| engine | {' | '.join(phases)} | rest |", "|---" * (len(phases) + 2) + "|"]
    for name in told:
        rounds = result.rounds[name]
        means = [_median([r.seconds.get(phase, 0.0) for r in rounds]) for phase in phases]
        rest = _median([r.step_s for r in rounds]) - sum(means)
        lines.append(f"| {name} | " + " | ".join(f"{s * 1e3:.1f}" for s in [*means, rest]) + " |")
    return lines


def _wire_table(wire: Sequence[WireResult]) -> list[str]:
    if not wire:
        return []
    lines = [
        "",
        "## Bytes on the wire, ranks on separate hosts (network namespaces)",
        "",
        "| cell | stage | interface / promised | payload / promised | ledger / promised | promised, MB |",
        "|---|---|---|---|---|---|",
    ]
    for w in wire:
        ratios = " | ".join(f"{value / w.promised:.4f}" for value in (w.counted, w.payload, w.ledger))
        cell = f"{w.precision}, {w.size} N={w.world_size}"
        lines.append(f"| {cell} | {w.stage} | {ratios} | {w.promised / _MB:.2f} |")
    return lines
