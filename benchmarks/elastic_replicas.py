"""What a replica after every step costs: two engines in the same ranks, one with and one without, take turns.

A turn is a few steps of one engine. It ends when its last replica is complete and all ranks are there, so
that whatever goes on behind a step's back is paid by the turn that caused it.
"""

import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.contestants import BETAS, DECAY, EPS, LR
from benchmarks.elastic_results import ReplicaResult
from benchmarks.measure import batch, build_model
from tests.distributed.ranks import run_ranks
from zero_core import AdamWConfig, StepReport, ZeroConfig, ZeroEngine

RANKS, STAGE = 4, 2
_TIMEOUT_S = 900.0
_WARMUP_STEPS = 2


@dataclass(slots=True, kw_only=True)
class _Side:
    """One of the two engines in one rank: seconds a step of each turn, and what its reports say in all."""

    engine: ZeroEngine
    turns_s: list[float]
    steps: int = 0
    seconds: float = 0.0
    bytes_sent: int = 0

    def take(self, report: StepReport) -> None:
        self.steps += 1
        self.seconds += report.seconds.get("replica", 0.0)
        self.bytes_sent += report.bytes_sent.get("replica", 0)


def measure_replicas(size: str, *, turns: int, steps: int) -> ReplicaResult:
    """`turns` of `steps` steps for each engine, on four ranks at stage 2. Raises RankFailedError."""
    ranks = run_ranks(RANKS, _train, size, turns, steps, timeout_s=_TIMEOUT_S)
    on, off = ([rank[side] for rank in ranks] for side in (True, False))
    return ReplicaResult(
        size=size,
        with_s=_means([turns_s for turns_s, *_ in on]),
        without_s=_means([turns_s for turns_s, *_ in off]),
        seconds=statistics.mean(seconds for _, seconds, _, _ in on),
        bytes_sent=sum(sent for _, _, sent, _ in on),
        held_bytes=sum(held for _, _, _, held in on),
        off=(
            statistics.mean(seconds for _, seconds, _, _ in off),
            sum(sent for _, _, sent, _ in off),
            sum(held for _, _, _, held in off),
        ),
    )


def _means(ranks: list[list[float]]) -> list[float]:
    """Turn by turn, over the ranks."""
    return [statistics.mean(turn) for turn in zip(*ranks, strict=True)]


def _train(
    rank: int, _world_size: int, size: str, turns: int, steps: int
) -> dict[bool, tuple[list[float], float, float, int]]:
    """By whether replicas are on: seconds a step of each turn; of a step seconds and bytes; bytes held."""
    adamw = AdamWConfig(lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    sides = {
        on: _Side(
            engine=ZeroEngine(build_model(size), ZeroConfig(stage=STAGE, optimizer=adamw, replicas=int(on))),
            turns_s=[],
        )
        for on in (True, False)
    }
    for side in sides.values():
        _turn(side, rank, _WARMUP_STEPS)
    for side in sides.values():
        side.turns_s.clear()
        side.steps, side.seconds, side.bytes_sent = 0, 0.0, 0
    for number in range(turns):
        first = number % 2 == 0  # neither always follows the other
        for on in (first, not first):
            _turn(sides[on], rank, steps)
    return {
        on: (
            side.turns_s,
            side.seconds / side.steps,
            side.bytes_sent / side.steps,
            side.engine.memory().replicas,
        )
        for on, side in sides.items()
    }


def _turn(side: _Side, rank: int, steps: int) -> None:
    batches = [batch(side.steps + index, rank) for index in range(steps)]
    dist.barrier()
    began = time.perf_counter()
    for inputs, targets in batches:
        _step(side, inputs, targets)
    side.engine.settle_replicas()
    dist.barrier()
    side.turns_s.append((time.perf_counter() - began) / steps)


def _step(side: _Side, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    loss = side.engine(inputs, targets)
    side.engine.backward(loss)
    side.take(side.engine.step())
