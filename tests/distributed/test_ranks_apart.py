"""Ranks that are built, called or timed differently: a clear error on all of them, or no difference."""

import itertools
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.odd_model import batch, build
from tests.distributed.ranks import RankFailedError, run_ranks
from zero_core import AdamWConfig, ZeroConfig, ZeroEngine, checkpoint
from zero_core.errors import DivergenceError, PeerLostError
from zero_core.state_dict import full_state_dict

pytestmark = pytest.mark.distributed


class Layers(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(count))

    def forward(self, x: torch.Tensor, order: tuple[int, ...] | None = None) -> torch.Tensor:
        for index in order or range(len(self.layers)):
            x = self.layers[index](x)
        return x.square().mean()


def of_layers(count: int, **settings: Any) -> ZeroEngine:
    torch.manual_seed(0)
    return ZeroEngine(Layers(count), ZeroConfig(**{"stage": 3, "tile": 64, **settings}))


def toggling(rank: int, world: int, transport: str) -> list[tuple[int, float]]:
    """Another way through the model in every second step, on all ranks alike (DeepSpeed 3599, 7205)."""
    engine = of_layers(3, transport=transport, collective_timeout_s=20)
    found = []
    for step in range(6):
        order = (0, 1, 2) if step % 2 == 0 else (0, 1)
        engine.backward(engine(torch.ones(2, 8), order))
        report = engine.step()
        extra = engine.memory().communication_buffers - engine.budget.communication_buffers
        found.append((extra, report.loss))
    return found


def test_a_branch_that_all_ranks_toggle_costs_nothing() -> None:
    near, far = (run_ranks(2, toggling, transport)[0] for transport in ("auto", "network"))
    assert near == far
    assert [extra for extra, _ in near] == [0] * 6


def evaluating(rank: int, world: int) -> float:
    """More notices than a socket holds, which nobody waits for."""
    engine = of_layers(40, collective_timeout_s=20)
    with torch.no_grad():
        for _ in range(120):
            engine(torch.ones(1, 8))
    engine.backward(engine(torch.ones(2, 8)))
    return engine.step().loss


def test_a_long_evaluation_fills_no_socket() -> None:
    first, second = run_ranks(2, evaluating, timeout_s=90)
    assert first == second


def unequal(rank: int, world: int, transport: str) -> list[str]:
    messages = []
    for first, second in (
        ({"tile": 64}, {"tile": 256}),
        ({"precision": "bf16"}, {"precision": "fp32"}),
        ({"clip_norm": 1.0}, {"clip_norm": 0.01}),
        ({"stage": 1}, {"stage": 2}),
        ({"count": 3}, {"count": 4}),
    ):
        settings = {"count": 3, "transport": transport, **(first if rank == 0 else second)}
        try:
            of_layers(settings.pop("count"), **settings)
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


@pytest.mark.parametrize("transport", ["auto", "network"])
def test_other_settings_or_another_model_are_refused_on_every_rank(transport: str) -> None:
    for messages in run_ranks(2, unequal, transport, timeout_s=30):
        for message, word in zip(
            messages,
            ("tile is 256 on rank 1 and 64", "precision", "clip_norm", "stage", "layers.3"),
            strict=True,
        ):
            assert word in message
            assert message.startswith("ModelError" if word == "layers.3" else "ConfigError")


def mixed_up(rank: int, world: int) -> str:
    """One rank reads the whole model while the other goes on training."""
    engine = of_layers(3, collective_timeout_s=20)
    try:
        if rank == 0:
            full_state_dict(engine)
        else:
            engine.backward(engine(torch.ones(2, 8)))
    except (DivergenceError, PeerLostError) as error:
        engine.detach()
        return str(error)
    return ""


def test_reading_on_one_rank_while_another_trains_is_an_error() -> None:
    messages = run_ranks(2, mixed_up, timeout_s=40)
    assert any("the first forward of a step" in m and "the reading outside of a step" in m for m in messages)


def late_evaluation(rank: int, world: int, folder: Path) -> float:
    """A checkpoint is loaded while a slower rank still evaluates: it must see the values of before."""
    engine = of_layers(3, optimizer=AdamWConfig(lr=0.1))
    checkpoint.save(engine, folder, extra={}, generation=1)
    saved = next(folder.glob("step-*"))
    engine.backward(engine(torch.ones(2, 8)))
    engine.step()
    time.sleep(0.5 * rank)
    with torch.no_grad():
        seen = float(engine(torch.ones(2, 8)))
    checkpoint.load(engine, saved)
    return seen


def test_a_load_waits_for_those_that_still_read(tmp_path: Path) -> None:
    first, second = run_ranks(2, late_evaluation, tmp_path)
    assert first == second


def waiting(rank: int, world: int) -> float:
    engine = of_layers(2, transport="network", collective_timeout_s=1)
    if rank == 1:
        time.sleep(6)
        return 0.0
    began = time.monotonic()
    with pytest.raises(PeerLostError, match="within 1 s"):
        engine.backward(engine(torch.ones(2, 8)))
    return time.monotonic() - began


def test_the_timeout_holds_between_hosts() -> None:
    # The group is broken then, which the harness's last barrier says on a rank.
    with pytest.raises(RankFailedError, match=r"barrier|Connection|closed"):
        run_ranks(2, waiting, timeout_s=30)


def slowed(rank: int, world: int, stage: int, slow: bool) -> list[float]:
    """Ranks that read late: what they read must not have been written again."""
    config = ZeroConfig(stage=stage, micro_batches=5, tile=64, optimizer=AdamWConfig(lr=1e-2))
    engine = ZeroEngine(build(), config)
    if slow:
        calls = itertools.count()
        for name in ("finish_reduce", "begin_gather"):
            original = getattr(engine.collectives, name)

            def late(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
                if (next(calls) * 7 + rank * 3) % 5 == 0:
                    time.sleep(0.004)
                return _original(*args, **kwargs)

            setattr(engine.collectives, name, late)
    found = []
    for step in range(3):
        for index in engine.micro_batches:
            engine.backward(engine(*batch(step, index)))
        report = engine.step()
        found += [report.loss, report.grad_norm]
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_no_buffer_is_written_while_a_slow_rank_reads_it(stage: int) -> None:
    """The kind of E19 (PyTorch issues 180889 and 179443), with ranks in place of streams."""
    plain = run_ranks(3, slowed, stage, False)[0]
    for got in run_ranks(3, slowed, stage, True):
        assert got == plain


class _Dawdle(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, pause_s: float) -> torch.Tensor:
        ctx.pause_s = pause_s
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.pause_s)
        return gradient, None


class SlowLayer(nn.Module):
    """A layer whose backward takes now more, now less time on each rank."""

    def __init__(self, pauses: random.Random | None) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self._pauses = pauses

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # In four of ten layers, so that ranks come to be several reductions apart, in both directions.
        pause_s = 0.0 if self._pauses is None else max(0.0, self._pauses.uniform(-0.03, 0.02))
        return torch.tanh(self.linear(_Dawdle.apply(x, pause_s)))


def out_of_step(rank: int, world: int, stage: int, micro_batches: int, slow: bool) -> tuple[Any, ...]:
    """Losses, norms and parameters of three steps, and the bytes of buffers beyond the predicted ones."""
    torch.manual_seed(0)
    pauses = random.Random(rank) if slow else None
    model = nn.Sequential(*(SlowLayer(pauses) for _ in range(10)))
    engine = ZeroEngine(
        model, ZeroConfig(stage=stage, tile=64, micro_batches=micro_batches, optimizer=AdamWConfig(lr=1e-2))
    )
    steps = []
    for step in range(3):
        for index in engine.micro_batches:
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * step + index))
            engine.backward(engine(x).square().mean())
        report = engine.step()
        steps.append((report.loss, report.grad_norm))
    extra = engine.memory().communication_buffers - engine.budget.communication_buffers
    with engine.full_parameters():
        found = [p.detach().flatten().tolist() for p in model.parameters()]
    engine.detach()
    return steps, found, extra


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_that_take_turns_in_being_late_change_no_bit(stage: int) -> None:
    """No rank fills a buffer again while a slower one has not read it, nor needs more of them."""
    for micro_batches in (3, 5):
        together = run_ranks(3, out_of_step, stage, micro_batches, False, timeout_s=120)
        apart = run_ranks(3, out_of_step, stage, micro_batches, True, timeout_s=120)
        assert together == apart
        assert [extra for *_, extra in apart] == [0, 0, 0]
