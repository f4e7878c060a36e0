"""Parameters frozen and unfrozen while training, against plain loops, and the errors where ranks differ."""

from typing import Any

import pytest
import torch

from tests.distributed.odd_model import batch, build
from tests.distributed.ranks import run_ranks
from zero_core import AdamWConfig, ZeroConfig, ZeroEngine
from zero_core.errors import ModelError, UsageError
from zero_core.state_dict import full_state_dict, sharded_state_dict

pytestmark = pytest.mark.distributed

ADAMW = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
FROZEN = ("blocks.2.up.weight", "blocks.0.norm.bias", "norm.weight", "embed.weight")


def freeze(model: torch.nn.Module, trained: bool) -> None:
    for name in FROZEN:
        model.get_parameter(name).requires_grad_(trained)


def plain(schedule: list[bool]) -> dict[str, torch.Tensor]:
    """Frozen parameters are simply not stepped: torch skips a gradient of None. Moments stay as they are.

    The count of steps, which corrects the moments' bias, is the engine's: one for all parameters.
    """
    model = build()
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p for p in named.values() if p.dim() >= 2], "weight_decay": ADAMW["weight_decay"]},
        {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=ADAMW["lr"], betas=ADAMW["betas"], eps=ADAMW["eps"])
    for step, frozen in enumerate(schedule):
        freeze(model, not frozen)
        for index in range(2):
            (model(*batch(step, index)) / 2).backward()
        for parameter in named.values():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if parameter in optimizer.state:
                optimizer.state[parameter]["step"].fill_(step)
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach() for n, p in model.named_parameters()}


SCHEDULE = [False, True, True, False]


def engines(rank: int, world: int, want: dict[str, Any]) -> list[Any]:
    found = []
    for stage in (0, 1, 2, 3):
        config = ZeroConfig(
            stage=stage, micro_batches=2, tile=64, staging_bytes=4096, optimizer=AdamWConfig(**ADAMW)
        )
        engine = ZeroEngine(build(), config)
        for step, frozen in enumerate(SCHEDULE):
            freeze(engine.module, not frozen)
            before, moments = full_state_dict(engine), sharded_state_dict(engine)["ranges"]
            for index in engine.micro_batches:
                engine.backward(engine(*batch(step, index)))
            engine.step()
            after = full_state_dict(engine)
            kept = [name for name in FROZEN if torch.equal(before[name], after[name])]
            assert kept == (list(FROZEN) if frozen else []), (stage, step)
            if frozen:
                unmoved(moments, sharded_state_dict(engine)["ranges"])
        for name, tensor in want.items():
            torch.testing.assert_close(after[name], tensor, rtol=1e-5, atol=1e-6, msg=f"{stage} {name}")
        found.append({name: tensor.tolist() for name, tensor in after.items()})
    return found


def unmoved(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Momentum and variance of what is frozen are as they were, and others are not."""
    moved = 0
    for key, held in before.items():
        if held["kind"] not in ("momentum", "variance"):
            continue
        for slot in held["parameters"]:
            numel = torch.Size(slot["shape"]).numel()
            a, b = slot["offset"] - held["start"], slot["offset"] + numel - held["start"]
            old, new = (side[key]["tensor"][max(0, a) : max(0, b)] for side in (before, after))
            if slot["name"] in FROZEN:
                assert torch.equal(old, new), slot["name"]
            moved += int(not torch.equal(old, new))
    assert moved


@pytest.mark.parametrize("world", [1, 2])
def test_frozen_for_some_steps_equals_a_plain_loop_at_every_stage(world: int) -> None:
    want = plain(SCHEDULE)
    for stages in run_ranks(world, engines, want):
        assert all(found == stages[0] for found in stages[1:])


def whole_block(rank: int, world: int) -> list[Any]:
    """A unit all of whose parameters are frozen for now does not hold up the reductions of the others."""
    found = []
    for stage in (2, 3):
        engine = ZeroEngine(build(), ZeroConfig(stage=stage, tile=64, staging_bytes=4096))
        before = engine.memory().communication_buffers
        for step in range(3):
            for block in (engine.module.blocks[0], engine.module.blocks[2]):
                block.requires_grad_(step == 0)
            engine.backward(engine(*batch(step, rank)))
            engine.step()
        found.append((engine.memory().communication_buffers, engine.budget.communication_buffers, before))
    return found


def test_a_unit_frozen_as_a_whole_takes_no_more_buffers() -> None:
    for stages in run_ranks(2, whole_block):
        for buffers, predicted, _ in stages:
            assert buffers == predicted


def disagreeing(rank: int, world: int) -> list[str]:
    messages = []
    for stage in (0, 3):
        engine = ZeroEngine(build(), ZeroConfig(stage=stage, micro_batches=4, tile=64))
        model = engine.module

        def refused(engine: ZeroEngine = engine, error: type[Exception] = ModelError) -> None:
            with pytest.raises(error) as caught:
                engine(*batch(0, rank))
            messages.append(str(caught.value))

        model.blocks[2].down.bias.requires_grad_(rank != 1)  # on one rank only
        refused()
        model.blocks[2].down.bias.requires_grad_(True)
        model.blocks[1].up.weight.requires_grad_(rank == 0)  # frozen when the engine was built
        refused()
        model.blocks[1].up.weight.requires_grad_(False)
        engine.backward(engine(*batch(0, rank)))
        model.norm.bias.requires_grad_(False)  # in mid-step
        refused(error=UsageError)
        model.norm.bias.requires_grad_(True)
        engine.backward(engine(*batch(0, rank + 2)))
        assert engine.step().step == 1
        model.norm.bias.requires_grad_(False)
        with torch.no_grad():
            engine(*batch(0, 0))
        engine.backward(engine(*batch(1, rank)))
    return messages


def test_ranks_that_differ_are_an_error_on_every_rank_that_names_them() -> None:
    first, second = run_ranks(2, disagreeing)
    assert first == second
    assert "parameter blocks.2.down.bias is frozen on rank(s) [1] and trained on rank(s) [0]" in first[0]
    assert "parameter blocks.1.up.weight was frozen when the engine was built" in first[1]
    assert "on rank(s) [0]" in first[1]
    assert "requires_grad of ['norm.bias'] changed within a step" in first[2]
    assert first[3:] == first[:3]
