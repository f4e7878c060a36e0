"""What callers may not do: refused on every rank, before anything is changed."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.odd_model import batch, build
from tests.distributed.ranks import run_ranks
from zero_core import AdamWConfig, ZeroConfig, ZeroEngine, checkpoint
from zero_core.errors import ConfigError, UsageError
from zero_core.reshard import take_over
from zero_core.state_dict import (
    full_state_dict,
    load_full_state_dict,
    load_sharded_state_dict,
    sharded_state_dict,
)

pytestmark = pytest.mark.distributed


def make(stage: int, **more: Any) -> ZeroEngine:
    config = ZeroConfig(stage=stage, tile=64, staging_bytes=4096, optimizer=AdamWConfig(lr=1e-2), **more)
    return ZeroEngine(build(), config)


def train(engine: ZeroEngine, number: int) -> float:
    for index in engine.micro_batches:
        engine.backward(engine(*batch(number, index)))
    return engine.step().loss


def ways_to_fill(engine: ZeroEngine, root: Path) -> dict[str, Callable[[], Any]]:
    """Every call that writes states, each to the state the engine is in now."""
    whole, parts, held = full_state_dict(engine), sharded_state_dict(engine), engine.snapshots()
    if not (root / "saved").exists():
        dist.barrier()
        saved = checkpoint.save(engine, root / "saved", extra={}, generation=0).path
        if engine.rank == 0:
            checkpoint.export_model(saved, root / "model")
        dist.barrier()
    newest = next((root / "saved").glob("*/manifest.json")).parent
    return {
        "load": lambda: checkpoint.load(engine, newest),
        "load_newest": lambda: checkpoint.load_newest(engine, root / "saved"),
        "import_model": lambda: checkpoint.import_model(engine, root / "model"),
        "full": lambda: load_full_state_dict(engine, whole),
        "sharded": lambda: load_sharded_state_dict(engine, parts),
        "take_over": lambda: take_over(engine, held, group=dist.group.WORLD),
    }


def filled_within_a_step(rank: int, world: int, root: Path, stage: int) -> list[str]:
    """M 5 at N 2: rank 1 has less to do, and serves the last round."""
    want = make(stage, micro_batches=5)
    expected = [train(want, number) for number in (0, 1)]
    engine, messages = make(stage, micro_batches=5), []
    fills = ways_to_fill(engine, root)
    for name, fill in fills.items():
        loss = engine(*batch(0, rank))
        with pytest.raises(UsageError, match="within a step") as caught:
            fill()
        messages.append(f"{name}: {caught.value}")
        engine.backward(loss)
        with pytest.raises(UsageError, match="within a step"):
            fill()
        for index in engine.micro_batches[1:]:
            engine.backward(engine(*batch(0, index)))
        with pytest.raises(UsageError, match="within a step"):
            fill()
        assert engine.step().loss == expected[0], "a refusal changes nothing"
        assert train(engine, 1) == expected[1]
        engine = make(stage, micro_batches=5)
        fills.update(ways_to_fill(engine, root))
    return messages


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_states_are_not_written_within_a_step(tmp_path: Path, stage: int) -> None:
    for messages in run_ranks(2, filled_within_a_step, tmp_path, stage, timeout_s=120):
        assert all("on rank(s) [0, 1]" in message for message in messages)
        assert len(messages) == 6


class AccidentError(Exception):
    """What interrupts a step."""


def once(owner: Any, name: str, *, at: int = 1) -> None:
    """The call number `at` of a method raises, others go through."""
    real, calls = getattr(owner, name), [0]

    def called(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == at:
            raise AccidentError
        return real(*args, **kwargs)

    setattr(owner, name, called)


def accident(engine: ZeroEngine, where: str) -> None:
    if where == "forward":
        once(engine.module.norm, "forward")
    elif where == "second forward":
        once(engine.module.norm, "forward", at=2)
    elif where == "one rank's forward" and engine.rank == 0:
        once(engine.module.norm, "forward")
    elif where == "backward":
        once(engine._reducer, "_exchange", at=2)
    elif where == "second backward":
        once(engine._reducer, "_exchange", at=5)
    elif where == "vote":
        once(engine._live, "before_vote")


def filled_after_an_accident(rank: int, world: int, root: Path, stage: int, where: str) -> None:
    want = make(stage, micro_batches=4)
    expected = [train(want, number) for number in (0, 1, 2)]
    for name in ("load_newest", "full", "sharded", "take_over"):
        engine = make(stage, micro_batches=4)
        train(engine, 0)
        fill = ways_to_fill(engine, root)[name]
        accident(engine, where)
        try:
            for index in engine.micro_batches:
                loss = engine(*batch(7, index))
                if where == "one rank's forward":
                    break
                engine.backward(loss)
            else:
                engine.step()
        except AccidentError:
            pass
        fill()
        assert [train(engine, number) for number in (1, 2)] == expected[1:], (name, where)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("where", ["forward", "second forward", "backward", "second backward", "vote"])
def test_after_a_step_that_failed_states_may_be_written(tmp_path: Path, stage: int, where: str) -> None:
    run_ranks(2, filled_after_an_accident, tmp_path, stage, where, timeout_s=120)


def test_a_step_that_failed_on_one_rank_has_failed(tmp_path: Path) -> None:
    run_ranks(2, filled_after_an_accident, tmp_path, 2, "one rank's forward", timeout_s=120)


def wrong_rates(rank: int, world: int) -> None:
    engine, want = make(2), make(2)
    for own in (engine, want):
        own.backward(own(*batch(0, rank)))
    for lr in (math.nan, math.inf, -1.0):
        with pytest.raises(ConfigError, match=f"lr {lr} "):
            engine.step(lr=lr)
    assert engine.step(lr=0.5).loss == want.step(lr=0.5).loss
    assert all(map(torch.equal, *(full_state_dict(own).values() for own in (engine, want))))
    assert train(engine, 1) == train(want, 1)


def test_a_rate_that_no_optimizer_takes_is_refused_before_the_step() -> None:
    run_ranks(2, wrong_rates)


def state_dicts_of_the_module(rank: int, world: int) -> None:
    for stage in (2, 3):
        engine = make(stage)
        train(engine, 0)
        model, whole = engine.module, full_state_dict(engine)
        for part, name in ((model, "permutation"), (model.blocks[0], "gain"), (model.norm, "weight")):
            if stage == 3:
                with pytest.raises(UsageError, match=f"{name} has no values .*full_state_dict"):
                    part.state_dict()
            else:
                assert torch.equal(part.state_dict()[name], part.get_parameter(name))
        with engine.full_parameters():
            found = model.state_dict()
            assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())
        with engine.full_parameters(names=["blocks.0"]):
            assert torch.equal(model.blocks[0].state_dict()["gain"], whole["blocks.0.gain"])
        train(engine, 1)
        engine.detach()
        assert list(model.state_dict()) == list(whole), "an ordinary module again"
        model.load_state_dict(whole, assign=True)
        assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in whole.items())


def test_a_module_without_values_gives_no_state_dict() -> None:
    run_ranks(2, state_dicts_of_the_module)
