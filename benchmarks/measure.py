"""One cell: one contestant on one model at one number of ranks, in fresh processes.

A cell has four parts. The model is built and wrapped (memory sampled); warm-up; timed steps, in which nothing
is sampled and the interface's counter is read before and after; a few more steps that are not timed, with a
thread in every rank that samples its proportional set size. All contestants go through the same.
"""

import gc
import os
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing import get_context

import torch
import torch.distributed as dist

from benchmarks import deepspeed_peer
from benchmarks.contestants import Outcome, Step, build
from benchmarks.plan import MICRO_BATCH, SEQUENCE, SIZES, VOCABULARY, Run
from benchmarks.probes import PeakPss, busy_cpu_s, pss_bytes
from benchmarks.results import CellResult
from tests.distributed.namespaces import Host, sent
from tests.distributed.ranks import run_ranks
from workers.models import GPT
from workers.spec import GPTModel

_TIMEOUT_S = 900.0
_SEED = 0
_IMPORTED_LATE = ["torch._dynamo", "torch._inductor.compile_fx", "torch.utils.cpp_extension", "networkx"]


@dataclass(slots=True, kw_only=True)
class _RankFigures:
    """What one rank saw; `outcomes` of all steps that count, `wire_bytes` of the whole interface."""

    parameters: int
    times_s: list[float]
    outcomes: list[Outcome]
    losses: list[float]
    wire_bytes: int
    peak_bytes: int
    building_bytes: int
    model_states: tuple[int, int] | None
    own_cpu_s: float
    busy_cpu_s: float
    elapsed_s: float


def preload() -> None:
    """Have ranks forked from a process that has imported everything but DeepSpeed. Before the first rank.

    The compiler too, which torch's optimizers import when they are built: 60 MB that are nobody's training.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it warns of addresses without names
    get_context("forkserver").set_forkserver_preload(["benchmarks.measure", *_IMPORTED_LATE])


def measure(run: Run, contestant: str, host: Host | None) -> CellResult:
    """Run one cell, all ranks on `host` (None: where the caller is). Raises RankFailedError."""
    hosts = None if host is None else [host] * run.world_size
    interface = "lo" if host is None else host.interface
    ranks = run_ranks(run.world_size, _train, run, contestant, interface, timeout_s=_TIMEOUT_S, hosts=hosts)
    return _combine(run, ranks)


def prepare_deepspeed(host: Host | None) -> None:
    """Compile DeepSpeed's ops. Raises RankFailedError where it cannot run."""
    run_ranks(1, deepspeed_peer.build_ops, timeout_s=_TIMEOUT_S, hosts=None if host is None else [host])


def build_model(size: str) -> GPT:
    """The same parameters in every rank and contestant."""
    layers, hidden, heads = SIZES[size]
    spec = GPTModel(layers=layers, hidden=hidden, heads=heads, vocabulary=VOCABULARY, tied_head=False)
    torch.manual_seed(_SEED)
    return GPT(spec, sequence_length=SEQUENCE)


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(inputs, targets), int64 [MICRO_BATCH, SEQUENCE]; half repeats a cycle, so that losses can fall."""
    generator = torch.Generator().manual_seed(1_000 * step + rank)
    tokens = torch.randint(0, VOCABULARY, (MICRO_BATCH, SEQUENCE + 1), generator=generator)
    tokens[:, ::2] = torch.arange(SEQUENCE // 2 + 1) * 7 % VOCABULARY
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _train(rank: int, _world_size: int, run: Run, name: str, interface: str) -> _RankFigures:
    if name.startswith("deepspeed"):
        deepspeed_peer.load()
    gc.collect()
    dist.barrier()
    baseline = pss_bytes()
    with PeakPss() as building:
        model = build_model(run.size)
        parameters = sum(p.numel() for p in model.parameters())
        trainee = build(name, run.precision, model)
    torch.set_num_threads(1)  # in case a peer has set it
    warmup = [trainee.step(*batch(index, rank)).loss for index in range(run.warmup)]
    figures = _timed_steps(run, trainee.step, rank, interface)
    states = trainee.model_states() if trainee.model_states is not None else None
    dist.barrier()
    with PeakPss() as training:
        for index in range(run.memory_steps):
            trainee.step(*batch(run.warmup + run.steps + index, rank))
    figures.parameters = parameters
    figures.losses = warmup + [outcome.loss for outcome in figures.outcomes]
    figures.peak_bytes = training.bytes - baseline
    figures.building_bytes = building.bytes - baseline
    figures.model_states = states
    return figures


def _timed_steps(run: Run, step: Step, rank: int, interface: str) -> _RankFigures:
    batches = [batch(run.warmup + index, rank) for index in range(run.steps)]
    times_s, outcomes = [], []
    dist.barrier()
    wire, busy, own, began = sent(interface), busy_cpu_s(), time.process_time(), time.perf_counter()
    for inputs, targets in batches:
        step_began = time.perf_counter()
        outcomes.append(step(inputs, targets))
        times_s.append(time.perf_counter() - step_began)
    dist.barrier()  # it follows the data through the same sockets, so the data has left
    return _RankFigures(
        parameters=0,
        times_s=times_s,
        outcomes=outcomes,
        losses=[],
        wire_bytes=sent(interface).since(wire).bytes,
        peak_bytes=0,
        building_bytes=0,
        model_states=None,
        own_cpu_s=time.process_time() - own,
        busy_cpu_s=busy_cpu_s() - busy,
        elapsed_s=time.perf_counter() - began,
    )


def _combine(run: Run, ranks: list[_RankFigures]) -> CellResult:
    first = ranks[0]
    seconds: Counter[str] = Counter()
    ledger = 0
    counted = all(outcome.bytes_sent is not None for rank in ranks for outcome in rank.outcomes)
    for outcome in (outcome for rank in ranks for outcome in rank.outcomes):
        for phase, spent in outcome.seconds.items():
            seconds[phase] += spent / run.steps / run.world_size
        ledger += sum((outcome.bytes_sent or {}).values())
    states = [rank.model_states for rank in ranks if rank.model_states is not None]
    foreign_s = first.busy_cpu_s - sum(rank.own_cpu_s for rank in ranks)
    return CellResult(
        step_s=statistics.median(map(statistics.mean, zip(*(rank.times_s for rank in ranks), strict=True))),
        losses=[statistics.mean(step) for step in zip(*(rank.losses for rank in ranks), strict=True)],
        parameters=first.parameters,
        wire_bytes=first.wire_bytes / run.world_size / run.steps,
        ledger_bytes=ledger / run.world_size / run.steps if counted else None,
        peak_bytes=max(rank.peak_bytes for rank in ranks),
        building_bytes=max(rank.building_bytes for rank in ranks),
        seconds=dict(seconds),
        model_states=(sum(s[0] for s in states), sum(s[1] for s in states)) if states else None,
        foreign_cores=max(0.0, foreign_s / first.elapsed_s),
    )
