"""A model on the meta device: the values of ordinary construction, a unit at a time, and clear refusals."""

import pytest
import torch
from torch import nn

from zero_core.errors import ModelError
from zero_core.materialise import Initialise, initial_values
from zero_core.units import bind_units


class Tied(nn.Module):
    """A tied head, a tie across units, a module half frozen, batch norm's buffers, and an empty layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.blocks[2].weight = self.blocks[0].weight
        self.blocks[1].bias.requires_grad_(False)
        self.void = nn.Linear(6, 0)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 7)
        self.head.weight = self.embed.weight


def filled(model: nn.Module, initialise: Initialise | None = None) -> dict[str, torch.Tensor]:
    _, units = bind_units(model, precision="fp32", tile=64, rank=0, world_size=1)
    values = {}
    for unit, flat in initial_values(model, units, torch.device("cpu"), initialise):
        for slot, view in zip(unit.unit.slots, unit.views(flat), strict=True):
            values[slot.name] = view.clone()
    return values | dict(model.named_buffers())


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_the_values_are_those_of_ordinary_construction() -> None:
    torch.manual_seed(5)
    ordinary = Tied()
    want = {n: p.detach() for n, p in ordinary.named_parameters()} | dict(ordinary.named_buffers())
    with torch.device("meta"):
        model = Tied()
    model.embed.weight.note = "kept"
    torch.manual_seed(5)
    got = filled(model)
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name
    assert model.head.weight is model.embed.weight
    assert model.blocks[2].weight is model.blocks[0].weight
    assert model.embed.weight.note == "kept"
    assert not model.blocks[1].bias.requires_grad
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))


def test_real_parameters_keep_their_values_beside_those_on_meta() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    kept = model[0].weight.detach().clone()
    model[0].bias = nn.Parameter(torch.empty(3, device="meta"))
    got = filled(model)
    assert torch.equal(got["0.weight"], kept)
    assert torch.isfinite(got["0.bias"]).all()


class Scaled(nn.Linear):
    """A parameter, and a buffer, that `reset_parameters` forgets."""

    def __init__(self, width: int, *, parameter: bool, buffer: torch.dtype | None) -> None:
        super().__init__(width, width)
        self.scale = nn.Parameter(torch.ones(())) if parameter else None
        self.register_buffer("table", torch.ones(4, dtype=buffer) if buffer else None)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: nn.ModuleList([nn.ParameterList([torch.ones(2)])]), "parameter 0.0 is on the meta device"),
        (lambda: nn.Sequential(Scaled(4, parameter=True, buffer=None)), "parameter 0.scale is on the meta"),
        (lambda: Scaled(4, parameter=False, buffer=torch.float32), "buffer table is on the meta device"),
        (lambda: Scaled(4, parameter=False, buffer=torch.int64), "buffer table is on the meta device"),
        (lambda: Scaled(4, parameter=False, buffer=torch.bfloat16), "buffer table is on the meta device"),
    ],
)
def test_what_nothing_fills_is_named(build: object, says: str) -> None:
    assert callable(build)
    with torch.device("meta"):
        model = build()
    with pytest.raises(ModelError, match=says.replace(".", r"\.")):
        filled(model)


def test_a_function_of_the_caller_fills_every_module_once() -> None:
    calls = []

    def initialise(module: nn.Module, name: str) -> None:
        calls.append(name)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.fill_(len(calls))

    with torch.device("meta"):
        model = nn.Sequential(Scaled(4, parameter=True, buffer=torch.int64), nn.ReLU(), nn.LayerNorm(4))
    values = filled(model, initialise)
    assert calls == ["0", "2"]
    assert values["0.scale"] == 1
    assert values["0.table"].tolist() == [1, 1, 1, 1]
    assert values["2.weight"].tolist() == [2, 2, 2, 2]
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ModelError, match=r"parameter 0\.weight .* nothing filled it"):
        filled(model, lambda module, name: None)
