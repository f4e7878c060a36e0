"""The engine's stages beside DDP, ZeroRedundancyOptimizer, FSDP2 and DeepSpeed, in interleaved rounds.

    python -m benchmarks.engine                       # everything; over an hour on 2 cores
    python -m benchmarks.engine --plan short          # as much of it as fits 25 minutes
    python -m benchmarks.engine --quick               # a minute: does it run?
    python -m benchmarks.engine --runs fp32:50M:2:3:8 --contestants ddp 'stage 2' floor --no-wire

Writes a dated table to benchmarks/results/, anew after every round, and ends with a line for each bar. As
root the ranks run in a network namespace of their own, so that its loopback counts nothing else, and bytes
on the wire are measured between namespaces. Exits with 1 if a contestant failed or losses disagree; a bar
that is short is a result, not a failure.
"""

import argparse
import random
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import deepspeed_peer, report, wire
from benchmarks.bars import RunResult
from benchmarks.first_touch import Touched, touch_memory
from benchmarks.measure import measure, preload, prepare_deepspeed
from benchmarks.plan import PRECISIONS, Run, plans
from benchmarks.probes import wait_until_quiet
from benchmarks.results import BASE, WireResult, names
from tests.distributed.namespaces import Host, one_host
from tests.distributed.ranks import RankFailedError

RESULTS = Path(__file__).parent / "results"
_QUIET_LIMIT_S = 8.0


@dataclass(slots=True, kw_only=True)
class Session:
    """What a run of the benchmark has found so far, and where it writes it."""

    host: Host | None
    path: Path
    when: str
    touched: Touched
    absent: dict[str, str] = field(default_factory=dict)
    no_wire: str = "not in this run"
    notes: list[str] = field(default_factory=list)
    results: list[RunResult] = field(default_factory=list)
    on_wire: list[WireResult] = field(default_factory=list)

    def write(self) -> str:
        text = report.render(
            self.results,
            self.on_wire,
            when=self.when,
            command=f"python -m benchmarks.engine {shlex.join(sys.argv[1:])}".strip(),
            touched=self.touched,
            absent=self.absent,
            no_wire=self.no_wire,
            notes=self.notes,
        )
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text(text, encoding="utf-8")
        return text


def main() -> int:
    options = _options()
    runs, cells = plans()["quick" if options.quick else options.plan]
    if options.runs:
        runs = options.runs
    runs = [run for run in runs if run.precision in options.precisions]
    cells = [cell for cell in cells if cell[0] in options.precisions]
    now = datetime.now(UTC)
    touched = touch_memory()
    print(touched, flush=True)
    preload()
    with ExitStack() as stack:
        reason = wire.why_not()
        session = Session(
            host=stack.enter_context(one_host()) if reason is None else None,
            path=options.out or RESULTS / f"engine-{now:%Y-%m-%d-%H%M}.md",
            when=f"{now:%Y-%m-%d %H:%M} UTC",
            touched=touched,
        )
        if reason is not None:
            session.notes.append(f"The loopback's bytes may include others': {reason}.")
        _find_deepspeed(session, options.contestants)
        for run in runs:
            _run(session, run, options.contestants)
        if reason is not None or options.no_wire:
            session.no_wire = reason or "--no-wire"
        else:
            _wire(session, cells)
        print(session.write())
    failed = any(result.failures for result in session.results) or "failed" in session.no_wire
    disagree = any(True for result in session.results for _ in report.losses_off(result))
    return int(failed or disagree)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    all_names = list(dict.fromkeys(name for precision in PRECISIONS for name in names(precision)))
    parser.add_argument("--plan", choices=sorted(plans()), default="full")
    parser.add_argument("--quick", action="store_true", help="the same as --plan quick")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument(
        "--runs",
        nargs="+",
        type=Run.parse,
        metavar="PRECISION:SIZE:RANKS:ROUNDS:STEPS",
        help="instead of the plan's; sizes 1M, 10M, 50M and 124M",
    )
    parser.add_argument(
        "--contestants", nargs="+", choices=all_names, default=all_names, metavar="NAME", help=str(all_names)
    )
    parser.add_argument("--no-wire", action="store_true", help="leave out the wire runs")
    parser.add_argument("--out", type=Path, default=None, help="the table's file")
    return parser.parse_args()


def _find_deepspeed(session: Session, chosen: list[str]) -> None:
    """Whether it is there and runs; if not, its rows are left out and a note says why."""
    wanted = [name for name in chosen if name.startswith("deepspeed")]
    if not wanted:
        return
    reason = None
    if deepspeed_peer.version() is None:
        reason = "deepspeed is not installed: see docs/benchmarks.md"
    else:
        print("deepspeed: compiling its ops, if that has not been done before", flush=True)
        try:
            prepare_deepspeed(session.host)
        except RankFailedError as error:
            print(error, flush=True)
            reason = f"deepspeed {deepspeed_peer.version()} does not run here: {_last_line(error)}"
    if reason is not None:
        session.absent |= dict.fromkeys(wanted, reason.partition(":")[0])
        session.notes.append(f"DeepSpeed's rows are left out: {reason}.")
        print(reason, flush=True)


def _run(session: Session, run: Run, chosen: list[str]) -> None:
    result = RunResult(run)
    session.results.append(result)
    for number in range(1, run.rounds + 1):
        for name in _order(run, number, chosen):
            if name in session.absent or name in result.failures:
                continue
            wait_until_quiet(_QUIET_LIMIT_S)
            began = time.monotonic()
            try:
                cell = measure(run, name, session.host)
            except RankFailedError as error:
                result.failures[name] = _last_line(error)
                result.rounds.pop(name, None)
                print(f"{run.title} round {number}: {name} failed: {error}", flush=True)
                continue
            result.rounds.setdefault(name, []).append(cell)
            print(
                f"{run.title} round {number}: {name} {cell.step_s * 1e3:.0f} ms a step, "
                f"{time.monotonic() - began:.0f} s in all, others {cell.foreign_cores:.2f} cores",
                flush=True,
            )
        session.write()


def _order(run: Run, number: int, chosen: list[str]) -> Iterator[str]:
    """DDP first, which ratios refer to; the rest shuffled, so that no one always follows the same."""
    present = [name for name in names(run.precision) if name in chosen]
    rest = [name for name in present if name != BASE]
    random.Random(number).shuffle(rest)
    yield from [name for name in present if name == BASE] + rest


def _wire(session: Session, cells: list[tuple[str, str, int]]) -> None:
    for precision, size, world_size in cells:
        print(f"wire: {precision}, {size} N={world_size}", flush=True)
        try:
            session.on_wire += wire.measure_wire(precision, size, world_size)
        except RankFailedError as error:
            print(error, flush=True)
            session.no_wire = f"{precision}, {size} N={world_size} failed"
            session.notes.append(f"Wire run of {session.no_wire}: {_last_line(error)}.")
        session.write()


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1][:200].replace("|", "/")


if __name__ == "__main__":
    sys.exit(main())
