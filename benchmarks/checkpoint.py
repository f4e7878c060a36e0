"""Checkpoints beside torch.distributed.checkpoint and plain files: bytes, speed, and the stall of a save.

    python -m benchmarks.checkpoint                       # everything; about a quarter of an hour on 2 cores
    python -m benchmarks.checkpoint --quick               # a minute or two: does it run?
    python -m benchmarks.checkpoint --only bytes          # one part of it: plan, bytes, speed, stall

Writes a dated table to benchmarks/results/, anew as figures come in, and ends with a line for each bar. Its
checkpoints lie in a folder below the system's temporary one (TMPDIR), up to 5 GB at a time, and are deleted.
Exits with 1 if a contestant failed, or loaded another state than it saved; a bar that is short is a result,
not a failure.
"""

import argparse
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import checkpoint_report
from benchmarks.checkpoint_bytes import share
from benchmarks.checkpoint_plan import measure_plans
from benchmarks.checkpoint_ranks import Done, Saved, StateDiffersError, load, load_all, preload, save
from benchmarks.checkpoint_results import (
    LOADED_AT,
    OURS,
    PEER,
    PLAIN,
    SAVE,
    SAVED_AT,
    STATE_BYTES,
    BytesResult,
    Grid,
    Results,
    SpeedResult,
    StallResult,
    Timed,
    load_title,
)
from benchmarks.checkpoint_stall import measure_stall
from benchmarks.elastic_bytes import gpt_layout
from benchmarks.first_touch import Touched, touch_memory
from benchmarks.probes import file_system, wait_until_quiet
from tests.distributed.ranks import RankFailedError
from zero_core import ZeroConfig
from zero_core.checkpoint.container import BLOCK_BYTES

RESULTS = Path(__file__).parent / "results"
PARTS = ("plan", "bytes", "speed", "stall")
SMALL, LARGE, QUICK = "10M", "124M", "1M"
MOST_RANKS, QUICK_RANKS = 9, 3
PEER_CELLS = ((4, 4), (4, 7), (1, 8))
STALL_RANKS = 2
"""Few enough for two cores, so that ranks do not wait for one another's copies."""


@dataclass(slots=True, kw_only=True)
class Session:
    """What a run of the benchmark has found so far, and where it writes it."""

    path: Path
    when: str
    touched: Touched
    folder: Path
    quiet_limit_s: float
    results: Results = field(default_factory=Results)

    def write(self) -> str:
        text = checkpoint_report.render(
            self.results,
            when=self.when,
            command=f"python -m benchmarks.checkpoint {shlex.join(sys.argv[1:])}".strip(),
            touched=self.touched,
            place=file_system(self.folder),
            missing="not in this run",
        )
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text(text, encoding="utf-8")
        return text


def main() -> int:
    options = _options()
    now = datetime.now(UTC)
    touched = touch_memory()
    print(touched, flush=True)
    preload()
    with tempfile.TemporaryDirectory(prefix="elastic-zero-bench-") as folder:
        session = Session(
            path=options.out or RESULTS / f"checkpoint-{now:%Y-%m-%d-%H%M}.md",
            when=f"{now:%Y-%m-%d %H:%M} UTC",
            touched=touched,
            folder=Path(folder),
            quiet_limit_s=0.5 if options.quick else 8.0,
        )
        large = QUICK if options.quick else LARGE
        if "plan" in options.only:
            wait_until_quiet(session.quiet_limit_s)
            session.results.plan = measure_plans(turns=options.turns)
        if "bytes" in options.only:
            if options.quick:
                _bytes(session, QUICK, range(1, QUICK_RANKS + 1), ((2, 3),))
            else:
                _bytes(session, SMALL, range(1, MOST_RANKS + 1), PEER_CELLS)
        if "speed" in options.only:
            _speed(session, large, rounds=options.rounds)
        if "stall" in options.only:
            _stall(session, large, rounds=options.rounds, turns=options.turns)
        print(session.write())
    return int(session.results.failed)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="of each contestant in speed, of the stall")
    parser.add_argument(
        "--turns", type=int, default=5, help="saves in a round of the stall after its first; plans"
    )
    parser.add_argument("--quick", action="store_true", help="one round, few turns and ranks, a small model")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=None, help="the table's file")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.turns = 1, 2
    if options.rounds < 1 or options.turns < 1:
        parser.error(f"--rounds {options.rounds} and --turns {options.turns} must be at least 1")
    return options


# -- bytes ------------------------------------------------------------------------------------------


def _bytes(session: Session, size: str, grid: Sequence[int], peer_cells: Sequence[tuple[int, int]]) -> None:
    """Every number of ranks saves once, and every number of ranks loads all of these."""
    result = session.results.read = BytesResult(size)
    everything = [(saved_at, loaded_at) for loaded_at in grid for saved_at in grid]
    for name, cells in ((OURS, everything), (PEER, peer_cells)):
        began = time.monotonic()
        with tempfile.TemporaryDirectory(dir=session.folder) as folder:
            try:
                result.cells[name] = _cells(name, size, cells, Path(folder))
            except (RankFailedError, StateDiffersError) as error:
                result.failures[name] = _last_line(error)
                print(f"bytes: {name} failed: {error}", flush=True)
            else:
                print(f"bytes: {name}, {len(cells)} cells, {time.monotonic() - began:.0f} s", flush=True)
        session.write()


def _cells(name: str, size: str, cells: Sequence[tuple[int, int]], folder: Path) -> list[Grid]:
    layout = gpt_layout(size, tile=ZeroConfig().tile)
    saved = {n: save(name, size, n, folder / f"{n}")[0] for n in sorted({n for n, _ in cells})}
    found = []
    for loaded_at in sorted({m for _, m in cells}):
        sources = [n for n, m in cells if m == loaded_at]
        dones = load_all(name, size, loaded_at, [saved[n] for n in sources])
        for saved_at, done in zip(sources, dones, strict=True):
            part = share(layout.at(saved_at), layout.at(loaded_at), block_bytes=BLOCK_BYTES)
            found.append(
                Grid(
                    saved_at=saved_at,
                    loaded_at=loaded_at,
                    read=done.read_bytes,
                    needed=part.needed,
                    rounding=part.rounding if name == OURS else 0,
                )
            )
    return found


# -- speed ------------------------------------------------------------------------------------------


def _speed(session: Session, size: str, *, rounds: int) -> None:
    layout = gpt_layout(size, tile=ZeroConfig().tile)
    rounding = {
        load_title(m): share(layout.at(SAVED_AT), layout.at(m), block_bytes=BLOCK_BYTES).rounding
        for m in LOADED_AT
    }
    result = session.results.speed = SpeedResult(size, layout.numel() * STATE_BYTES, rounding)
    for number in range(1, rounds + 1):
        with tempfile.TemporaryDirectory(dir=session.folder) as folder:
            _round(session, result, number, Path(folder))
        session.write()


def _round(session: Session, result: SpeedResult, number: int, folder: Path) -> None:
    """All save, then all load at each number of ranks; each time another one begins."""
    names = [OURS, PEER, PLAIN]
    saved: dict[str, Saved] = {}
    for place, ranks in enumerate((None, *LOADED_AT)):
        action = SAVE if ranks is None else load_title(ranks)
        turn = (number + place) % len(names)
        for name in names[turn:] + names[:turn]:
            if name in result.failures:
                continue
            try:
                if ranks is None:
                    os.sync()  # what was written or deleted before is no save's
                    busy = wait_until_quiet(session.quiet_limit_s)
                    saved[name], done = save(name, result.size, SAVED_AT, folder / name.lower())
                else:
                    _warm(saved[name].place)
                    busy = wait_until_quiet(session.quiet_limit_s)
                    done = load(name, result.size, ranks, saved[name])
            except (RankFailedError, StateDiffersError) as error:
                result.failures[name] = _last_line(error)
                print(f"{result.size} round {number}: {action}: {name} failed: {error}", flush=True)
                continue
            moved = done.written_bytes if ranks is None else done.read_bytes
            result.rounds.setdefault((name, action), []).append(_timed(done, moved, busy))
            print(f"{result.size} round {number}: {action}: {name} {done.seconds:.3f} s", flush=True)


def _timed(done: Done, moved_bytes: int, busy_cores: float) -> Timed:
    return Timed(
        seconds=done.seconds, moved_bytes=moved_bytes, extra_bytes=done.extra_bytes, busy_cores=busy_cores
    )


def _warm(folder: Path) -> None:
    """Have all its files in the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(8 << 20):
                    pass


# -- stall ------------------------------------------------------------------------------------------


def _stall(session: Session, size: str, *, rounds: int, turns: int) -> None:
    result = session.results.stall = StallResult(size, STALL_RANKS)
    for number in range(1, rounds + 1):
        busy = wait_until_quiet(session.quiet_limit_s)
        root = session.folder / f"stall-{number}"
        try:
            one = measure_stall(size, STALL_RANKS, root, turns=turns, busy_cores=busy)
        except RankFailedError as error:
            result.failure = _last_line(error)
            print(f"{size} round {number}: the stall failed: {error}", flush=True)
            break
        result.rounds.append(one)
        print(f"{size} round {number}: stall over copy {one.ratio:.3f}", flush=True)
        session.write()


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1][:200].replace("|", "/")


if __name__ == "__main__":
    sys.exit(main())
