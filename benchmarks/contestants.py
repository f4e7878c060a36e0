"""The engines that are compared: each turns one model into a function that does one training step.

Every contestant trains the same built-in GPT with fused AdamW on the same batches, one micro-batch per rank
and step, so that the losses must agree. Peers are used as their documentation shows, at their defaults.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from zero_core import AdamWConfig, ZeroConfig, ZeroEngine

LR, BETAS, EPS, DECAY = 3e-4, (0.9, 0.95), 1e-8, 0.1

Step = Callable[[torch.Tensor, torch.Tensor], float]
"""One training step on this rank's (inputs, targets); returns this rank's loss before the update."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """An engine under a name, in one precision."""

    name: str
    precision: str
    build: Callable[[nn.Module], Step]


def _groups(parameters: list[nn.Parameter]) -> list[dict[str, object]]:
    """Decay for matrices only, as everywhere here."""
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def _adamw(parameters: list[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(_groups(parameters), lr=LR, betas=BETAS, eps=EPS, fused=True)


def _plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        loss = model(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def ddp(model: nn.Module) -> Step:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return _plain(wrapped, _adamw(list(wrapped.parameters())))


def ddp_zero_redundancy(model: nn.Module) -> Step:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        _groups(list(wrapped.parameters())), torch.optim.AdamW, lr=LR, betas=BETAS, eps=EPS, fused=True
    )
    return _plain(wrapped, optimizer)


def ddp_bf16_master(model: nn.Module) -> Step:
    """DDP on bf16 parameters, with fp32 masters kept by hand."""
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    wrapped = DistributedDataParallel(model.bfloat16(), gradient_as_bucket_view=True)
    optimizer = _adamw(masters)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        loss = wrapped(inputs, targets)
        loss.backward()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                master.grad = parameter.grad.float() if parameter.grad is not None else None
            optimizer.step()
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
                parameter.grad = None
        return float(loss.detach())

    return step


def fsdp2(precision: str, *, reshard: bool) -> Callable[[nn.Module], Step]:
    def build(model: nn.Module) -> Step:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        policy = (
            MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            if precision == "bf16"
            else MixedPrecisionPolicy()
        )
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
        return _plain(model, _adamw(list(model.parameters())))

    return build


def ours(stage: int, precision: str) -> Callable[[nn.Module], Step]:
    def build(model: nn.Module) -> Step:
        adamw = AdamWConfig(lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
        engine = ZeroEngine(model, ZeroConfig(stage=stage, precision=precision, optimizer=adamw))

        def step(inputs: torch.Tensor, targets: torch.Tensor) -> float:
            loss = engine(inputs, targets)
            engine.backward(loss)
            engine.step()
            return float(loss.detach())

        return step

    return build


def floor(model: nn.Module) -> Step:
    """What cannot be undercut: forward and backward without communication, AdamW on 1/N of the state."""
    parameters, world, rank = list(model.parameters()), dist.get_world_size(), dist.get_rank()
    total, reached, mine = sum(p.numel() for p in parameters), 0, []
    for parameter in parameters:
        if rank * total // world <= reached < (rank + 1) * total // world:
            mine.append(parameter)
        reached += parameter.numel()
    optimizer = _adamw(mine or parameters[:1])

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        loss = model(inputs, targets)
        loss.backward()
        optimizer.step()
        for parameter in parameters:
            parameter.grad = None
        return float(loss.detach())

    return step


def contestants() -> list[Contestant]:
    """All of them; the first of each precision is the one that ratios refer to."""
    found = [
        Contestant("ddp", "fp32", ddp),
        Contestant("ddp+zero-redundancy", "fp32", ddp_zero_redundancy),
        Contestant("ddp+master", "bf16", ddp_bf16_master),
    ]
    for precision in ("fp32", "bf16"):
        found.append(Contestant("fsdp2 reshard", precision, fsdp2(precision, reshard=True)))
        found.append(Contestant("fsdp2 keep", precision, fsdp2(precision, reshard=False)))
        found += [Contestant(f"stage {s}", precision, ours(s, precision)) for s in (0, 1, 2, 3)]
    found.append(Contestant("floor", "fp32", floor))
    return found
