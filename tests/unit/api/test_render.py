"""What people see of a job, on a terminal and in a log."""

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from api import render
from api.narrator import LINE_EVERY_S, Narrator
from api.schemas import EventOut, JobOut, PlanOut, ReportOut
from service.cluster import ClusterView, NodeView
from service.jobs import JobState, submitted
from service.planner import plan
from tests.unit.api.running import SPEC
from workers.spec import JobSpec

MEMORY = {
    "parameters": 1 << 20,
    "gradients": 2 << 20,
    "optimizer_states": 4 << 20,
    "communication_buffers": 8 << 20,
    "activations": 16 << 20,
}


def _console(*, terminal: bool = False) -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=100, force_terminal=terminal, color_system=None), text


def _job(**changes: Any) -> JobOut:
    job = submitted("1234abcd", JobSpec.model_validate(SPEC), who="test", now=0.0).job
    return JobOut.of(replace(job, state=JobState.RUNNING, **changes))


def _event(kind: str, **data: Any) -> EventOut:
    return EventOut(id=1, seq=1, time=0.0, kind=kind, rank=None, generation=1, step=7, data=data)


def _report(step: int, *, rank: int = 0) -> ReportOut:
    return ReportOut.model_validate(
        {
            **{"id": step, "seq": step, "time": 0.0, "generation": 1, "rank": rank, "world_size": 2},
            **{"worker": f"w{rank}", "step": step, "loss": 4.0, "lr": 0.1, "grad_norm": 1.0, "tokens": 64},
            **{"step_s": 0.5, "seconds": {}, "bytes_sent": {}, "resident_bytes": 200 << 20},
            **{"memory": MEMORY | {"unattributed": 3 << 20}, "predicted": MEMORY},
        }
    )


def _printed(renderable: Any) -> str:
    console, text = _console()
    console.print(renderable)
    return text.getvalue()


def test_each_ranks_memory_beside_what_was_predicted() -> None:
    lines = _printed(render.memory_table([_report(3), _report(3, rank=1)])).splitlines()
    assert len(lines) == 5
    measured = ["1.00", "2.00", "4.00", "8.00", "16.00", "0.00", "3.00", "200.0"]
    predicted = ["1.00", "2.00", "4.00", "8.00", "16.00", "0.00", "0.00"]
    assert lines[1].split() == ["0", "128", "500", "ms", *measured]
    assert lines[2].split() == predicted


@pytest.mark.parametrize(("category", "heading"), [("replicas", "repl"), ("save_copy", "save")])
def test_copies_have_a_column_where_there_are_any(category: str, heading: str) -> None:
    report = _report(3)
    held = report.memory.model_copy(update={category: 5 << 20})
    head, first, *_ = _printed(render.memory_table([report.model_copy(update={"memory": held})])).splitlines()
    assert head.split()[-3:] == [heading, "other", "resident"]
    assert first.split()[-3:] == ["5.00", "3.00", "200.0"]


def test_bytes_are_told_by_kind_and_by_the_way_they_went() -> None:
    sent = {"bytes_sent": {"reduce": 3_000_000, "control": 24}}
    ways = {"bytes_by_transport": {"shared": 2_000_024, "network": 1_000_000}}
    reports = [_report(3).model_copy(update=sent | ways), _report(3, rank=1).model_copy(update=sent)]
    shown = _printed(render.job_details(_job(), reports, [], []))
    _, names, first, second = shown[shown.index(render.SENT_HEADING) :].splitlines()[:4]
    assert " ".join(names.split()) == "rank reduce control in shared memory over network"
    assert first.split() == ["0", "3.00", "MB", "24", "B", "2.00", "MB", "1.00", "MB"]
    assert second.split() == ["1", "3.00", "MB", "24", "B", "-", "-"]
    assert render.SENT_HEADING not in _printed(render.job_details(_job(), [_report(3)], [], []))


@pytest.mark.parametrize(
    ("event", "told"),
    [
        (_event("phase", phase="running"), "phase  running"),
        (_event("phase", phase="failed", reason="why"), "failed: why"),
        (_event("state", **{"from": "queued", "to": "starting", "reason": ""}), "queued -> starting"),
        (
            _event("resize", old_workers=2, new_workers=4, pause_s=0.5, seconds={"form": 0.03}, steps_lost=0),
            "2 -> 4 workers, paused 500 ms (form 30 ms), steps lost 0",
        ),
        (
            _event(
                "resize",
                **{"old_workers": 2, "new_workers": 2, "pause_s": 0.3, "seconds": {}, "steps_lost": 0},
                **{"cause": "drain", "bytes_moved": 3_000_000, "source": "live", "steps_repeated": 1},
            ),
            ", 3.00 MB moved, state from live, 1 steps repeated, steps lost 0: drain",
        ),
        (_event("resize_refused", wanted=9, workers=2, reason="no place"), "9 workers: no place"),
        (
            _event("resize_refused", wanted=9, workers=2, reason="no place", missing={"CPU": 3.0}),
            "9 workers: no place (missing: 3 CPU)",
        ),
        (
            _event("worker_stuck", rank=1, worker="w1", step=7, said="it has not moved", dead=True),
            "rank 1 (w1) at step 7: it has not moved; it is treated as dead",
        ),
        (_event("worker_stuck", rank=None, said="all ranks wait"), "all ranks wait"),
        (
            _event("worker_slow", rank=1, worker="w1", share=0.42, seconds=0.2, over=False),
            "rank 1 (w1): the others lose 42% of the step to it, 200 ms",
        ),
        (_event("worker_slow", rank=1, worker="w1", share=0.1, seconds=0.2, over=True), "keeps up again"),
        (
            _event("drain", node="0123456789abcdef", workers=["w1"], said="its workers are moved"),
            "node 0123456789ab with w1: its workers are moved",
        ),
        (
            _event("recovery", old_workers=2, new_workers=1, pause_s=1.5, steps_lost=3, cause="gone"),
            "2 -> 1 workers, paused 1.50 s, steps lost 3: gone",
        ),
        (_event("worker_lost", rank=1, worker="w3", step=7, cause="killed"), "rank 1 (w3): killed"),
        (
            _event("checkpoint", step=7, bytes=1 << 20, seconds=0.1, reason="final"),
            "1.00 MiB in 100 ms (final)",
        ),
        (
            _event("checkpoint", step=7, bytes=1 << 20, seconds=2.5, reason="interval", stall_s=0.02),
            "1.00 MiB in 2.50 s (interval), training held up 20 ms",
        ),
        (
            _event("checkpoint_failed", step=7, reason="interval", error="no space"),
            "step 7 (interval): no space",
        ),
        (
            _event("checkpoint_dropped", step=7, dropped_step=5, reason="its group ended"),
            "step 5: its group ended",
        ),
        (_event("checkpoint_dropped", step=7, dropped_step=None, reason="its group ended"), "one: its"),
        (
            _event("checkpoint_damaged", step=7, checkpoint="step-9", reason="a bit", loaded_step=7),
            "step-9 is passed over: a bit; going on from step 7",
        ),
        (_event("data_restarted", step=7, reason="the data begin at their start"), "the data begin"),
        (_event("error", rank=0, message="boom"), "rank 0: boom"),
        (_event("made-up", a=1, b=2), "made-up  a 1, b 2"),
    ],
)
def test_an_event_is_a_line(event: EventOut, told: str) -> None:
    line = str(render.event_line(event))
    assert told in line
    assert line.startswith("    step 7  ")


def test_jobs_that_are_over_want_no_workers() -> None:
    shown = _printed(render.jobs_table([_job(workers=1, step=3, loss=2.5)]))
    assert shown.splitlines()[1].split() == [
        "1234abcd",
        "tiny",
        "running",
        "1",
        "(wants",
        "2)",
        "3/20",
        "2.5000",
    ]
    over = _job().model_copy(update={"state": JobState.SUCCEEDED})
    assert "wants" not in _printed(render.jobs_table([over]))


def test_a_reason_with_brackets_is_shown_as_it_is() -> None:
    job = _job(reason="list index [0] of [/x]")
    assert "list index [0] of [/x]" in _printed(render.job_details(job, [], [], []))


def test_a_plan_of_a_model_that_is_known_and_of_one_that_is_not() -> None:
    node = NodeView("n", "a", True, 4, 4, 0, 0, 8 << 30, 8 << 30)
    view = ClusterView((node,))
    known = _printed(render.plan_table(PlanOut.of(plan(JobSpec.model_validate(SPEC), view))))
    assert "2 workers: fits" in known
    assert "optimizer states" in known
    own = JobSpec.model_validate(SPEC | {"model": {"kind": "custom", "factory": "mine:Model"}})
    unknown = _printed(render.plan_table(PlanOut.of(plan(own, view))))
    assert "known only once it runs" in unknown


def test_in_a_log_steps_are_told_now_and_then_and_events_at_once() -> None:
    console, text = _console()
    now = [100.0]
    with Narrator(console, clock_s=lambda: now[0]) as narrator:
        narrator.tell(_report(1))  # before the job is known there is nothing to count to
        narrator.tell(_job())
        for step in range(1, 9):
            narrator.tell(_report(step))
            narrator.tell(_report(step, rank=1))
            now[0] += LINE_EVERY_S / 2
        narrator.tell(_event("phase", phase="running"))
        narrator.tell(_event("command", who="test"))
    lines = text.getvalue().splitlines()
    assert [line.split()[1] for line in lines[:-1]] == ["1", "3", "5", "7"]
    assert lines[0].endswith("of 20  loss 4.0000  2 workers, 256 tokens/s")
    assert "running" in lines[-1]


def test_on_a_terminal_steps_are_a_bar() -> None:
    console, text = _console(terminal=True)
    with Narrator(console) as narrator:
        narrator.tell(_job())
        narrator.tell(_report(5))
        narrator.tell(_event("phase", phase="running"))
    assert "5/20" in text.getvalue()
    assert "running" in text.getvalue()
