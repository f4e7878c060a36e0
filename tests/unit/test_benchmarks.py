"""What the benchmark makes of its figures: ratios within rounds, the worst cell, what is missing and why."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import first_touch
from benchmarks.bars import Bar, RunResult, bars, judge_wire, states_formula
from benchmarks.first_touch import GIB, Touched, available_bytes, touch, touch_memory
from benchmarks.plan import Run, plans
from benchmarks.probes import PeakResident
from benchmarks.report import losses_off, render
from benchmarks.results import CellResult, WireResult

RUN = Run.parse("fp32:10M:2:2:20")
PSI = 1000
MIB = 1 << 20


def cell(step_s: float, **other: Any) -> CellResult:
    plain = CellResult(
        step_s=step_s,
        losses=[9.0, 8.0],
        parameters=PSI,
        wire_bytes=4000.0,
        ledger_bytes=None,
        peak_bytes=1_000_000,
        building_bytes=900_000,
        seconds={"forward": 0.1, "backward": 0.2},
        model_states=None,
        foreign_cores=0.0,
    )
    return replace(plain, **other)


def bar(name: str) -> Bar:
    return next(bar for bar in bars() if bar.name == name)


def test_ratios_are_taken_within_a_round() -> None:
    # A slow second round doubles both: the ratio is the same in each.
    result = RunResult(RUN, {"ddp": [cell(1.2), cell(2.4)], "stage 1": [cell(1.0), cell(2.0)]})
    verdict = bar("fp32 stage 1, tokens/s over DDP").judge([result], {})
    assert verdict.line() == ("fp32 stage 1, tokens/s over DDP: 1.20 (10M N=2); required at least 1.20: ok")


def test_the_worst_cell_decides_and_the_floor_says_what_was_possible() -> None:
    good = RunResult(RUN, {"ddp": [cell(1.5)], "stage 2": [cell(1.0)], "floor": [cell(0.75)]})
    bad = RunResult(replace(RUN, world_size=4), {"ddp": [cell(1.1)], "stage 2": [cell(1.0)]})
    verdict = bar("fp32 stage 2, tokens/s over DDP").judge([good, bad], {})
    assert verdict.measured == "1.50 of at most 2.00 (10M N=2), 1.10 (10M N=4)"
    assert verdict.outcome == "short"


def test_the_floor_is_judged_at_two_ranks_only() -> None:
    name = "fp32 stage 3, step time over the floor's at N=2"
    two = RunResult(RUN, {"stage 3": [cell(1.39)], "floor": [cell(1.0)]})
    four = RunResult(replace(RUN, world_size=4), {"stage 3": [cell(9.0)], "floor": [cell(1.0)]})
    assert bar(name).judge([two, four], {}).outcome == "ok"
    assert bar(name).judge([four], {}).outcome == "not measured (not in this run)"


def test_a_cell_that_failed_is_not_passed_over() -> None:
    good = RunResult(RUN, {"ddp": [cell(1.5)], "stage 2": [cell(1.0)]})
    failed = RunResult(replace(RUN, size="124M"), {"ddp": [cell(1.5)]}, {"stage 2": "RuntimeError: no"})
    verdict = bar("fp32 stage 2, tokens/s over DDP").judge([good, failed], {})
    assert verdict.measured == "1.50 (10M N=2)"
    assert verdict.outcome == "not measured everywhere (124M N=2: RuntimeError: no)"
    slow = RunResult(RUN, {"ddp": [cell(1.1)], "stage 2": [cell(1.0)]})
    assert bar("fp32 stage 2, tokens/s over DDP").judge([slow, failed], {}).outcome == "short"


def test_a_floor_that_is_slower_than_the_engine_proves_nothing() -> None:
    name = "fp32 stage 1, step time over the floor's at N=2"
    disturbed = RunResult(RUN, {"stage 1": [cell(0.9)], "floor": [cell(1.0)]})
    verdict = bar(name).judge([disturbed], {})
    assert verdict.measured == "0.90, below 1: disturbed (10M N=2)"
    assert verdict.outcome == "not measured (every cell was disturbed)"
    other = RunResult(replace(RUN, size="50M"), {"stage 1": [cell(1.2)], "floor": [cell(1.0)]})
    assert bar(name).judge([disturbed, other], {}).outcome == "short"


def test_what_is_missing_has_its_reason() -> None:
    name = "fp32 stage 1, tokens/s over DeepSpeed stage 1"
    result = RunResult(RUN, {"stage 1": [cell(1.0)]}, {"deepspeed 1": "RuntimeError: no"})
    assert bar(name).judge([result], {}).outcome == "not measured (RuntimeError: no)"
    absent = {"deepspeed 1": "deepspeed is not installed"}
    assert bar(name).judge([RunResult(RUN)], absent).outcome == "not measured (deepspeed is not installed)"
    assert bar(name).judge([], absent).outcome == "not measured (not in this run)"


@pytest.mark.parametrize(
    ("stage", "precision", "per_parameter"),  # at N = 4, of one rank
    [
        (0, "fp32", 16), (1, "fp32", 8 + 8 / 4), (2, "fp32", 4 + 12 / 4), (3, "fp32", 16 / 4),
        (0, "bf16", 16), (1, "bf16", 4 + 12 / 4), (2, "bf16", 2 + 14 / 4), (3, "bf16", 16 / 4),
    ],
)  # fmt: skip
def test_model_states_must_match_to_the_byte(stage: int, precision: str, per_parameter: float) -> None:
    formula = states_formula(stage, precision, 4, PSI)
    assert formula == 4 * per_parameter * PSI
    run = replace(RUN, precision=precision, world_size=4)
    name = f"{precision} stage {stage}, model states, bytes off formula and prediction"
    for measured, outcome in ((formula, "ok"), (formula - 1, "short")):
        states = cell(1.0, model_states=(measured, formula))
        verdict = bar(name).judge([RunResult(run, {f"stage {stage}": [states]})], {})
        assert verdict.outcome == outcome


def test_bytes_on_the_wire_may_be_two_percent_off() -> None:
    fair = WireResult(
        precision="fp32", size="10M", world_size=2, stage=3,
        counted=1019.0, payload=1001.0, ledger=1000.0, promised=1000.0,
    )  # fmt: skip
    verdicts = {v.name: v.outcome for v in judge_wire([fair, replace(fair, stage=0, counted=1021.0)], "no")}
    assert verdicts["fp32 stage 3, interface's bytes over 3 psi (N-1)/N"] == "ok"
    assert verdicts["fp32 stage 3, ledger's bytes over the interface's payload"] == "ok"
    assert verdicts["fp32 stage 0, interface's bytes over 2 psi (N-1)/N"] == "short"
    assert verdicts["bf16 stage 0, interface's bytes over 2 psi (N-1)/N"] == "not measured (no)"


def test_losses_that_differ_are_named() -> None:
    rounds = {
        "ddp": [cell(1.0)],
        "stage 1": [cell(1.0, losses=[9.0, 8.1])],
        "stage 2": [cell(1.0, losses=[9.0, float("nan")])],
        "stage 3": [cell(1.0)],
        "floor": [cell(1.0, losses=[9.0, 12.0])],
    }
    off = list(losses_off(RunResult(RUN, rounds)))
    assert [line.split(" are ")[0] for line in off] == [
        "fp32, 10M N=2: losses of stage 1",
        "fp32, 10M N=2: losses of stage 2",
    ]


def test_the_page_ends_with_a_line_for_every_bar() -> None:
    states = (states_formula(2, "fp32", 2, PSI), states_formula(2, "fp32", 2, PSI))
    ours = cell(0.5, ledger_bytes=4000.0, model_states=states)
    result = RunResult(
        RUN, {"stage 2": [ours], "ddp": [cell(1.0)], "floor": [cell(0.4)]}, {"stage 3": "died"}
    )
    page = render(
        [result],
        [],
        when="now",
        command="this",
        touched=Touched(bytes=3 * GIB, piece_bytes=2 * GIB, seconds=[7.0, 0.5]),
        absent={},
        no_wire="no",
        notes=["a note"],
    ).splitlines()
    row = (
        "stage 2 | 500 (500-500) | 0.50 | 1.25 | 1024 | 1.000 | 1.000 | 1 | 1 | 0.01 (0.01) | 0.00 | 8.00000"
    )
    assert f"| {row} |" in page
    assert "a note" in page
    touched = "Memory touched beforehand: 3.0 GiB in 7.5 s; of pieces of 2.00 GiB the first took 7.00 s, the"
    assert f"{touched} slowest 7.00 s." in page
    lines = page[page.index("## Bars") + 4 :]
    assert len(lines) == len(bars()) + 16
    assert all(line.endswith((": ok", ": short", ")")) for line in lines)


def test_every_page_is_touched_and_none_is_given_back_before_the_end() -> None:
    with PeakResident() as peak:
        assert len(touch(80 * MIB, 32 * MIB)) == 3
    assert peak.bytes > 76 * MIB


def test_a_child_touches_no_more_than_nine_tenths_of_what_is_available(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    touched = touch_memory(most_bytes=24 * MIB, piece_bytes=16 * MIB)
    assert (touched.bytes, len(touched.seconds)) == (24 * MIB, 2)
    monkeypatch.setattr(first_touch, "available_bytes", lambda: 10 * MIB)
    touched = touch_memory(most_bytes=24 * MIB, piece_bytes=16 * MIB)
    assert (touched.bytes, len(touched.seconds)) == (9 * MIB, 1)


def test_a_control_group_may_leave_less_than_the_machine_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(first_touch, "LIMIT", tmp_path / "memory.max")
    monkeypatch.setattr(first_touch, "USED", tmp_path / "memory.current")
    assert available_bytes() > 30 * MIB, "where there is no limit"
    (tmp_path / "memory.max").write_text(f"{30 * MIB}\n")
    (tmp_path / "memory.current").write_text(f"{10 * MIB}\n")
    assert available_bytes() == 20 * MIB
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes() > 30 * MIB


def test_plans_name_runs_that_exist() -> None:
    assert set(plans()) == {"full", "short", "quick"}
    with pytest.raises(ValueError, match="must be PRECISION:SIZE:RANKS"):
        Run.parse("fp64:10M:2:1:1")
    with pytest.raises(ValueError, match="at least 2 ranks"):
        Run.parse("fp32:10M:1:1:1")
