"""The built-in GPT against its arithmetic, and the way in for a user's model."""

import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from workers.errors import ModelError
from workers.model_shapes import gpt_activation_bytes, gpt_parameters, gpt_unit_of
from workers.models import build_model
from workers.spec import JobSpec
from zero_core.units import boundaries


def _spec(model: dict[str, Any], **changes: Any) -> JobSpec:
    fields = {"steps": 1, "global_batch": 3, "micro_batch": 3, "sequence_length": 24}
    return JobSpec.model_validate({"data": {"kind": "synthetic"}, "model": model, **fields, **changes})


def _gpt(**changes: Any) -> dict[str, Any]:
    return {"kind": "gpt", "layers": 3, "hidden": 48, "heads": 3, "vocabulary": 67, **changes}


def _loss(spec: JobSpec, model: torch.nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    shape = (spec.micro_batch, spec.sequence_length)
    inputs, targets = (torch.randint(0, 67, shape, generator=generator) for _ in range(2))
    loss: torch.Tensor = model(inputs, targets)
    return loss


@pytest.mark.parametrize("tied_head", [True, False])
@pytest.mark.parametrize("layers", [1, 12])
def test_the_arithmetic_lists_the_real_parameters_and_units(tied_head: bool, layers: int) -> None:
    spec = _spec(_gpt(tied_head=tied_head, layers=layers))
    model = build_model(spec)
    listed = gpt_parameters(spec.model, sequence_length=24)  # type: ignore[arg-type]
    assert [(p.name, p.shape, p.trainable) for p in listed] == [
        (name, tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()
    ]
    unit_of = gpt_unit_of(spec.model)  # type: ignore[arg-type]
    assert {unit_of(p.name) for p in listed} == {"", *boundaries(model)}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_activation_estimate_is_what_autograd_saves(precision: str, dropout: float) -> None:
    spec = _spec(_gpt(dropout=dropout), precision=precision)
    model = build_model(spec).to(torch.bfloat16 if precision == "bf16" else torch.float32)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _loss(spec, model)
    measured = sum(storage.nbytes() for storage in saved.values())
    estimate = gpt_activation_bytes(
        spec.model,  # type: ignore[arg-type]
        sequence_length=24,
        micro_batch=3,
        precision=spec.precision,
    )
    assert estimate == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_estimate_with_checkpointing_is_the_higher_of_two_moments(dropout: float) -> None:
    def estimate(checkpointing: Any, **changes: Any) -> int:
        spec = _spec(_gpt(dropout=dropout, hidden=64, heads=2, **changes))
        return gpt_activation_bytes(
            spec.model,  # type: ignore[arg-type]
            sequence_length=24,
            micro_batch=3,
            precision=spec.precision,
            checkpointing=checkpointing,
        )

    stream = 3 * 24 * 64 * 4
    # Each further layer costs its input alone, and the whole of what it saves without checkpointing.
    assert estimate("unit", layers=9) - estimate("unit", layers=8) == stream
    block = estimate("none", layers=9) - estimate("none", layers=8)
    assert block > 16 * stream
    # With few token ids the peak is where a block is computed again; with many, at the end of forward.
    few, more = (estimate("unit", layers=8, vocabulary=v) for v in (2, 3))
    assert few == more
    large, larger = (estimate("unit", layers=8, vocabulary=v) for v in (50_000, 50_001))
    assert larger - large == 3 * 24 * 4


def test_the_seed_alone_decides_the_initial_parameters() -> None:
    spec = _spec(_gpt())
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first = build_model(spec).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(6)
    second = build_model(spec).state_dict()
    other = build_model(_spec(_gpt(), seed=1)).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["token.weight"], other["token.weight"])


def test_an_untrained_model_knows_nothing_and_looks_at_no_later_token() -> None:
    spec = _spec(_gpt())
    model = build_model(spec)
    assert _loss(spec, model).item() == pytest.approx(torch.tensor(67.0).log().item(), rel=0.05)
    captured: list[torch.Tensor] = []
    model.get_submodule("norm").register_forward_hook(lambda _m, _a, out: captured.append(out.detach()))
    inputs = torch.zeros(1, 24, dtype=torch.int64)
    for last in (0, 1):
        inputs[0, 23] = last
        model(inputs, inputs)
    assert torch.equal(captured[0][:, :23], captured[1][:, :23])
    assert not torch.equal(captured[0][:, 23], captured[1][:, 23])


USER_MODULE = """
    import torch
    class Good(torch.nn.Module):
        def __init__(self, size):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(size))
        def forward(self, inputs, targets):
            return (self.weight ** 2).mean()
    class Frozen(Good):
        def __init__(self):
            super().__init__(3)
            self.weight.requires_grad_(False)
    class Plain:
        pass
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "somebodys_model.py").write_text(textwrap.dedent(USER_MODULE))
    (tmp_path / "somebodys_broken.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "somebodys_model", raising=False)
    return "somebodys_model"


def test_a_users_class_is_built_with_its_arguments(user_module: str) -> None:
    custom = {"kind": "custom", "factory": f"{user_module}:Good", "arguments": {"size": 5}}
    model = build_model(_spec(custom))
    assert model.weight.shape == (5,)
    assert torch.equal(model.weight, build_model(_spec(custom)).weight)


@pytest.mark.parametrize(
    ("factory", "arguments", "message"),
    [
        ("no_such_module_anywhere:X", {}, "importing 'no_such_module_anywhere' failed"),
        ("somebodys_broken:X", {}, "ZeroDivisionError"),
        ("somebodys_model:Missing", {}, "has no 'Missing'"),
        ("somebodys_model:Plain", {}, "not a subclass"),
        ("somebodys_model:Good", {"sizes": 1}, r"arguments \['sizes'\] failed with TypeError"),
        ("somebodys_model:Frozen", {}, "no trainable parameter"),
    ],
)
def test_a_class_that_cannot_work_says_why(
    user_module: str, factory: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        build_model(_spec({"kind": "custom", "factory": factory, "arguments": arguments}))
