"""The training loop and the rendezvous on real gloo groups."""

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

from tests.distributed.ranks import RankFailedError, run_ranks
from workers.data import open_batches
from workers.errors import UntoldError
from workers.failures import describe
from workers.loop import Place, TrainingLoop, Wishes, make_engine, resume
from workers.models import build_model, vocabulary
from workers.protocol import Fault, Outcome, Wish
from workers.rendezvous import Rendezvous
from workers.reports import MemoryUse, RankReport
from workers.spec import JobSpec
from zero_core.checkpoint import manifest

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
) -> tuple[Outcome, list[dict[str, Any]]]:
    """Train from the newest checkpoint in `folder`. wish: (rank, after its report of this step, what)."""
    device = torch.device("cpu")
    batches = open_batches(spec, vocabulary=vocabulary(spec))
    engine = make_engine(spec, build_model(spec), device)
    latest = manifest.latest(folder)
    if latest:
        resume(engine, batches, latest.path)
    wishes = Wishes()
    notices: list[dict[str, Any]] = []

    def sink(notice: dict[str, Any]) -> None:
        notices.append(notice)
        if wish and notice["type"] == "report" and (rank, notice["step"]) == wish[:2]:
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
    loop = TrainingLoop(
        spec=spec,
        place=place,
        engine=engine,
        batches=batches,
        wishes=wishes,
        sink=sink,
        settle=settle,
    )
    return loop.run(), notices


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
def test_memory_and_time_are_accounted_for_in_every_report(tmp_path: Path, checkpointing: str) -> None:
    zero = {"stage": 3, "activation_checkpointing": checkpointing}
    results = run_ranks(2, _train, tmp_path, _spec(zero=zero))
    for report in _reports(results):
        for kind in ("parameters", "gradients", "optimizer_states", "communication_buffers", "padding"):
            measured, predicted = getattr(report["memory"], kind), getattr(report["predicted"], kind)
            assert measured == predicted, kind
        assert report["predicted"].activations == pytest.approx(report["memory"].activations, rel=0.02)
        assert (report["memory"].checkpoints > 0) == (checkpointing == "unit")
        assert report["tokens"] in (2 * 12 * 2, 3 * 12 * 2)
        if report["step"] == 2:  # the first one also counts the engine's start
            busy = sum(report["seconds"].values())
            assert 0 < busy <= report["step_s"] * 1.01


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
