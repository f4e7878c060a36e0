"""Whole parameters under a context manager: read, edited alike on every rank, or refused on every rank."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.distributed.odd_model import batch, build
from tests.distributed.ranks import run_ranks
from zero_core import AdamWConfig, ZeroConfig, ZeroEngine
from zero_core.errors import UsageError
from zero_core.state_dict import full_state_dict
from zero_core.units import UnitState

pytestmark = pytest.mark.distributed

KINDS = [(stage, precision) for stage in (0, 1, 2, 3) for precision in ("fp32", "bf16")]


def make(stage: int, precision: str = "fp32") -> ZeroEngine:
    config = ZeroConfig(
        stage=stage, precision=precision, tile=64, staging_bytes=4096, optimizer=AdamWConfig(lr=1e-2)
    )
    return ZeroEngine(build(), config)


def step(engine: ZeroEngine, number: int) -> float:
    engine.backward(engine(*batch(number, engine.rank)))
    return engine.step().loss


def sharded_again(engine: ZeroEngine) -> bool:
    """Whether nothing is left whole at stage 3."""
    return engine.config.stage < 3 or all(
        unit.state is UnitState.SHARDED and unit.full is None for unit in engine.units
    )


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def edit(engine: ZeroEngine) -> None:
    """One element of a trainable parameter, all of a tied one, a frozen one and an integer one."""
    module = engine.module
    with torch.no_grad():
        module.blocks[0].up.weight[2, 3] = 0.3
        module.head.weight.mul_(2)
        module.blocks[1].gain.fill_(-1.5)
        module.permutation.copy_(module.permutation.flip(0))
        module.norm.bias.data = torch.full_like(module.norm.bias, 0.25)  # not even in place


def written_back(rank: int, world: int) -> None:
    for stage, precision in KINDS:
        engine = make(stage, precision)
        step(engine, 0)
        before = full_state_dict(engine, dtype="master")
        with engine.full_parameters(write=True):
            edit(engine)
            assert engine.module.norm.bias.abs().sum() > 0
        assert sharded_again(engine)
        after = full_state_dict(engine, dtype="master")
        rounded = full_state_dict(engine)
        compute = torch.bfloat16 if precision == "bf16" else torch.float32
        touched = {
            "blocks.0.up.weight",
            "head.weight",
            "embed.weight",
            "blocks.1.gain",
            "permutation",
            "norm.bias",
        }
        for name, tensor in before.items():
            if name not in touched:
                assert torch.equal(after[name], tensor), name
            if tensor.is_floating_point():
                assert torch.equal(rounded[name], after[name].to(rounded[name].dtype)), name
        # Untouched elements of a touched parameter keep their unrounded masters.
        expected = before["blocks.0.up.weight"].clone()
        expected[2, 3] = torch.tensor(0.3).to(compute).float()
        assert torch.equal(after["blocks.0.up.weight"], expected)
        assert torch.equal(after["head.weight"], before["head.weight"].to(compute).float() * 2)
        assert after["blocks.1.gain"] == -1.5
        assert after["permutation"].tolist() == list(range(28, -1, -1))
        assert after["norm.bias"].tolist() == [0.25] * 13
        step(engine, 1)  # goes on


def test_an_edit_reaches_masters_parameters_and_shards_at_every_stage() -> None:
    run_ranks(3, written_back)


def refusals(rank: int, world: int) -> list[list[str]]:
    """Fault E23: gathered parameters edited in place, by some or all ranks, without or against the rule."""
    return [
        refusals_of(make(stage, precision)) for stage, precision in ((0, "fp32"), (2, "bf16"), (3, "fp32"))
    ]


def refusals_of(engine: ZeroEngine) -> list[str]:
    norm, rank, messages = engine.module.norm.weight, engine.rank, []

    def refused(body: Callable[[], Any], **how: Any) -> None:
        before = full_state_dict(engine, dtype="master")
        with pytest.raises(UsageError) as caught, engine.full_parameters(**how), torch.no_grad():
            body()
        messages.append(str(caught.value))
        assert sharded_again(engine)
        assert same(full_state_dict(engine, dtype="master"), before), "nothing is kept"

    refused(lambda: norm.add_(1.0))
    refused(lambda: norm.add_(float(rank)), write=True)
    refused(lambda: norm.add_(1.0) if rank == 1 else None)
    refused(lambda: setattr(norm, "data", norm.data[:3].clone()), write=True)
    refused(lambda: engine.step() if rank == 0 else None, write=True)
    refused(lambda: engine.full_parameters().__enter__())
    refused(lambda: None, write=rank == 0)
    refused(lambda: None, names=["nothing.*"])
    loss = engine(*batch(0, rank))
    refused(lambda: None, write=True)
    with engine.full_parameters():  # reading may happen anywhere
        assert torch.isfinite(norm).all()
    engine.backward(loss)
    refused(engine.step)
    engine.step()
    return messages


def test_every_refusal_is_on_every_rank_and_keeps_nothing() -> None:
    results = run_ranks(2, refusals)
    said = [
        "parameter norm.weight was modified on rank(s) [0, 1] in a context that only reads",
        "parameter norm.weight holds other values on rank(s) [1] than on rank 0",
        "parameter norm.weight was modified on rank(s) [1] in a context that only reads",
        "gave a parameter another shape or dtype",
        "backward was called 0 times",
        "open already",
        "with the same arguments on every rank",
        "no parameter or module is called 'nothing.*'",
        "write after step()",
        "step() within full_parameters",
    ]
    for first, second in zip(*results, strict=True):
        for number, text in enumerate(said):
            assert text in first[number]
        assert second[4].startswith("rank(s) [0] failed within full_parameters")
        for number in (0, 1, 2, 3, 6, 8):
            assert second[number] == first[number]


def partly(rank: int, world: int) -> None:
    for stage in (1, 3):
        engine = make(stage)
        step(engine, 0)
        model = engine.module
        whole = full_state_dict(engine)
        with engine.full_parameters(names=["blocks.0.*", "blocks.1"]):
            opened = {unit.unit.name for unit in engine.units if unit.full is not None}
            assert stage == 1 or opened == {"blocks.0", "blocks.1"}
            assert torch.equal(model.blocks[0].up.weight, whole["blocks.0.up.weight"])
            assert torch.equal(model.blocks[1].gain, whole["blocks.1.gain"])
            with torch.no_grad():  # an evaluation gathers the rest as ever
                engine(*batch(5, 0))
            assert torch.equal(model.blocks[0].up.weight, whole["blocks.0.up.weight"])
        with engine.full_parameters(names=["head.weight"], write=True), torch.no_grad():
            model.embed.weight.zero_()  # tied: one parameter under two names
        assert not full_state_dict(engine)["head.weight"].any()
        assert sharded_again(engine)
        assert not engine.collectives.ledger.sent.get("reduce")


def test_only_the_units_that_are_named_are_opened() -> None:
    run_ranks(2, partly)
