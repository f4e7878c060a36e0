"""State dicts: whole by name, sharded by range; exact round trips over shapes and numbers of ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.distributed.odd_model import OddModel, batch, build
from tests.distributed.ranks import run_ranks
from zero_core import AdamWConfig, ZeroConfig, ZeroEngine
from zero_core.errors import StateDictError, UsageError
from zero_core.state_dict import (
    full_state_dict,
    load_full_state_dict,
    load_sharded_state_dict,
    sharded_state_dict,
)

pytestmark = pytest.mark.distributed


def make(stage: int, precision: str = "fp32", seed: int = 3) -> ZeroEngine:
    config = ZeroConfig(
        stage=stage, precision=precision, tile=64, staging_bytes=4096, optimizer=AdamWConfig(lr=1e-2)
    )
    return ZeroEngine(build(seed), config)


def step(engine: ZeroEngine, number: int) -> float:
    engine.backward(engine(*batch(number, engine.rank)))
    return engine.step().loss


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[n], b[n]) and a[n].dtype == b[n].dtype for n in a)


def whole(rank: int, world: int) -> None:
    """Fault E14: frozen weights, and every other part of the model, are in the dict, and exact."""
    plain = build()
    masters = []
    for stage, precision in ((0, "fp32"), (1, "fp32"), (3, "fp32"), (0, "bf16"), (2, "bf16"), (3, "bf16")):
        engine = make(stage, precision)
        engine.module.calls.fill_(7)
        start = full_state_dict(engine, dtype="master")
        assert list(start) == list(plain.state_dict())
        for name, tensor in plain.state_dict().items():
            frozen = name.startswith("blocks.1.") and precision == "bf16"
            assert start[name].shape == tensor.shape, name
            if name != "calls":
                want = tensor.to(torch.bfloat16).float() if frozen else tensor
                assert torch.equal(start[name], want), name
        assert start["calls"] == 7
        assert start["head.weight"] is start["embed.weight"]
        assert start["permutation"].dtype == torch.int64
        step(engine, 0)
        master, held = full_state_dict(engine, dtype="master"), full_state_dict(engine)
        for name, tensor in held.items():
            assert tensor.device.type == "cpu"
            if precision == "bf16" and tensor.is_floating_point():
                assert tensor.dtype == torch.bfloat16
                assert torch.equal(tensor, master[name].bfloat16()), name
            else:
                assert torch.equal(tensor, master[name]), name
        assert bool(full_state_dict(engine, rank0_only=True)) == (rank == 0)
        masters.append(master)
        # Into an engine of other initial values, from rank 0 alone; and into the plain model.
        other = make((stage + 1) % 4, precision, seed=4)
        load_full_state_dict(other, master if rank == 0 else None)
        assert same(full_state_dict(other, dtype="master"), master)
        assert same(full_state_dict(other), held)
        assert other.module.calls == 7
        alone = OddModel()
        alone.load_state_dict(master)
        assert torch.equal(alone.embed.weight, master["embed.weight"])
    assert all(same(master, masters[0]) for master in masters[1:3])
    assert all(same(master, masters[3]) for master in masters[4:])


def test_the_whole_model_by_name_at_every_stage() -> None:
    run_ranks(3, whole)


def sharded(rank: int, world: int) -> None:
    for stage, precision in ((0, "bf16"), (1, "fp32"), (2, "bf16"), (3, "bf16"), (3, "fp32")):
        engine, other = make(stage, precision), make(stage, precision, seed=4)
        step(engine, 0)
        engine.module.calls.fill_(5)
        state = sharded_state_dict(engine)
        kept = full_state_dict(engine, dtype="master")
        losses = [step(engine, number) for number in (1, 2)]
        assert step(other, 5) > 0
        load_sharded_state_dict(other, state)
        assert same(full_state_dict(other, dtype="master"), kept)
        assert other.module.calls == 5
        assert other.steps_done == 1
        assert [step(other, number) for number in (1, 2)] == losses, "optimizer states too"


def test_a_sharded_dict_goes_back_exactly() -> None:
    run_ranks(3, sharded)


def mistakes(rank: int, world: int) -> list[str]:
    engine = make(3)
    good, ranges = full_state_dict(engine), sharded_state_dict(engine)
    before = full_state_dict(engine, dtype="master")
    messages = []

    def refused(call: Callable[..., None], state: Any, error: type[Exception] = StateDictError) -> None:
        with pytest.raises(error) as caught:
            call(engine, state)
        messages.append(str(caught.value))
        assert same(full_state_dict(engine, dtype="master"), before), "nothing was changed"

    refused(load_full_state_dict, None)
    refused(
        load_full_state_dict, {n: t for n, t in good.items() if n != "norm.bias"} | {"other": good["calls"]}
    )
    refused(load_full_state_dict, good | {"norm.bias": torch.zeros(14)})
    refused(load_full_state_dict, good | {"permutation": torch.zeros(29)})
    refused(load_full_state_dict, good | {"head.weight": good["head.weight"] + 1})
    refused(load_full_state_dict, good | {"norm.bias": 3})
    broken = ranges["ranges"] | {"extra/9": ranges["ranges"]["master/0"]}
    refused(load_sharded_state_dict, ranges | {"world_size": 7})
    refused(load_sharded_state_dict, ranges | ({"stage": 1} if rank == 1 else {}))
    refused(load_sharded_state_dict, ranges | {"ranges": broken})
    moved = ranges["ranges"]["variance/0"] | {"start": 17}
    refused(load_sharded_state_dict, ranges | {"ranges": ranges["ranges"] | {"variance/0": moved}})
    cut = ranges["ranges"]["master/0"] | {"tensor": torch.zeros(1)}
    refused(load_sharded_state_dict, ranges | {"ranges": ranges["ranges"] | {"master/0": cut}})
    refused(load_sharded_state_dict, {k: v for k, v in ranges.items() if k != "buffers"})
    with pytest.raises(UsageError, match="dtype 'fp16'"):
        full_state_dict(engine, dtype="fp16")  # type: ignore[arg-type]
    return messages


def test_what_does_not_fit_is_an_error_on_every_rank_that_says_what() -> None:
    first, second = run_ranks(2, mistakes)
    said = [
        "rank 0 has no state dict",
        "missing ['norm.bias'], not in the model ['other']",
        "norm.bias has shape (14,) in the state dict, (13,) in the model",
        "permutation has dtype torch.float32 in the state dict, torch.int64 in the model",
        "embed.weight and head.weight are one parameter, but differ",
        "norm.bias has shape int in the state dict",
        "of world_size 7, the engine has 2",
        "failed on rank(s) [1]",
        "unknown ['extra/9']",
        "variance/0: start is 17 in the state dict, 0 in the model",
        "master/0: (1,) of torch.float32",
        "failed on rank 0: KeyError('buffers')",
    ]
    for number, text in enumerate(said):
        assert text in first[number]
    assert "of stage 1, the engine has 3" in second[7]
    assert "failed on rank(s) [0]" in second[1]


SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=6)


class Shaped(nn.Module):
    """Parameters of any shapes, in as many units as asked for, some frozen."""

    def __init__(self, shapes: list[tuple[int, ...]], frozen: list[bool], units: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Module() for _ in range(units))
        for index, shape in enumerate(shapes):
            parameter = nn.Parameter(torch.randn(shape), requires_grad=not frozen[index])
            home = self if index % (units + 1) == 0 else self.parts[index % units]
            home.register_parameter(f"p{index}", parameter)


def round_trips(rank: int, world: int) -> int:
    """The same derandomised examples on every rank, so that all meet in the same collectives."""
    count = 0

    @settings(
        max_examples=12,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(SHAPES, st.lists(st.booleans(), min_size=6, max_size=6), st.integers(1, 3), st.integers(0, 3))
    def check(shapes: list[tuple[int, ...]], frozen: list[bool], units: int, stage: int) -> None:
        nonlocal count
        count += 1
        torch.manual_seed(count)
        config = ZeroConfig(stage=stage, tile=64, precision="bf16" if count % 2 else "fp32")
        model = Shaped(shapes, frozen, units)
        want = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        engine = ZeroEngine(model, config)
        got = full_state_dict(engine, dtype="master")
        for name, tensor in want.items():
            trained = model.get_parameter(name).requires_grad or config.precision == "fp32"
            assert torch.equal(got[name], tensor if trained else tensor.bfloat16().float()), name
        parts = sharded_state_dict(engine)
        other = ZeroEngine(Shaped(shapes, frozen, units), config)
        load_sharded_state_dict(other, parts)
        assert same(full_state_dict(other, dtype="master"), got)
        third = ZeroEngine(Shaped(shapes, frozen, units), config)
        load_full_state_dict(third, want)
        assert same(full_state_dict(third, dtype="master"), got)

    check()
    return count


@pytest.mark.parametrize("world", [1, 4])
def test_round_trips_over_shapes(world: int) -> None:
    """Faults E8 and E9 among them: empty parameters anywhere, fewer elements than ranks."""
    counts = run_ranks(world, round_trips)
    assert counts[0] >= 12
    assert len(set(counts)) == 1


def reassembled(rank: int, world: int) -> dict[str, Any]:
    engine = make(3, "bf16")
    step(engine, 0)
    state = sharded_state_dict(engine)
    for held in state["ranges"].values():
        held["tensor"] = held["tensor"].float().numpy()
    del state["buffers"]
    full = full_state_dict(engine, dtype="master")
    return {"sharded": state, "full": {name: tensor.numpy() for name, tensor in full.items()}}


def test_sharded_dicts_of_all_ranks_say_enough_to_put_the_model_together() -> None:
    results = run_ranks(3, reassembled)
    want = {n: torch.from_numpy(a) for n, a in results[0]["full"].items()}
    flats: dict[int, torch.Tensor] = {}
    slots: dict[str, tuple[int, int, list[int]]] = {}
    for result in results:
        for held in result["sharded"]["ranges"].values():
            if held["kind"] in ("master", "model"):
                flat = flats.setdefault(held["unit"], torch.full((100_000,), torch.nan))
                flat[held["start"] : held["stop"]] = torch.from_numpy(held["tensor"])
                for slot in held["parameters"]:
                    slots[slot["name"]] = (held["unit"], slot["offset"], slot["shape"])
    for name, (unit, offset, shape) in slots.items():
        numel = torch.Size(shape).numel()
        assert torch.equal(flats[unit][offset : offset + numel].view(shape), want[name].float()), name
    assert set(want) - set(slots) == {"head.weight", "calls"}
