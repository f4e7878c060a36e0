"""The training loop and the rendezvous on real gloo groups."""

import itertools
import json
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from service import planner
from tests.distributed.ranks import RankFailedError, run_ranks
from workers.beginning import Beginner
from workers.data import open_batches
from workers.errors import UntoldError
from workers.failures import describe
from workers.loop import Place, TrainingLoop, Wishes
from workers.models import build_model, vocabulary
from workers.protocol import Assignment, Fault, Outcome, Wish
from workers.rendezvous import Groups, Rendezvous
from workers.reports import MemoryUse, RankReport
from workers.saves import Saves
from workers.spec import JobSpec
from zero_core import assembly
from zero_core.checkpoint import interchange, manifest
from zero_core.errors import PeerLostError

pytestmark = pytest.mark.distributed

STEPS, MICRO_BATCHES = 7, 5


def _spec(**changes: Any) -> JobSpec:
    fields = {
        "data": {"kind": "synthetic", "samples": 48},
        "model": {"kind": "gpt", "layers": 2, "hidden": 32, "heads": 2, "vocabulary": 31, "dropout": 0.1},
        "steps": STEPS,
        "global_batch": 2 * MICRO_BATCHES,
        "micro_batch": 2,
        "sequence_length": 12,
        "seed": 11,
        "checkpoints": {"every_steps": 3, "keep": 2},
        "sample_ledger": True,
    }
    return JobSpec.model_validate(fields | changes)


def _train(
    rank: int,
    world_size: int,
    folder: Path,
    spec: JobSpec,
    wish: tuple[int, int, Wish] | None = None,
    settle: Callable[[], bool] = lambda: True,
    on_report: Callable[[int], None] = lambda _: None,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Outcome, list[dict[str, Any]]]:
    """Train from the newest checkpoint in `folder`. wish: (rank, after its report of this step, what)."""
    device = torch.device("cpu")
    batches = open_batches(spec, vocabulary=vocabulary(spec))
    beginner = Beginner(
        spec,
        device,
        batches,
        build_model(spec),
        baseline_bytes=0,
        on_engine=lambda _: None,
        checkpoints=folder,
    )
    latest = manifest.latest(folder)
    everyone = dist.group.WORLD
    assert everyone is not None
    assignment = Assignment(
        generation=1,
        rank=rank,
        world_size=world_size,
        participants=world_size,
        store="",
        carries=False,
        checkpoint=latest.location if latest else None,
    )
    beginning = beginner.begin(assignment, Groups(everyone=everyone, training=everyone), [])
    assert beginning.engine is not None
    wishes = Wishes()
    notices = [{**notice, "step": beginning.engine.steps_done} for notice in beginning.notices]

    def sink(notice: dict[str, Any]) -> None:
        notices.append(notice)
        if notice["type"] == "report":
            on_report(notice["step"])
            if wish and (rank, notice["step"]) == wish[:2]:
                wishes.ask(wish[2])

    place = Place(
        worker=f"w{rank}",
        generation=1,
        rank=rank,
        world_size=world_size,
        checkpoints=folder,
        device=device,
        fenced=False,
    )
    saves = Saves(sink=sink, settle=settle)
    loop = TrainingLoop(
        spec=spec,
        place=place,
        engine=beginning.engine,
        batches=batches,
        wishes=wishes,
        sink=sink,
        saves=saves,
        clock=clock,
    )
    outcome = loop.run()
    saves.close()
    return outcome, notices


def _train_untold(rank: int, world_size: int, folder: Path) -> Fault:
    """The first save's reports are collected, those of the second are not."""
    answers = iter([True, False])
    with pytest.raises(UntoldError, match="rank 0 does not save step 6") as caught:
        _train(rank, world_size, folder, _spec(), settle=lambda: next(answers))
    return describe(caught.value, aborted=False).fault


def test_steps_that_were_not_told_are_not_saved(tmp_path: Path) -> None:
    """A worker that is cut off from its controller leaves no checkpoint of steps that nobody knows of."""
    assert run_ranks(1, _train_untold, tmp_path) == [Fault.COLLECTIVE]
    assert [info.step for info in manifest.scan(tmp_path)] == [3]


def _reports(results: list[tuple[Outcome, list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    return [n for _, notices in results for n in notices if n["type"] == "report"]


def _saves(results: list[tuple[Outcome, list[dict[str, Any]]]]) -> list[tuple[int, str]]:
    return [(n["step"], n["reason"]) for _, notices in results for n in notices if n["type"] == "checkpoint"]


def _losses(results: list[tuple[Outcome, list[dict[str, Any]]]]) -> dict[int, float]:
    return {report["step"]: report["loss"] for report in _reports(results)}


@pytest.fixture(scope="module")
def unresized(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("alone")
    return _losses(run_ranks(1, _train, folder, _spec()))


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_sample_is_seen_once_and_the_loss_does_not_depend_on_the_ranks(
    world_size: int, tmp_path: Path, unresized: dict[int, float]
) -> None:
    spec = _spec()
    results = run_ranks(world_size, _train, tmp_path, spec)
    assert [outcome for outcome, _ in results] == [Outcome(step=STEPS)] * world_size
    batches = open_batches(spec, vocabulary=31)
    for step in range(1, STEPS + 1):
        seen = [sample for r in _reports(results) if r["step"] == step for sample in r["samples"]]
        due = [int(i) for m in range(MICRO_BATCHES) for i in batches.ids(step - 1, m)]
        assert sorted(seen) == sorted(due)
    assert _losses(results) == pytest.approx(unresized, rel=1e-5)
    # At intervals and at the end; pruned to the newest two.
    assert _saves(results) == [(3, "interval"), (6, "interval"), (7, "final")]
    assert [info.step for info in manifest.scan(tmp_path)] == [6, 7]


def test_a_stop_wished_by_one_rank_stops_all_at_one_step_and_another_group_goes_on(
    tmp_path: Path, unresized: dict[int, float]
) -> None:
    spec = _spec()
    first = run_ranks(2, _train, tmp_path, spec, (1, 3, Wish.PAUSE))
    stopped = {outcome for outcome, _ in first}
    assert stopped == {Outcome(step=4, reason=Wish.PAUSE)}
    assert _saves(first)[-1] == (4, "pause")
    rest = run_ranks(3, _train, tmp_path, spec)
    assert sorted({report["step"] for report in _reports(rest)}) == [5, 6, 7]
    assert {**_losses(first), **_losses(rest)} == pytest.approx(unresized, rel=1e-5)


def test_a_stop_for_a_resize_saves_nothing_but_what_is_due_anyway(tmp_path: Path) -> None:
    results = run_ranks(2, _train, tmp_path / "between", _spec(), (1, 3, Wish.RESIZE))
    assert {outcome for outcome, _ in results} == {Outcome(step=4, reason=Wish.RESIZE)}
    assert _saves(results) == [(3, "interval")]
    results = run_ranks(2, _train, tmp_path / "due", _spec(), (1, 2, Wish.RESIZE))
    assert {outcome for outcome, _ in results} == {Outcome(step=3, reason=Wish.RESIZE)}
    assert _saves(results) == [(3, "interval")]


def test_a_checkpoint_on_demand_does_not_stop_the_group(tmp_path: Path) -> None:
    results = run_ranks(
        2, _train, tmp_path, _spec(checkpoints={"every_steps": None}), (0, 2, Wish.CHECKPOINT)
    )
    assert _saves(results) == [(3, "demand"), (7, "final")]
    assert [outcome.step for outcome, _ in results] == [7, 7]


@pytest.mark.parametrize("checkpointing", ["none", "unit"])
def test_memory_time_and_bytes_are_accounted_for_in_every_report(tmp_path: Path, checkpointing: str) -> None:
    zero = {"stage": 3, "activation_checkpointing": checkpointing}
    results = run_ranks(2, _train, tmp_path, _spec(zero=zero))
    for report in _reports(results):
        for kind in ("parameters", "gradients", "optimizer_states", "communication_buffers", "padding"):
            measured, predicted = getattr(report["memory"], kind), getattr(report["predicted"], kind)
            assert measured == predicted, kind
        assert report["predicted"].activations == pytest.approx(report["memory"].activations, rel=0.02)
        assert (report["memory"].checkpoints > 0) == (checkpointing == "unit")
        assert report["tokens"] in (2 * 12 * 2, 3 * 12 * 2)
        assert report["bytes_by_transport"] == {"shared": sum(report["bytes_sent"].values())}, "one host"
        if report["step"] == 2:  # the first one also counts the engine's start
            busy = sum(report["seconds"].values())
            assert 0 < busy <= report["step_s"] * 1.01


def _train_measuring_each_step(
    rank: int, world_size: int, folder: Path, spec: JobSpec
) -> tuple[Outcome, list[dict[str, Any]]]:
    return _train(rank, world_size, folder, spec, clock=map(float, itertools.count()).__next__)


@pytest.mark.parametrize(
    ("checkpoints", "copies"),
    [
        ({"every_steps": 3}, True),
        ({"every_steps": 3, "asynchronous": False}, False),
        ({"every_steps": 7}, False),
    ],
)
def test_the_copy_for_checkpoints_is_told_as_it_was_planned(
    tmp_path: Path, checkpoints: dict[str, Any], copies: bool
) -> None:
    """From the first save that training does not wait for; none for those that it waits for."""
    spec = _spec(checkpoints=checkpoints, workers={"wanted": 2})
    planned = planner.plan(spec, None).per_rank
    assert planned is not None
    assert (planned.save_copy > 0) == copies
    for report in _reports(run_ranks(2, _train_measuring_each_step, tmp_path, spec)):
        if report["rank"] == 0:
            assert report["predicted"].save_copy == planned.save_copy
        expected = report["predicted"].save_copy if report["step"] > 3 else 0
        assert report["memory"].save_copy == expected


def test_a_loss_that_is_not_finite_is_an_error_and_leaves_no_checkpoint(tmp_path: Path) -> None:
    spec = _spec(optimizer={"lr": 1e38, "clip_norm": None}, checkpoints={"every_steps": 1})
    with pytest.raises(RankFailedError, match=r"NonFiniteError|DivergedError"):
        run_ranks(2, _train, tmp_path, spec)
    assert all(info.step < STEPS for info in manifest.scan(tmp_path))


def test_a_step_that_fp16_skips_is_told_and_is_one_of_the_jobs_steps(tmp_path: Path) -> None:
    """An overflow is no divergence. Data goes on, the schedule does not; a resume does not show."""
    spec = _spec(
        precision="fp16",
        loss_scale={"initial": 2.0**22, "growth_interval": 1000},
        schedule={"kind": "constant", "warmup_steps": 9},
        optimizer={
            "kind": "sgd",
            "lr": 0.1,
            "groups": [{"name": "norms", "patterns": ["*norm*"], "lr_factor": 0.5}],
        },
        checkpoints={"every_steps": 100, "keep": 2},
        steps=9,
    )
    whole = run_ranks(2, _train, tmp_path / "whole", spec)
    assert [outcome for outcome, _ in whole] == [Outcome(step=9)] * 2
    reports = [n for n in whole[0][1] if n["type"] == "report"]
    skipped = [report["skipped"] for report in reports]
    assert skipped[0]
    assert not skipped[-1]
    assert skipped == sorted(skipped, reverse=True)
    assert reports[-1]["skipped_steps"] == sum(skipped)
    updates = 0
    for number, report in enumerate(reports):
        told = RankReport.model_validate(
            json.loads(json.dumps({**_plain(report), "seq": 1}, allow_nan=False))
        )
        assert (told.step, told.loss_scale) == (number + 1, 2.0 ** (22 - min(number, sum(skipped))))
        assert (told.grad_norm is None) == told.skipped
        assert told.lr == pytest.approx(0.1 * (updates + 1) / 9)
        assert told.group_lrs == {"norms": pytest.approx(told.lr / 2)}
        updates += not told.skipped
    batches = open_batches(spec, vocabulary=31)
    for step in range(1, 10):
        seen = [sample for r in _reports(whole) if r["step"] == step for sample in r["samples"]]
        assert sorted(seen) == sorted(int(i) for m in range(MICRO_BATCHES) for i in batches.ids(step - 1, m))
    folder = tmp_path / "parts"
    first = run_ranks(2, _train, folder, spec, (1, 3, Wish.PAUSE))
    rest = run_ranks(2, _train, folder, spec)
    assert [r["step"] for r in _reports(rest[:1])] == [5, 6, 7, 8, 9]
    kept = ("step", "loss", "grad_norm", "lr", "skipped", "skipped_steps", "loss_scale", "samples")
    again = _reports(first[:1]) + _reports(rest[:1])
    assert [[r[k] for k in kept] for r in again] == [[r[k] for k in kept] for r in reports]


def _plain(report: dict[str, Any]) -> dict[str, Any]:
    return {k: v.model_dump() if isinstance(v, MemoryUse) else v for k, v in report.items()}


def test_fp16_that_overflows_at_the_floor_fails_as_the_jobs_fault(tmp_path: Path) -> None:
    spec = _spec(precision="fp16", loss_scale={"initial": 2.0**23, "floor": 2.0**22})
    with pytest.raises(
        RankFailedError, match=r"DivergedError: step 2, .* loss scale is at its floor of 4\.1943e\+06"
    ):
        run_ranks(2, _train, tmp_path, spec)


def test_resuming_with_other_data_is_refused(tmp_path: Path) -> None:
    run_ranks(1, _train, tmp_path, _spec(steps=3))
    with pytest.raises(RankFailedError, match="samples: 48 then, 49 now"):
        run_ranks(2, _train, tmp_path, _spec(data={"kind": "synthetic", "samples": 49}))


# Checkpoints behind the training


def _train_on(rank: int, world_size: int, folder: Path, spec: JobSpec) -> list[dict[str, Any]]:
    """No save is committed before the report of step 5 is there."""
    later = threading.Event()

    def on_report(step: int) -> None:
        if step == 5:
            later.set()

    _, notices = _train(rank, world_size, folder, spec, settle=lambda: later.wait(60), on_report=on_report)
    return notices


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    spec = _spec(checkpoints={"every_steps": 3, "keep": 5})
    notices = run_ranks(2, _train_on, tmp_path, spec)[0]
    told = [(n["type"], n["step"]) for n in notices]
    assert told.index(("report", 5)) < told.index(("checkpoint", 3)) < told.index(("checkpoint", 6))
    assert told[-1] == ("checkpoint", 7), "the last one is waited for"
    for saved in (n for n in notices if n["type"] == "checkpoint"):
        assert saved["bytes"] > 0
        assert saved["seconds"] > 0
        assert saved["stall_s"] >= 0
        assert saved["generation"] == 1
    assert [info.step for info in manifest.scan(tmp_path)] == [3, 6, 7]


def test_a_job_may_wait_for_all_its_checkpoints(tmp_path: Path) -> None:
    spec = _spec(checkpoints={"every_steps": 3, "keep": 5, "asynchronous": False})
    for outcome, notices in run_ranks(2, _train, tmp_path, spec):
        assert outcome == Outcome(step=STEPS)
        told = [(n["type"], n["step"]) for n in notices]
        if ("checkpoint", 3) in told:
            assert told.index(("checkpoint", 3)) < told.index(("report", 4))
    assert [info.step for info in manifest.scan(tmp_path)] == [3, 6, 7]


def test_what_is_kept_beside_the_newest(tmp_path: Path) -> None:
    spec = _spec(checkpoints={"every_steps": 1, "keep": 2, "keep_every": 3})
    run_ranks(1, _train, tmp_path, spec)
    assert [info.step for info in manifest.scan(tmp_path)] == [3, 6, 7]


def test_checkpoints_in_a_store_that_cannot_rename(tmp_path: Path) -> None:
    """As `checkpoints.location` may be: saved behind the training, gone on from, pruned."""
    place: Any = f"file://{tmp_path}/bucket/job"
    spec = _spec(checkpoints={"every_steps": 2, "keep": 2})
    run_ranks(2, _train, place, spec, (0, 3, Wish.PAUSE))
    assert [info.step for info in manifest.scan(place)] == [2, 4]
    rest = run_ranks(3, _train, place, spec)
    assert sorted({report["step"] for report in _reports(rest)}) == [5, 6, 7]
    assert [info.step for info in manifest.scan(place)] == [6, 7]


def _in_the_way(rank: int, world_size: int, folder: Path, spec: JobSpec) -> list[dict[str, Any]]:
    """A file stands where the folder should be, until step 5."""

    def on_report(step: int) -> None:
        if step == 5 and rank == 0:
            folder.unlink()

    return _train(rank, world_size, folder, spec, on_report=on_report)[1]


def test_a_checkpoint_says_what_it_is_of(tmp_path: Path) -> None:
    """The job as it was submitted, optimizer, groups and schedule among it, and what it was written with."""
    spec = _spec(steps=2)
    run_ranks(2, _train, tmp_path, spec)
    latest = manifest.latest(tmp_path)
    assert latest is not None
    found = manifest.read(latest.path)
    assert JobSpec.model_validate(found.extra["spec"]) == spec
    assert found.extra["consumed"] == 2 * spec.global_batch
    assert (found.seed, found.updates) == (spec.seed, 2)
    assert found.versions.keys() >= {"python", "torch"}


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_periodic_checkpoint_that_fails_is_told_and_the_job_goes_on(
    tmp_path: Path, asynchronous: bool
) -> None:
    folder = tmp_path / "checkpoints"
    folder.touch()
    spec = _spec(checkpoints={"every_steps": 3, "asynchronous": asynchronous})
    told = [n for n in run_ranks(2, _in_the_way, folder, spec)[0] if n["type"] != "report"]
    assert [(n["type"], n["step"], n["reason"]) for n in told] == [
        ("checkpoint_failed", 3, "interval"),
        ("checkpoint", 6, "interval"),
        ("checkpoint", 7, "final"),
    ]
    assert str(folder) in told[0]["error"]


def _lost_after_the_update(rank: int, world_size: int, folder: Path, stage: int) -> list[int]:
    """The group breaks at the very end of step 3; returns the steps that were told."""
    real, calls, told = assembly.share_parameters, [0], list[int]()

    def share(*args: Any, **kwargs: Any) -> None:
        calls[0] += 1
        if calls[0] == 3:
            raise PeerLostError("a rank is gone")
        real(*args, **kwargs)

    assembly.share_parameters = share
    with pytest.raises(PeerLostError):
        _train(rank, world_size, folder, _spec(zero={"stage": stage}), on_report=told.append)
    return told


@pytest.mark.parametrize(("stage", "told"), [(0, [1, 2, 3]), (2, [1, 2])])
def test_a_step_cut_off_after_its_update_counts_where_nothing_else_is_held(
    tmp_path: Path, stage: int, told: list[int]
) -> None:
    """At stage 0 the states before the update are nowhere any more; elsewhere they are in replicas."""
    assert run_ranks(2, _lost_after_the_update, tmp_path, stage) == [told, told]


def test_without_its_last_checkpoint_a_job_has_failed(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.touch()
    with pytest.raises(RankFailedError, match="CheckpointError"):
        run_ranks(2, _train, folder, _spec(steps=2))


# Where a job begins


def _flip(folder: Path, name: str) -> None:
    path = folder / name
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 0x10
    path.write_bytes(raw)


def test_a_damaged_checkpoint_is_told_of_and_the_one_before_is_gone_on_from(
    tmp_path: Path, unresized: dict[int, float]
) -> None:
    """K15: a flipped bit; also found where another number of ranks reads it."""
    run_ranks(2, _train, tmp_path, _spec(), (0, 4, Wish.PAUSE))
    three, five = manifest.scan(tmp_path)
    assert (three.step, five.step) == (3, 5)
    _flip(five.path, "rank-00001.safetensors")
    results = run_ranks(3, _train, tmp_path, _spec())
    (damaged,) = (n for n in results[0][1] if n["type"] == "checkpoint_damaged")
    assert damaged["loaded_step"] == 3
    assert damaged["checkpoint"].endswith(five.name)
    assert "rank-00001.safetensors" in damaged["reason"]
    assert sorted({report["step"] for report in _reports(results)}) == [4, 5, 6, 7]
    assert {**unresized, **_losses(results)} == pytest.approx(unresized, rel=1e-5)


@pytest.mark.parametrize("what", ["rank-00000.safetensors", "manifest.json"])
def test_where_no_checkpoint_verifies_the_job_fails_and_does_not_begin_anew(
    tmp_path: Path, what: str
) -> None:
    run_ranks(1, _train, tmp_path, _spec(), (0, 4, Wish.PAUSE))
    for info in manifest.scan(tmp_path):
        _flip(info.path, what)
    with pytest.raises(RankFailedError, match=what):
        run_ranks(2, _train, tmp_path, _spec())


WIDE = {"global_batch": 16, "micro_batch": 2, "steps": 9, "checkpoints": {"every_steps": None}}


def _trace(results: list[tuple[Outcome, list[dict[str, Any]]]]) -> dict[int, tuple[float, list[int]]]:
    """Learning rate and sorted sample ids of each step."""
    found: dict[int, tuple[float, list[int]]] = {}
    for report in _reports(results):
        lr, ids = found.get(report["step"], (report["lr"], []))
        assert lr == report["lr"]
        found[report["step"]] = lr, sorted(ids + report["samples"])
    return found


def test_rates_and_samples_are_those_of_the_undisturbed_run_over_resizes(tmp_path: Path) -> None:
    """K13 (Automodel 533, accelerate 3938): 4 -> 3 -> 8 ranks, over checkpoints."""
    spec = _spec(
        **WIDE, schedule={"kind": "cosine", "warmup_steps": 3}, data={"kind": "synthetic", "samples": 50}
    )
    undisturbed = run_ranks(1, _train, tmp_path / "alone", spec)
    disturbed = []
    for ranks, stop in ((4, (1, 2, Wish.PAUSE)), (3, (2, 5, Wish.PAUSE)), (8, None)):
        disturbed += run_ranks(ranks, _train, tmp_path / "resized", spec, stop)
    assert _trace(disturbed) == _trace(undisturbed)
    assert _losses(disturbed) == pytest.approx(_losses(undisturbed), rel=1e-5)


def test_a_job_goes_on_from_anothers_checkpoint_with_another_batch(tmp_path: Path) -> None:
    """K13, the rule: samples that were consumed stay consumed, whatever a step reads from now on."""
    spec = _spec(**WIDE)
    run_ranks(2, _train, tmp_path / "first", spec, (0, 3, Wish.PAUSE))
    other = _spec(
        **{**WIDE, "global_batch": 8, "checkpoints": {"every_steps": 2, "keep": 9}},
        start_from={"checkpoint": str(tmp_path / "first")},
    )
    results = run_ranks(3, _train, tmp_path / "second", other, (0, 6, Wish.PAUSE))
    again = run_ranks(2, _train, tmp_path / "second", other)
    assert not [n for _, notices in results for n in notices if n["type"] == "data_restarted"]
    found = _trace(results + again)
    assert sorted(found) == [5, 6, 7, 8, 9], "four steps were done before"
    batches = open_batches(_spec(**{**WIDE, "global_batch": 2}), vocabulary=31)
    consumed = 4 * 16 // 2
    for step, (_, ids) in found.items():
        places = range(consumed + (step - 5) * 4, consumed + (step - 4) * 4)
        assert ids == sorted(int(i) for place in places for i in batches.ids(place, 0))


def _join_one_that_began_elsewhere(rank: int, world_size: int, folder: Path) -> list[dict[str, Any]]:
    """Rank 0 goes on from another job's checkpoint; then rank 1 joins it, which has seen nothing of that."""
    spec = _spec(
        **{**WIDE, "global_batch": 8},
        start_from={"checkpoint": str(folder / "first")},
        elastic={"replicas": 0},
    )
    device, batches = torch.device("cpu"), open_batches(spec, vocabulary=31)
    beginner = Beginner(
        spec,
        device,
        batches,
        build_model(spec),
        baseline_bytes=0,
        on_engine=lambda _: None,
        checkpoints=folder / "second",
    )
    alone, everyone = dist.new_group([0]), dist.group.WORLD
    assert everyone is not None
    notices: list[dict[str, Any]] = []
    wishes, saves = Wishes(), Saves(sink=notices.append)

    def train(generation: int, world_size: int, group: dist.ProcessGroup, held: list[Any]) -> list[Any]:
        assignment = Assignment(
            generation=generation,
            rank=rank,
            world_size=world_size,
            participants=world_size,
            store="",
            carries=generation > 1,
            checkpoint=None,
        )
        engine = beginner.begin(assignment, Groups(everyone=group, training=group), held).engine
        assert engine is not None
        place = Place(
            worker=f"w{rank}",
            generation=generation,
            rank=rank,
            world_size=world_size,
            checkpoints=folder / "second",
            device=device,
            fenced=False,
        )
        TrainingLoop(
            spec=spec,
            place=place,
            engine=engine,
            batches=batches,
            wishes=wishes,
            sink=notices.append,
            saves=saves,
        ).run()
        snapshots = list(engine.snapshots())
        engine.detach()
        return snapshots

    held: list[Any] = []
    if rank == 0:
        wishes.ask(Wish.RESIZE)
        held = train(1, 1, alone, [])
    train(2, 2, everyone, held)
    return notices


def test_one_that_joins_learns_from_where_the_samples_are_counted(tmp_path: Path) -> None:
    """K13 over a live resize: the position belongs to the state, and goes where that goes."""
    run_ranks(1, _train, tmp_path / "first", _spec(**WIDE), (0, 3, Wish.PAUSE))
    results = run_ranks(2, _join_one_that_began_elsewhere, tmp_path)
    found = _trace([(Outcome(step=9), notices) for notices in results])
    assert sorted(found) == [5, 6, 7, 8, 9]
    assert {n["world_size"] for n in results[0] if n["type"] == "report"} == {1, 2}
    batches = open_batches(_spec(**{**WIDE, "global_batch": 2}), vocabulary=31)
    for step, (_, ids) in found.items():
        places = range(32 + (step - 5) * 4, 32 + (step - 4) * 4)
        assert ids == sorted(int(i) for place in places for i in batches.ids(place, 0))


def test_a_job_with_other_data_begins_them_anew_and_says_so(tmp_path: Path) -> None:
    run_ranks(1, _train, tmp_path / "first", _spec(), (0, 3, Wish.PAUSE))
    (newest,) = manifest.scan(tmp_path / "first")[-1:]
    other = _spec(data={"kind": "synthetic", "samples": 49}, start_from={"checkpoint": newest.location})
    results = run_ranks(2, _train, tmp_path / "second", other)
    (told,) = (n for n in results[0][1] if n["type"] == "data_restarted")
    assert "samples: 48 then, 49 now" in told["reason"]
    batches = open_batches(other, vocabulary=31)
    found = _trace(results)
    assert sorted(found) == [5, 6, 7]
    for step, (_, ids) in found.items():
        assert ids == sorted(int(i) for m in range(MICRO_BATCHES) for i in batches.ids(step - 5, m))


def test_a_job_goes_on_at_another_stage_and_if_asked_for_in_another_precision(tmp_path: Path) -> None:
    run_ranks(2, _train, tmp_path / "first", _spec(), (0, 3, Wish.PAUSE))
    start = {"checkpoint": str(tmp_path / "first")}
    other = _spec(precision="bf16", zero={"stage": 3}, start_from=start, steps=6)
    with pytest.raises(RankFailedError, match="was saved in fp32, the engine runs in bf16"):
        run_ranks(2, _train, tmp_path / "refused", other)
    other = _spec(precision="bf16", zero={"stage": 3}, start_from={**start, "cast": True}, steps=6)
    results = run_ranks(2, _train, tmp_path / "second", other)
    assert sorted(_losses(results)) == [5, 6]


def test_a_beginning_that_is_not_there_is_named(tmp_path: Path) -> None:
    for given in ("checkpoint", "safetensors"):
        other = _spec(start_from={given: str(tmp_path / "nothing")})
        with pytest.raises(RankFailedError, match="nothing"):
            run_ranks(1, _train, tmp_path / "second", other)


def test_a_beginning_that_has_done_all_steps_is_refused(tmp_path: Path) -> None:
    run_ranks(1, _train, tmp_path / "first", _spec(steps=3))
    other = _spec(steps=3, start_from={"checkpoint": str(tmp_path / "first")})
    with pytest.raises(RankFailedError, match="has done 3 steps already, and steps is 3 in all"):
        run_ranks(1, _train, tmp_path / "second", other)


def test_a_job_begins_with_parameters_from_safetensors(tmp_path: Path) -> None:
    run_ranks(2, _train, tmp_path / "first", _spec(steps=4))
    (newest,) = manifest.scan(tmp_path / "first")[-1:]
    interchange.export_model(newest.location, tmp_path / "export")
    other = _spec(start_from={"safetensors": str(tmp_path / "export")})
    alone = run_ranks(1, _train, tmp_path / "alone", other)
    pair = run_ranks(2, _train, tmp_path / "pair", other)
    assert sorted(_losses(alone)) == [*range(1, 8)]
    assert _losses(pair) == pytest.approx(_losses(alone), rel=1e-5)
    seeded = run_ranks(1, _train, tmp_path / "seeded", _spec())
    assert _losses(seeded)[1] != pytest.approx(_losses(alone)[1], rel=1e-3)
    assert _trace(alone) == _trace(seeded), "the data from their start, the schedule too"


# The rendezvous: groups formed, left, aborted and formed again in live processes


def _sum(rank: int) -> float:
    value = torch.tensor([float(rank + 1)])
    dist.all_reduce(value)
    return float(value)


def _member(pipe: Connection) -> None:
    """A worker process in small: forms the groups it is told to form, and answers with what came of it."""
    rendezvous = Rendezvous(address="127.0.0.1", device=torch.device("cpu"))
    pipe.send(rendezvous.host())
    while (order := pipe.recv()) is not None:
        generation, rank, world_size, store, deed = order
        try:
            began = time.perf_counter()
            rendezvous.form(
                generation=generation,
                rank=rank,
                world_size=world_size,
                store=store,
                collective_timeout_s=60,
            )
            formed_s = time.perf_counter() - began
            _sum(rank)
            if deed == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if deed == "sum":
                threading.Timer(0.5, rendezvous.abort, [generation]).start()
                _sum(rank)
            if deed == "receive":
                # From a live rank that sends nothing: no broken connection gives the loss away.
                threading.Timer(0.5, rendezvous.abort, [generation]).start()
                dist.recv(torch.empty(1), src=1 - rank)
            answer: tuple[Any, ...] = ("sum", _sum(rank), formed_s)
        except Exception as error:
            failure = describe(error, aborted=rendezvous.aborted(generation))
            answer = ("failed", failure.fault)
        rendezvous.leave()
        pipe.send(answer)


class _Members:
    """Live processes, told one by one what to form."""

    def __init__(self, count: int) -> None:
        context = get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes = []
        for _ in range(count):
            mine, theirs = context.Pipe()
            process = context.Process(target=_member, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)
        self.stores = [pipe.recv() for pipe in self.pipes]

    def tell(self, generation: int, who: list[int], deeds: dict[int, str]) -> None:
        for rank, member in enumerate(who):
            order = (generation, rank, len(who), self.stores[who[0]], deeds.get(member))
            self.pipes[member].send(order)

    def answer(self, member: int, timeout_s: float = 20.0) -> tuple[Any, ...]:
        assert self.pipes[member].poll(timeout_s), f"member {member} is stuck"
        answer: tuple[Any, ...] = self.pipes[member].recv()
        return answer

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
            process.close()
        for pipe in self.pipes:
            pipe.close()


def test_groups_form_and_form_again_with_other_members_in_live_processes() -> None:
    members = _Members(3)
    try:
        # Grow, shrink, and another host of the meeting: the one before has left.
        for generation, who in enumerate([[0, 1], [0, 1, 2], [0, 2], [2, 1]], start=1):
            members.tell(generation, who, {})
            answers = [members.answer(member) for member in who]
            assert [a[:2] for a in answers] == [("sum", len(who) * (len(who) + 1) / 2)] * len(who)
            assert all(a[2] < 5 for a in answers)
    finally:
        members.end()


@pytest.mark.parametrize("deed", ["sum", "receive"])
def test_survivors_of_a_killed_rank_are_aborted_and_meet_again(deed: str) -> None:
    """L6 (Ray 62651): whatever the others wait in when a rank dies, it does not outlive its generation."""
    members = _Members(3)
    try:
        began = time.monotonic()
        members.tell(1, [0, 1, 2], {0: deed, 1: deed, 2: "die"})
        faults = {members.answer(member)[1] for member in (0, 1)}
        assert faults <= {Fault.ABORTED, Fault.COLLECTIVE}
        assert time.monotonic() - began < 60, "not at the collective's timeout"
        members.tell(2, [0, 1], {})
        assert [members.answer(member)[:2] for member in (0, 1)] == [("sum", 3.0)] * 2
    finally:
        members.end()


def test_a_store_is_bound_before_its_port_is_told() -> None:
    """L2 (Ray 35907): a port that was only chosen may be taken by another process before it is bound."""
    hosts = [Rendezvous(address="127.0.0.1", device=torch.device("cpu")) for _ in range(4)]
    stores = [host.host() for host in hosts]
    assert len(set(stores)) == len(stores)
    assert [host.host() for host in hosts] == stores, "one for the life of the process"
    for store in stores:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", int(store.rpartition(":")[2])))


def test_a_rank_that_never_arrives_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.rendezvous.FORM_TIMEOUT_S", 0.5)
    rendezvous = Rendezvous(address="127.0.0.1", device=torch.device("cpu"))
    with pytest.raises(Exception, match=r"ranks \[1\] did not arrive within 0\.5 s"):
        rendezvous.form(generation=1, rank=0, world_size=2, store=rendezvous.host(), collective_timeout_s=60)
    assert not dist.is_initialized()


def test_an_abort_reaches_a_rank_that_still_waits_for_others() -> None:
    rendezvous = Rendezvous(address="127.0.0.1", device=torch.device("cpu"))
    threading.Timer(0.3, rendezvous.abort, [1]).start()
    began = time.monotonic()
    with pytest.raises(Exception, match="aborted while it formed"):
        rendezvous.form(generation=1, rank=0, world_size=2, store=rendezvous.host(), collective_timeout_s=60)
    assert math.isclose(time.monotonic() - began, 0.3, abs_tol=3.0)
