"""What the elastic benchmark makes of its figures: pauses from times of steps, ratios, what is missing."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.elastic_bars import verdicts
from benchmarks.elastic_bytes import bytes_needed, gpt_layout
from benchmarks.elastic_model import SCALAR, build_model
from benchmarks.elastic_report import render
from benchmarks.elastic_results import OURS, PEER, ReplicaResult, Round, SizeResult
from benchmarks.elastic_timeline import (
    GROW,
    KILL,
    SHRINK,
    Change,
    StepRow,
    newest,
    recovered,
    resized,
    steps_done,
)
from benchmarks.first_touch import Touched
from benchmarks.limits import Limit, judged
from zero_core.layout import ParameterSpec, build_layout

LARGE = "1M"
TOUCHED = Touched(bytes=1 << 30, piece_bytes=1 << 30, seconds=[0.5])


def rows(
    generation: int, world_size: int, steps: range, *, began_s: float, late_s: float = 0.0
) -> list[StepRow]:
    """Steps of a second each. The last rank begins and ends `late_s` after the others."""
    return [
        StepRow(
            generation=generation,
            step=step,
            rank=rank,
            world_size=world_size,
            began_s=began_s + place + (late_s if rank == world_size - 1 else 0.0),
            ended_s=began_s + place + 1.0 + (late_s if rank == world_size - 1 else 0.0),
        )
        for place, step in enumerate(steps)
        for rank in range(world_size)
    ]


def test_a_pause_lasts_from_the_latest_end_to_the_latest_begin() -> None:
    old = rows(7, 2, range(1, 4), began_s=0.0, late_s=0.25)
    new = rows(9, 4, range(4, 5), began_s=5.0, late_s=0.5)
    change = resized(old + new, old=7)
    assert change is not None
    assert (change.kind, change.generation, change.old_workers, change.new_workers) == (GROW, 9, 2, 4)
    assert change.seconds == pytest.approx(5.5 - 3.25)
    assert change.steps_repeated == 0
    assert newest(old + new) == 9
    assert resized(new, old=9) is None


def test_a_pause_is_not_over_before_every_rank_has_done_a_step() -> None:
    old, new = rows(1, 4, range(1, 3), began_s=0.0), rows(2, 2, range(3, 4), began_s=3.0)
    assert resized(old + new[:1], old=1) is None
    change = resized(old + new, old=1)
    assert change is not None
    assert (change.kind, change.seconds) == (SHRINK, pytest.approx(1.0))
    assert steps_done(old + new[:1], generation=1) == 2
    assert steps_done(old + new[:1], generation=2) == 0


def test_a_restart_from_an_older_step_repeats_what_came_after_it() -> None:
    change = resized(rows(1, 4, range(1, 9), began_s=0.0) + rows(2, 2, range(6, 7), began_s=20.0), old=1)
    assert change is not None
    assert change.steps_repeated == 3


def test_a_recovery_ends_with_the_first_step_that_was_not_completed_before() -> None:
    old, new = rows(1, 4, range(1, 6), began_s=0.0), rows(2, 3, range(5, 8), began_s=10.0, late_s=0.5)
    assert recovered(old, old=1, killed_at_s=4.5) is None
    assert recovered(old + new[:3], old=1, killed_at_s=4.5) is None, "step 5 again is no new step"
    change = recovered(old + new, old=1, killed_at_s=4.5)
    assert change is not None
    assert (change.kind, change.old_workers, change.new_workers) == (KILL, 4, 3)
    assert change.seconds == pytest.approx(12.5 - 4.5)
    assert change.steps_repeated == 1


def test_a_step_that_only_some_ranks_finished_before_the_kill_is_not_new_afterwards() -> None:
    old = rows(1, 2, range(1, 3), began_s=0.0)[:-1]  # one rank died in step 2, the other had finished it
    change = recovered(old + rows(2, 1, range(2, 4), began_s=4.0), old=1, killed_at_s=2.0)
    assert change is not None
    assert (change.seconds, change.steps_repeated) == (pytest.approx(4.0), 1)


def test_a_group_that_was_lost_before_it_did_a_new_step_is_passed_over() -> None:
    lost = rows(2, 3, range(2, 3), began_s=5.0)
    good = rows(3, 3, range(3, 4), began_s=8.0)
    change = recovered(rows(1, 4, range(1, 3), began_s=0.0) + lost + good, old=1, killed_at_s=2.0)
    assert change is not None
    assert (change.seconds, change.generation, change.steps_repeated) == (pytest.approx(7.0), 2, 1)


def test_bytes_that_ranks_lack_by_hand() -> None:
    layout = build_layout([ParameterSpec("w", (800,))], lambda _: "", tile=100, world_size=1)
    # 2 -> 4: rank 0 keeps 200; 200 come to each of the others from another. Two joiners lack 800 values.
    grow = {stage: bytes_needed(layout, stage=stage, old_workers=2, new_workers=4) for stage in (0, 1, 2, 3)}
    assert grow == {0: 2 * 800 * 12, 1: 600 * 8 + 2 * 800 * 4, 2: 600 * 8 + 2 * 800 * 4, 3: 600 * 12}
    # 4 -> 2: rank 0 lacks 200, rank 1 all of its 400; nobody joins.
    shrink = {stage: bytes_needed(layout, stage=stage, old_workers=4, new_workers=2) for stage in (0, 2, 3)}
    assert shrink == {0: 0, 2: 600 * 8, 3: 600 * 12}


def test_the_layout_is_that_of_the_model_that_is_trained() -> None:
    elements = sum(parameter.numel() for parameter in build_model(LARGE).parameters())
    assert gpt_layout(LARGE, tile=256).numel() == elements


def change(kind: str, seconds: float, **other: Any) -> Change:
    old, new = {GROW: (2, 4), SHRINK: (4, 2), KILL: (4, 3)}[kind]
    plain = Change(
        kind=kind, generation=2, seconds=seconds, steps_repeated=0, old_workers=old, new_workers=new
    )
    return replace(plain, **other)


def result(size: str, ours: list[list[Change]], theirs: list[list[Change]]) -> SizeResult:
    def as_rounds(changes: list[list[Change]]) -> list[Round]:
        return [Round(changes={c.kind: c for c in one}, busy_cores=0.1) for one in changes]

    return SizeResult(size, {OURS: as_rounds(ours), PEER: as_rounds(theirs)})


def outcomes(*results: SizeResult, replicas: ReplicaResult | None = None, **absent: str) -> dict[str, str]:
    return {v.name: v.outcome for v in verdicts(results, replicas, large=LARGE, absent=absent)}


def line(name: str, *results: SizeResult) -> str:
    found = verdicts(results, None, large=LARGE, absent={})
    return next(v.line() for v in found if v.name == name)


def test_pauses_are_judged_by_their_median_and_ratios_within_rounds() -> None:
    # The second round was slow for both; the ratio in it is as in the others.
    ours = [[change(GROW, s)] for s in (0.5, 2.0, 0.6)]
    theirs = [[change(GROW, s)] for s in (5.0, 20.0, 6.0)]
    found = result(LARGE, ours, theirs)
    name = f"{LARGE}, pause of grow 2 -> 4"
    assert line(name, found) == f"{name}: 0.60 s (median of 0.50 2.00 0.60); required under 1.00 s: ok"
    name = f"{LARGE}, grow 2 -> 4, times shorter than Ray Train's"
    assert line(name, found) == f"{name}: 10.00 (median of 10.00 10.00 10.00); required at least 8.00: ok"


def test_a_limit_that_is_to_be_kept_under_is_not_met_by_itself() -> None:
    name = f"{SCALAR}, pause of shrink 4 -> 2"
    assert outcomes(result(SCALAR, [[change(SHRINK, 0.3)]], []))[name] == "short"
    assert outcomes(result(SCALAR, [[change(SHRINK, 0.29)]], []))[name] == "ok"


def test_rounds_that_failed_are_not_passed_over() -> None:
    limit = Limit(value=2)
    assert judged("time", [1.0], limit, "").outcome == "ok"
    assert (
        judged("time", [1.0], limit, "", failed="it died").outcome == "not measured in every round (it died)"
    )
    assert judged("time", [3.0], limit, "", failed="it died").outcome == "short"
    assert judged("time", [], limit, "", failed="it died").outcome == "not measured (it died)"


def test_steps_repeated_are_judged_by_the_worst_round() -> None:
    kills = [[change(KILL, 1.0, steps_repeated=n)] for n in (0, 2, 1)]
    found = outcomes(result(SCALAR, kills, [[change(KILL, 4.9)]]))
    title = f"{SCALAR}, SIGKILL to the next new step"
    assert found[title] == "ok"
    assert found[f"{title}, steps repeated"] == "short"
    assert found[f"{title}, times shorter than Ray Train's"] == "short"


@pytest.mark.parametrize(("moved", "outcome"), [(1050, "ok"), (1051, "short")])
def test_bytes_moved_are_held_against_the_layout_not_the_event(moved: int, outcome: str) -> None:
    event = {"bytes_moved": moved, "bytes_needed": moved, "pause_s": 0.5, "seconds": {"move": 0.4}}
    found = replace(result(LARGE, [[change(GROW, 0.5, event=event)]], []), bytes_needed={GROW: 1000})
    name = f"{LARGE}, grow 2 -> 4, bytes moved over those that ranks lack by the layout"
    assert outcomes(found)[name] == outcome
    untold = result(LARGE, [[change(GROW, 0.5)]], [])
    assert outcomes(untold)[name] == "not measured (the event does not tell bytes_moved)"


def test_replicas_are_compared_turn_by_turn_and_cost_nothing_where_they_are_off() -> None:
    measured = ReplicaResult(
        size=LARGE,
        with_s=[1.08, 2.16, 9.0],
        without_s=[1.0, 2.0, 1.0],
        seconds=0.08,
        bytes_sent=1e6,
        held_bytes=10**6,
        off=(0.0, 0.0, 0),
    )
    name = f"{LARGE} N=4, replica every step"
    found = outcomes(replicas=measured)
    assert found[f"{name}, step time over none"] == "ok"
    assert found[f"{name} off: seconds, bytes sent and bytes held"] == "ok"
    found = outcomes(replicas=replace(measured, off=(0.0, 0.0, 8)))
    assert found[f"{name} off: seconds, bytes sent and bytes held"] == "short"


def test_what_is_missing_has_its_reason() -> None:
    name = f"{LARGE}, pause of grow 2 -> 4"
    ratio = f"{LARGE}, grow 2 -> 4, times shorter than Ray Train's"
    assert outcomes()[name] == "not measured (not in this run)"
    failed = SizeResult(LARGE, failures={OURS: "it died"})
    assert outcomes(failed)[name] == outcomes(failed)[ratio] == "not measured (it died)"
    alone = result(LARGE, [[change(GROW, 0.5)]], [])
    found = {v.name: v for v in verdicts([alone], None, large=LARGE, absent={PEER: "--no-peer"})}
    assert found[name].outcome == "ok"
    assert found[ratio].outcome == "not measured (--no-peer)"


def test_the_page_lists_all_rounds_and_ends_with_a_line_for_every_bar() -> None:
    event = {
        "bytes_moved": 2_000_000, "bytes_needed": 2_000_000, "source": "live",
        "pause_s": 0.5, "seconds": {"form": 0.1, "move": 0.35},
    }  # fmt: skip
    found = replace(
        result(LARGE, [[change(GROW, s, event=event)] for s in (0.5, 0.7)], [[change(GROW, 9.0)]]),
        bytes_needed={GROW: 2_000_000},
    )
    page = render(
        [found],
        None,
        large=LARGE,
        when="now",
        command="this",
        touched=TOUCHED,
        absent={"replicas": "died"},
    ).splitlines()
    assert f"| grow | {OURS} | 2->4 | 0.600 | 0.500 0.700 | 0 0 | 0.1 0.1 |" in page
    assert f"| grow | {PEER} | 2->4 | 9.000 | 9.000 | 0 | 0.1 |" in page
    assert "| grow | live | 500 | 100 | 350 |" in page
    assert page.count("| grow | 2.000 | 2.000 | 2.000 |") == 2
    lines = page[page.index("## Bars") + 2 :]
    assert len(lines) == 16
    assert all(line.endswith((": ok", ": short", ")")) for line in lines)
    assert lines[-1].endswith("not measured (died)")
