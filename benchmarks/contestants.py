"""The engines that are compared: each turns one model into a function that does one training step.

Every contestant trains the same built-in GPT with fused AdamW on the same batches, one micro-batch per rank
and step, so that the losses must agree. Peers are used as their documentation shows, at their defaults.
Each times its own forward, backward and optimizer; what it hides in them is its own.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks import deepspeed_peer
from benchmarks.results import BASE, FLOOR, NATIVE
from zero_core import AdamWConfig, ZeroConfig, ZeroEngine, widened_products
from zero_core.config import Products

LR, BETAS, EPS, DECAY = 3e-4, (0.9, 0.95), 1e-8, 0.1


@dataclass(slots=True)
class Outcome:
    """One step of one rank: loss before the update, seconds by phase, bytes by kind if it counts them."""

    loss: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    bytes_sent: dict[str, int] | None = None

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[phase] = time.perf_counter() - began


Step = Callable[[torch.Tensor, torch.Tensor], Outcome]
"""One training step on this rank's (inputs, targets), both int64 [batch, sequence]."""


@dataclass(frozen=True, slots=True)
class Trainee:
    """A model that is ready to be trained. `model_states`: bytes of this rank as (measured, predicted)."""

    step: Step
    model_states: Callable[[], tuple[int, int]] | None = None


def _groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Decay for matrices only, as everywhere here."""
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def _adamw(param_groups: list[dict[str, Any]]) -> torch.optim.AdamW:
    return torch.optim.AdamW(param_groups, lr=LR, betas=BETAS, eps=EPS, fused=True)


def _forward_backward(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> Outcome:
    outcome = Outcome()
    with outcome.timed("forward"):
        loss = model(inputs, targets)
    with outcome.timed("backward"):
        loss.backward()
    outcome.loss = float(loss.detach())
    return outcome


def _plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> Trainee:
    def step(inputs: torch.Tensor, targets: torch.Tensor) -> Outcome:
        outcome = _forward_backward(model, inputs, targets)
        with outcome.timed("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
        return outcome

    return Trainee(step)


def _ddp(model: nn.Module) -> Trainee:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return _plain(wrapped, _adamw(_groups(list(wrapped.parameters()))))


def _ddp_zero_redundancy(model: nn.Module) -> Trainee:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        _groups(list(wrapped.parameters())), torch.optim.AdamW, lr=LR, betas=BETAS, eps=EPS, fused=True
    )
    return _plain(wrapped, optimizer)


def _ddp_bf16_master(model: nn.Module) -> Trainee:
    """DDP on bf16 parameters, with fp32 masters kept by hand."""
    masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    wrapped = DistributedDataParallel(model.bfloat16(), gradient_as_bucket_view=True)
    optimizer = _adamw(_groups(masters))

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> Outcome:
        outcome = _forward_backward(wrapped, inputs, targets)
        with outcome.timed("optimizer"), torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                master.grad = parameter.grad.float() if parameter.grad is not None else None
            optimizer.step()
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
                master.grad = parameter.grad = None
        return outcome

    return Trainee(step)


def _fsdp2(precision: str, *, reshard: bool) -> Callable[[nn.Module], Trainee]:
    def build(model: nn.Module) -> Trainee:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        policy = (
            MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            if precision == "bf16"
            else MixedPrecisionPolicy()
        )
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
        return _plain(model, _adamw(_groups(list(model.parameters()))))

    return build


def _deepspeed(stage: int, precision: str) -> Callable[[nn.Module], Trainee]:
    def build(model: nn.Module) -> Trainee:
        adamw = {"lr": LR, "betas": list(BETAS), "eps": EPS}
        engine = deepspeed_peer.initialise(
            model, _groups(list(model.parameters())), stage=stage, precision=precision, adamw=adamw
        )

        def step(inputs: torch.Tensor, targets: torch.Tensor) -> Outcome:
            outcome = Outcome()
            with outcome.timed("forward"):
                loss = engine(inputs, targets)
            with outcome.timed("backward"):
                engine.backward(loss)
            with outcome.timed("optimizer"):
                engine.step()
            outcome.loss = float(loss.detach())
            return outcome

        return Trainee(step)

    return build


def _ours(stage: int, precision: str, products: Products = "auto") -> Callable[[nn.Module], Trainee]:
    """The engine of this repository, at its defaults but for `products`."""

    def build(model: nn.Module) -> Trainee:
        adamw = AdamWConfig(lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
        config = ZeroConfig(
            stage=stage, precision=precision, low_precision_products=products, optimizer=adamw
        )
        engine = ZeroEngine(model, config)

        def step(inputs: torch.Tensor, targets: torch.Tensor) -> Outcome:
            loss = engine(inputs, targets)
            engine.backward(loss)
            report = engine.step()
            return Outcome(float(loss.detach()), report.seconds, report.bytes_sent)

        return Trainee(step, lambda: (engine.memory().model_states, engine.budget.model_states))

    return build


def _floor(precision: str) -> Callable[[nn.Module], Trainee]:
    """What cannot be undercut: forward and backward without communication, AdamW on 1/N of the state.

    Rank r updates elements [rΨ/N, (r+1)Ψ/N) of the parameters laid end to end. In bf16 their masters are
    fp32, gradients are widened and parameters are the masters rounded, as in every bf16 contestant; products
    are computed as our own stages compute them. Losses drift from the others', since the rest of the
    parameters stays as it was.
    """

    def build(model: nn.Module) -> Trainee:
        owned = _owned_slices(list(model.parameters()))
        if precision == "bf16":
            masters = [nn.Parameter(p.detach().flatten()[a:b].clone()) for p, a, b in owned]
            model.bfloat16()
        else:
            masters = [nn.Parameter(p.detach().view(-1)[a:b]) for p, a, b in owned]
        matrix = [p.dim() >= 2 for p, _, _ in owned]
        optimizer = _adamw(
            [
                {"params": [m for m, is_matrix in zip(masters, matrix, strict=True) if is_matrix is wanted]}
                | {"weight_decay": DECAY if wanted else 0.0}
                for wanted in (True, False)
            ]
        )

        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        products = widened_products(dtype, torch.device("cpu"))

        def step(inputs: torch.Tensor, targets: torch.Tensor) -> Outcome:
            with products:
                outcome = _forward_backward(model, inputs, targets)
            with outcome.timed("optimizer"), torch.no_grad():
                for master, (parameter, start, stop) in zip(masters, owned, strict=True):
                    master.grad = parameter.grad.view(-1)[start:stop].float()
                optimizer.step()
                for master, (parameter, start, stop) in zip(masters, owned, strict=True):
                    if precision == "bf16":
                        parameter.view(-1)[start:stop].copy_(master)
                    master.grad = None
                model.zero_grad()
            return outcome

        return Trainee(step)

    return build


def _owned_slices(parameters: list[nn.Parameter]) -> list[tuple[nn.Parameter, int, int]]:
    """This rank's equal share of all elements, as (parameter, start, stop) within it."""
    total, world, rank = sum(p.numel() for p in parameters), dist.get_world_size(), dist.get_rank()
    first, last, reached, found = rank * total // world, (rank + 1) * total // world, 0, []
    for parameter in parameters:
        start = min(max(first - reached, 0), parameter.numel())
        stop = min(max(last - reached, 0), parameter.numel())
        if start < stop:
            found.append((parameter, start, stop))
        reached += parameter.numel()
    return found


def build(name: str, precision: str, model: nn.Module) -> Trainee:
    """Wrap `model`, in fp32, as the contestant of that name."""
    builders = {
        BASE: _ddp_bf16_master if precision == "bf16" else _ddp,
        "ddp + zero-redundancy": _ddp_zero_redundancy,
        "fsdp2 keep": _fsdp2(precision, reshard=False),
        "fsdp2 reshard": _fsdp2(precision, reshard=True),
        FLOOR: _floor(precision),
    }
    builders |= {f"deepspeed {stage}": _deepspeed(stage, precision) for stage in (1, 2, 3)}
    builders |= {f"stage {stage}": _ours(stage, precision) for stage in (0, 1, 2, 3)}
    builders[NATIVE] = _ours(2, precision, "native")
    return builders[name](model)
