"""Recomputation without an engine: which inputs are kept, how, and that gradients do not notice."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from zero_core.activations import CheckpointStore, Recomputation, store_for
from zero_core.budget import aligned
from zero_core.config import ZeroConfig
from zero_core.errors import ConfigError, ModelError, UsageError
from zero_core.memory import SavedTensors, fragmentation_bytes
from zero_core.units import bind_units

CPU = torch.device("cpu")
WIDTH = 16


class Harness:
    """A model with its units recomputed, as the engine would wire it, in one process."""

    def __init__(self, model: nn.Module, *, on: bool = True) -> None:
        _, units = bind_units(model, precision="fp32", tile=64, rank=0, world_size=1)
        self.model, self.store = model, CheckpointStore(CPU)
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.saved = SavedTensors(own, recomputes=True)
        self.samples = 0
        self.recomputation = Recomputation(
            self.store,
            self.saved,
            gather=lambda _unit: None,
            pack=self._pack,
            unpack=self._unpack,
            in_unit=lambda _tensor: False,
            sample=self._sample,
        )
        if on:
            self.recomputation.install(model, units)

    def _sample(self) -> None:
        self.samples += 1

    def _pack(self, tensor: torch.Tensor) -> Any:
        self.saved.count(tensor)
        return tensor.detach(), tensor._version

    @staticmethod
    def _unpack(packed: Any) -> torch.Tensor:
        tensor, version = packed
        assert tensor._version == version, "modified in place"
        return tensor

    def forward(self, *args: Any) -> torch.Tensor:
        self.saved.begin()
        self.recomputation.begin()
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            loss = self.model(*args)
        self.saved.end()
        return loss

    def gradients(self, *args: Any) -> list[torch.Tensor]:
        self.model.zero_grad()
        self.forward(*args).backward()
        return [p.grad.clone() for p in self.model.parameters() if p.grad is not None]


class Layer(nn.Module):
    """Takes and returns things in containers; counts how often its forward runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(
        self, x: torch.Tensor, options: dict[str, Any], *, log: list[int] | None = None
    ) -> dict[str, Any]:
        self.calls += 1
        if log is not None:
            log.append(len(log))
        mask, (scale, nothing) = options["mask"], options["more"]
        assert nothing is None
        y = torch.tanh(self.linear(x)) * scale
        return {"y": y if mask is None else y * mask, "pair": (y, None)}


class Stack(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        log: list[int] = []
        scale = torch.full((WIDTH,), 0.5)
        for index, layer in enumerate(self.layers):
            options = {"mask": mask if index else None, "more": [scale, None]}
            out = layer(x, options, log=log)
            x = out["y"] + out["pair"][0]
        assert log == list(range(len(self.layers)))
        return x.square().mean()


def build(make: Callable[[], nn.Module], *, on: bool) -> Harness:
    torch.manual_seed(1)
    return Harness(make(), on=on)


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_containers_none_and_lists_pass_through_and_shared_inputs_are_kept_once() -> None:
    """DeepSpeed 598 (E21): None among the arguments of a checkpointed module, at any depth."""
    plain, again = build(Stack, on=False), build(Stack, on=True)
    x, mask = torch.randn(4, WIDTH), torch.rand(4, WIDTH)
    for _ in range(3):
        assert same(plain.gradients(x, mask), again.gradients(x, mask))
    assert [layer.calls for layer in again.model.layers] == [6, 6, 6]
    assert again.samples == 3  # once a micro-batch
    # Three layers' x, the mask that two of them take, and the scale that all three take.
    tensors = 4 * aligned(4 * WIDTH * 4) + aligned(WIDTH * 4)
    assert again.store.reserved_bytes == again.store.held_bytes == tensors


def test_without_gradients_nothing_is_kept() -> None:
    again = build(Stack, on=True)
    with torch.no_grad():
        again.forward(torch.randn(2, WIDTH))
    assert again.store.held_bytes == 0
    assert again.samples == 0


def test_the_block_grows_to_the_longest_micro_batch_and_stays() -> None:
    again, plain = build(Stack, on=True), build(Stack, on=False)
    sizes = []
    for length in (2, 2, 5, 5, 3):
        x = torch.randn(length, WIDTH)
        assert same(again.gradients(x), plain.gradients(x))
        sizes.append(again.store.reserved_bytes)
    one = WIDTH * 4
    assert sizes == [0, 3 * 2 * one + one, 3 * 2 * one + one, 3 * 5 * one + one, 3 * 5 * one + one]


def test_a_stale_checkpoint_is_an_error_not_wrong_gradients() -> None:
    again = build(Stack, on=True)
    for _ in range(2):
        late = again.forward(torch.randn(2, WIDTH))
    again.forward(torch.randn(2, WIDTH))
    with pytest.raises(UsageError, match="1 micro-batches ago"):
        late.backward()


class InPlace(nn.Module):
    """Writes to its input before it uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.mul_(0.5).add_(1.0))


class Branches(nn.Module):
    """One input goes to a unit that reads it, to one that writes to it, and, changed, to a third."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList([Reader(), InPlace(), Reader()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        total = self.units[0](x).sum() + self.units[1](x).square().sum()
        return total + self.units[2](x).sum()


class Reader(nn.Module):
    """Needs for backward only what it makes of its input, not the input itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) * self.weight


def test_a_unit_that_writes_to_a_shared_input_spoils_nobodys_recomputation() -> None:
    plain, again = build(Branches, on=False), build(Branches, on=True)
    x = torch.randn(4, WIDTH)
    for _ in range(2):
        assert same(plain.gradients(x), again.gradients(x))
    # The input before the write, and after it: two copies.
    assert again.store.held_bytes == 2 * aligned(4 * WIDTH * 4)


class Counting(nn.Module):
    """Running statistics, a counter written in place and one that is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("written", torch.zeros((), dtype=torch.int64))
        self.register_buffer("replaced", torch.zeros(()))
        self.register_buffer("absent", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.written.add_(1)
        self.replaced = self.replaced + 1
        return torch.tanh(self.norm(x)).square().mean()


def test_buffers_that_forward_writes_to_are_written_once() -> None:
    plain, again = (build(lambda: nn.Sequential(Counting()), on=on) for on in (False, True))
    for seed in range(3):
        x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(seed))
        assert same(plain.gradients(x), again.gradients(x))
    want, got = dict(plain.model.named_buffers()), dict(again.model.named_buffers())
    assert want["0.written"] == want["0.replaced"] == want["0.norm.num_batches_tracked"] == 3
    assert all(torch.equal(got[name], value) for name, value in want.items())


@pytest.mark.parametrize(
    ("tensor", "copied"),
    [
        (torch.zeros(4, 16), True),
        (torch.zeros(4, 16).t(), True),
        (torch.zeros(1, 16)[:, None], True),
        (torch.zeros(()), True),
        (torch.zeros(4, dtype=torch.int64), True),
        (torch.zeros(16).expand(4, 16), False),
        (torch.zeros(4, 32)[:, :16], False),
        (torch.zeros(20)[1:], False),
        (torch.zeros(0), False),
        (nn.Parameter(torch.zeros(16)), False),
        (torch.zeros(4, dtype=torch.complex64).conj(), False),
        (torch.zeros(4, device="meta"), False),
    ],
)
def test_dense_aligned_tensors_are_copied_as_they_lie(tensor: torch.Tensor, copied: bool) -> None:
    store = CheckpointStore(CPU)
    kept = store.keep(tensor)
    assert (kept is not None) == copied
    if kept is not None:
        back = store.restore(kept)
        assert torch.equal(back, tensor)
        assert (back.stride(), back.dtype) == (tensor.stride(), tensor.dtype)
        assert back.data_ptr() != tensor.data_ptr()


def test_a_freed_input_is_not_taken_for_a_new_one_at_its_address() -> None:
    store = CheckpointStore(CPU)
    kept = []
    for value in range(20):
        kept.append(store.keep(torch.full((1 << 15,), float(value))))
    assert [float(store.restore(each)[0]) for each in kept if each] == [float(v) for v in range(20)]


def test_modules_get_their_own_forward_back() -> None:
    again = build(Stack, on=True)
    own = again.model.layers[0]
    assert "forward" in vars(own)
    again.recomputation.remove()
    assert "forward" not in vars(own)
    replaced = build(Stack, on=False)
    layer = replaced.model.layers[0]
    mine = layer.forward = lambda *args, **kwargs: Layer.forward(layer, *args, **kwargs)
    harness = Harness(replaced.model)
    assert layer.forward is not mine
    harness.recomputation.remove()
    assert layer.forward is mine


def test_a_model_without_units_is_refused() -> None:
    wanted = ZeroConfig(activation_checkpointing="unit")
    for model in (nn.Linear(3, 3), nn.Sequential(nn.Tanh())):
        with pytest.raises(ModelError, match="no unit but the root"):
            store_for(model, wanted, CPU)
        store_for(model, ZeroConfig(), CPU)
    store_for(nn.Sequential(nn.Linear(3, 3)), wanted, CPU)


def test_offloading_from_a_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="in host memory already"):
        CheckpointStore(CPU, offload=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        # DeepSpeed 3779 (E20): without a model-parallel group they saved nothing, silently.
        ({"partition_activations": True}, "model-parallel group"),
        ({"checkpoint_offload": True}, "there are no checkpoints"),
        ({"activation_checkpointing": "layer"}, "must be 'none' or 'unit'"),
    ],
)
def test_settings_that_cannot_help_say_what_is_needed(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ZeroConfig(**fields)


def test_fragmentation_is_what_is_resident_beyond_what_is_accounted_for() -> None:
    assert fragmentation_bytes(CPU, resident=100, baseline=30, held=50) == 20
    assert fragmentation_bytes(CPU, resident=100, baseline=30, held=80) == 0


def test_the_peak_of_saved_tensors_is_after_forward_or_after_a_recomputation() -> None:
    saved = SavedTensors(set(), recomputes=True)
    root, kept = torch.zeros(100), torch.zeros(10)
    saved.begin()
    saved.count(root)
    saved.count(kept)
    assert saved.end()
    assert saved.peak == 440
    del root  # backward has freed it by the time the unit is computed again
    for size, peak in ((90, 440), (120, 520), (20, 520)):
        again = torch.zeros(size)
        saved.begin_recomputation()
        saved.count_recomputed(again)
        saved.count_recomputed(kept)  # held already
        assert saved.end_recomputation() == (size == 120)
        assert saved.peak == peak
    assert saved.recomputed == 480
