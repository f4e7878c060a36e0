"""What the checkpoint benchmark makes of its figures: bytes that a load needs, ratios, what is missing."""

from dataclasses import dataclass, replace

import pytest

from benchmarks.checkpoint_bars import verdicts
from benchmarks.checkpoint_bytes import data_bytes, ranges, share
from benchmarks.checkpoint_report import render
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
    StallRound,
    Timed,
)
from benchmarks.first_touch import Touched
from zero_core.checkpoint.container import BLOCK_BYTES, rank_contents
from zero_core.layout import Layout, ParameterSpec, build_layout

SIZE = "1M"
TIMES_BARS = 6  # of saves and loads
TOUCHED = Touched(bytes=1 << 30, piece_bytes=1 << 30, seconds=[0.5])

Times = dict[str, list[float]]
"""Seconds of each round by action."""


@dataclass(frozen=True)
class Described:
    """What the package computes a file's contents from."""

    layout: Layout
    kinds: tuple[str, ...] = ("master", "momentum", "variance")
    precision: str = "fp32"
    block_bytes: int = BLOCK_BYTES


def layout(*sizes: int, tile: int = 2) -> Layout:
    """A unit of each size."""
    parameters = [ParameterSpec(f"u{i}.w", (size,)) for i, size in enumerate(sizes)]
    return build_layout(parameters, lambda name: name.split(".")[0], tile=tile, world_size=1)


@pytest.mark.parametrize("ranks", [1, 2, 4, 9])
def test_files_are_laid_out_as_the_package_lays_them_out(ranks: int) -> None:
    saved = layout(101, 3, 40).at(ranks)
    for rank in range(ranks):
        contents = rank_contents(Described(saved), rank)
        assert data_bytes(saved, rank) == contents.data_bytes
        own = [(start, stop) for _, start, stop in ranges(saved, saved, rank) if stop > start]
        assert own == [(entry.start, entry.stop) for entry in contents.entries]


def test_bytes_and_blocks_of_every_pair_of_numbers_of_ranks() -> None:
    """Against a walk over every single byte."""
    whole, block_bytes = layout(101, 3, 40), 64
    for saved in (whole.at(n) for n in range(1, 10)):
        sizes = [data_bytes(saved, source) for source in range(saved.world_size)]
        for loading in (whole.at(m) for m in range(1, 10)):
            needed = verified = 0
            covered = []
            for rank in range(loading.world_size):
                wanted = {
                    (source, byte)
                    for source, start, stop in ranges(saved, loading, rank)
                    for byte in range(start, stop)
                }
                covered += sorted(wanted)
                blocks = {(source, byte // block_bytes) for source, byte in wanted}
                needed += len(wanted)
                verified += sum(
                    min(block_bytes, sizes[source] - block * block_bytes) for source, block in blocks
                )
            found = share(saved, loading, block_bytes=block_bytes)
            assert (found.needed, found.needed + found.rounding) == (needed, verified)
            assert needed == whole.numel() * 12
            assert len(set(covered)) == needed == sum(sizes), "every byte of every file, once"


def test_nothing_is_rounded_where_every_rank_reads_its_own_file() -> None:
    found = share(layout(1000).at(3), layout(1000).at(3), block_bytes=128)
    assert (found.needed, found.rounding) == (12_000, 0)


def test_the_rounding_by_hand() -> None:
    # One file of 3 x 400 bytes in blocks of 256. Rank 0 has bytes 0-200, 400-600, 800-1000: blocks 0 to 3,
    # 1024 bytes. Rank 1 has 200-400, 600-800, 1000-1200: blocks 0 to 4, 1200 bytes.
    found = share(layout(100).at(1), layout(100).at(2), block_bytes=256)
    assert (found.needed, found.rounding) == (1200, 1024 + 1200 - 1200)


def cell(saved_at: int, loaded_at: int, *, read: int, rounding: int = 50) -> Grid:
    return Grid(saved_at=saved_at, loaded_at=loaded_at, read=read, needed=100, rounding=rounding)


def timed(seconds: float) -> Timed:
    return Timed(seconds=seconds, moved_bytes=1_500_000, extra_bytes=8_000_000, busy_cores=0.1)


def speed(ours: Times, peer: Times, plain: Times) -> SpeedResult:
    rounds = {
        (name, action): [timed(seconds) for seconds in times]
        for name, actions in ((OURS, ours), (PEER, peer), (PLAIN, plain))
        for action, times in actions.items()
    }
    return SpeedResult(SIZE, needed=1_000_000, rounding={LOADS[1]: 500_000}, rounds=rounds)


def outcomes(
    read: BytesResult | None = None, fast: SpeedResult | None = None, stall: StallResult | None = None
) -> dict[str, str]:
    return {v.name: v.outcome for v in verdicts(Results(read, fast, stall), missing="not in this run")}


def test_bytes_are_judged_by_the_worst_cell_less_its_rounding() -> None:
    cells = [cell(1, 1, read=100, rounding=0), cell(4, 7, read=151), cell(9, 8, read=180, rounding=80)]
    (_, _, line, *_) = verdicts(Results(BytesResult(SIZE, {OURS: cells})), missing="-")
    assert line.measured == "1.0100 (worst of 3 cells, at 4 -> 7; 1.00 to 1.80 with it)"
    assert line.outcome == "ok"
    assert line.name.startswith(f"{SIZE}, load, bytes read over bytes needed")
    (_, _, line, *_) = verdicts(
        Results(BytesResult(SIZE, {OURS: [*cells, cell(2, 3, read=152)]})), missing="-"
    )
    assert line.outcome == "short"


def test_what_the_system_did_not_see_is_not_taken_for_good() -> None:
    """Files read through a mapping are not counted: no read at all would look like the best of all loads."""
    (_, _, line, *_) = verdicts(Results(BytesResult(SIZE, {OURS: [cell(4, 7, read=149)]})), missing="-")
    assert line.outcome == ("not measured (the system counted less than the verified blocks hold at 4 -> 7)")


def test_times_are_compared_within_rounds_and_judged_by_the_median() -> None:
    # The second round was slow for all.
    ours = {LOADS[0]: [1.0, 10.0, 1.0], LOADS[1]: [1.0, 10.0, 1.2], SAVE: [1.0, 1.0, 1.0]}
    peer = {LOADS[0]: [1.1, 11.0, 0.9], LOADS[1]: [2.4, 26.0, 3.1], SAVE: [0.9, 0.9, 3.0]}
    plain = {LOADS[0]: [0.6, 6.0, 0.9], LOADS[1]: [0.7, 7.5, 0.1], SAVE: [0.7, 0.6, 0.6]}
    found = outcomes(fast=speed(ours, peer, plain))
    assert found[f"{SIZE}, {LOADS[1]}, times faster than {PEER}"] == "ok"
    assert found[f"{SIZE}, {LOADS[0]}, times faster than {PEER}"] == "ok"
    assert found[f"{SIZE}, {SAVE}, times faster than {PEER}"] == "short"
    assert found[f"{SIZE}, {SAVE}, time over a plain write of the same bytes"] == "short"
    assert found[f"{SIZE}, {LOADS[0]}, time over a plain read of the same bytes"] == "short"
    assert found[f"{SIZE}, {LOADS[1]}, time over a plain read of the same bytes"] == "ok"


@pytest.mark.parametrize(("theirs", "outcome"), [(2.49, "short"), (2.5, "ok")])
def test_the_load_by_more_ranks_has_to_be_two_and_a_half_times_faster(theirs: float, outcome: str) -> None:
    found = outcomes(fast=speed({LOADS[1]: [1.0]}, {LOADS[1]: [theirs]}, {}))
    assert found[f"{SIZE}, {LOADS[1]}, times faster than {PEER}"] == outcome


def stalled(stalls_s: list[float], copies_s: list[float]) -> StallRound:
    return StallRound(
        first_s=9.0,
        stalls_s=stalls_s,
        copies_s=copies_s,
        writes_s=[1.0] * len(stalls_s),
        shard_bytes=7_000_000,
        busy_cores=0.1,
    )


@pytest.mark.parametrize(("third", "outcome"), [(1.1, "ok"), (1.2, "short")])
def test_stalls_are_compared_with_the_copy_of_their_turn_and_the_first_save_is_apart(
    third: float, outcome: str
) -> None:
    rounds = [stalled([1.0, 1.05, 3.0], [1.0, 1.0, 1.0]), stalled([5.0], [2.5]), stalled([third], [1.0])]
    found = outcomes(stall=StallResult(SIZE, 2, rounds))
    assert found[f"{SIZE} N=2, asynchronous save, stall over one copy of the shard"] == outcome


PLANNED = PlanResult(
    saved_at=2_048,
    parameters=1_000,
    manifest_bytes=120_000,
    reads_s=[0.02, 0.03, 0.02],
    plans_s={1_024: [0.009, 0.009, 0.2], 2_047: [0.02, 0.04, 0.03]},
)


def test_plans_are_judged_by_the_slowest_one() -> None:
    plan, manifest, *_ = verdicts(Results(plan=PLANNED), missing="-")
    name = "N = 2,048 and 1,000 parameters, plan of one rank"
    assert plan.line() == f"{name}: 30.0 ms (worst of 9.0 30.0); required under 50.0 ms: ok"
    assert manifest.line().endswith("manifest: 0.120 MB; required under 1.000 MB: ok")
    slow = replace(PLANNED, plans_s={64: [0.05]}, manifest_bytes=1_000_000)
    assert [line.outcome for line in verdicts(Results(plan=slow), missing="-")[:2]] == ["short", "short"]


def test_what_is_missing_has_its_reason() -> None:
    assert set(outcomes().values()) == {"not measured (not in this run)"}
    alone = replace(speed({SAVE: [1.0]}, {}, {SAVE: [1.0]}), failures={PEER: "it died"})
    found = outcomes(fast=alone)
    assert found[f"{SIZE}, {SAVE}, times faster than {PEER}"] == "not measured (it died)"
    assert found[f"{SIZE}, {SAVE}, time over a plain write of the same bytes"] == "ok"
    found = outcomes(BytesResult(SIZE, failures={OURS: "gone"}), stall=StallResult(SIZE, 2, failure="stuck"))
    assert list(found.values())[2] == "not measured (gone)"
    assert list(found.values())[-1] == "not measured (stuck)"


def test_the_page_lists_everything_and_ends_with_a_line_for_every_bar() -> None:
    read = BytesResult(
        SIZE, {OURS: [cell(1, 1, read=100, rounding=0), cell(1, 8, read=151)], PEER: [cell(1, 8, read=800)]}
    )
    fast = speed({SAVE: [1.0, 2.0]}, {SAVE: [2.0, 6.0]}, {SAVE: [0.8, 1.0]})
    stall = StallResult(SIZE, 2, [stalled([0.105, 0.105], [0.1, 0.1])])
    page = render(
        Results(read, fast, stall, PLANNED),
        when="now",
        command="this",
        touched=TOUCHED,
        place="ext4",
        missing="-",
    ).splitlines()
    assert f"| {SAVE} | {OURS} | 1.500 | 1.000 2.000 | 0.42 | 1.62 | 1.5 | 1.500 | 8 | 0.1 0.1 |" in page
    assert f"| {SAVE} | {PLAIN} | 0.900 | 0.800 1.000 | 0.28 | - | 1.5 | 1.500 | 8 | 0.1 0.1 |" in page
    assert f"Rounding to blocks of {OURS}, over needed: {LOADS[1]} 0.50." in page
    assert "| 1 | 7 | 9000 | 105 105 | 100 100 | 1.050 | 1.00 | 0.1 |" in page
    assert "| 1 | 1.000 (1.0000) | 1.510 (1.0100) |" in page
    assert "| 2,047 | 30.0 | 20.0 40.0 30.0 |" in page
    assert "| 1 -> 8 | 8.000 | 1.510 (1.0100) |" in page
    lines = page[page.index("## Bars") + 2 :]
    assert len(lines) == 2 + 1 + TIMES_BARS + 1
    assert all(line.endswith((": ok", ": short", ")")) for line in lines)
