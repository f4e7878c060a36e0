"""A model under torch.device("meta") trains as one that was built in the ordinary way, and is never whole."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.distributed.ranks import run_ranks
from zero_core import AdamWConfig, ZeroConfig, ZeroEngine
from zero_core.errors import ModelError
from zero_core.state_dict import full_state_dict

pytestmark = pytest.mark.distributed

WIDTH, LAYERS = 64, 12


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that are alive among those made while it is on, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = self.now = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._live = {key: (ref, size) for key, (ref, size) in self._live.items() if not ref.expired()}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.now = sum(size for _, size in self._live.values())
        self.peak = max(self.peak, self.now)
        return result


class CountingNorm(nn.LayerNorm):
    """Buffers that only `reset_parameters` fills, one of them integer."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("calls", torch.empty((), dtype=torch.int64))
        self.register_buffer("shift", torch.empty(width), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "shift"):
            self.calls.zero_()
            nn.init.normal_(self.shift)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) + self.shift.to(x.dtype)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.norm = CountingNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.embed(inputs)
        for block in self.blocks:
            x = x + block(x).relu()
        return self.head(self.norm(x)).square().mean()


def built(stage: int, precision: str, *, meta: bool) -> tuple[ZeroEngine, LiveBytes]:
    config = ZeroConfig(
        stage=stage,
        precision=precision,
        tile=64,
        staging_bytes=4096,
        optimizer=AdamWConfig(lr=1e-2),
    )
    torch.manual_seed(11)
    with torch.device("meta" if meta else "cpu"):
        model = Deep()
    live = LiveBytes()
    with live:
        engine = ZeroEngine(model, config)
    return engine, live


def trained(rank: int, world: int, precision: str) -> list[Any]:
    found = []
    for stage in (0, 1, 2, 3):
        states = []
        for meta in (False, True):
            engine, live = built(stage, precision, meta=meta)
            for step in range(2):
                engine.backward(engine(torch.arange(6) + step + rank))
                engine.step()
            states.append(full_state_dict(engine, dtype="master"))
        for name, tensor in states[0].items():
            assert torch.equal(states[1][name], tensor), (stage, name)
        assert states[0]["norm.calls"] == 2
        memory = engine.memory()
        held = memory.model_states + memory.padding
        unit = max(u.padded for u in engine.units) * 4
        found.append((live.peak, live.now, held, memory.communication_buffers, unit))
        whole = engine.layout.numel() * 4
    return [*found, whole]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_meta_equals_ordinary_and_only_units_are_ever_whole(precision: str) -> None:
    for *stages, whole in run_ranks(2, trained, precision):
        for peak, now, held, buffers, unit in stages:
            assert peak <= held + buffers + 4 * unit, "what is kept, its buffers, and a few units"
            assert now <= held + buffers + 4096, "nothing else is left"
        peak = stages[3][0] - stages[3][3]
        if precision == "fp32":
            # Of 16 bytes a parameter a rank keeps half; its parameters were never there a second time.
            assert peak < whole * 4 / 2 + whole / 2


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4))
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.gain * self.inner(x)).square().mean()


def custom(rank: int, world: int) -> list[Any]:
    with torch.device("meta"):
        refused, model = Gain(), Gain()
    with pytest.raises(ModelError, match="parameter gain is on the meta device"):
        ZeroEngine(refused, ZeroConfig(stage=3, tile=64))

    def initialise(module: nn.Module, name: str) -> None:
        if name == "":
            module.gain.fill_(0.5)
        else:
            module.reset_parameters()

    torch.manual_seed(rank)  # ranks draw different values: rank 0's are taken
    engine = ZeroEngine(model, ZeroConfig(stage=3, tile=64), initialise=initialise)
    engine.backward(engine(torch.ones(2, 4)))
    engine.step()
    return [(n, t.tolist()) for n, t in full_state_dict(engine).items()]


def test_initialise_of_the_caller_and_rank_0s_values() -> None:
    first, second = run_ranks(2, custom)
    assert first == second
    assert dict(first)["gain"] != 1.0
