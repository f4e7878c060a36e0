"""Checkpoints in page-locked host memory. Needs a GPU; skipped elsewhere, and not yet run on one."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from zero_core import AdamWConfig, ZeroConfig, ZeroEngine
from zero_core.budget import aligned

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: CUDA is not available")

LAYERS, BATCH, WIDTH = 6, 32, 128


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        assert mask is None
        return x + self.dropout(self.down(torch.nn.functional.gelu(self.up(x))))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, None)
        return x.float().square().mean()


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def train(stage: int, **fields: Any) -> tuple[list[float], Any]:
    torch.manual_seed(1)
    model = Stack().to("cuda")
    config = ZeroConfig(
        stage=stage, precision="bf16", micro_batches=3, optimizer=AdamWConfig(lr=1e-2), **fields
    )
    engine, found = ZeroEngine(model, config), []
    for step in range(4):
        for index in engine.micro_batches:
            torch.manual_seed(100 * step + index)
            engine.backward(engine(torch.randn(BATCH, WIDTH, device="cuda")))
        report = engine.step()
        found += [report.loss, report.grad_norm]
    return found, engine.memory()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_recomputed_and_offloaded_give_the_same_numbers(group: None, stage: int) -> None:
    plain, whole = train(stage)
    recomputed, kept = train(stage, activation_checkpointing="unit")
    offloaded, moved = train(stage, activation_checkpointing="unit", checkpoint_offload=True)
    assert plain == recomputed == offloaded
    assert moved.activations < kept.activations < whole.activations
    assert moved.host_checkpoints == kept.checkpoints == LAYERS * aligned(BATCH * WIDTH * 2)
    assert moved.checkpoints == kept.host_checkpoints == 0


def test_offloading_never_waits_on_the_host(group: None) -> None:
    torch.manual_seed(1)
    config = ZeroConfig(micro_batches=3, activation_checkpointing="unit", checkpoint_offload=True)
    engine = ZeroEngine(Stack().to("cuda"), config)
    x = torch.randn(BATCH, WIDTH, device="cuda")
    for index in engine.micro_batches:
        if index == 2:  # page-locking the host's block, once, may wait
            torch.cuda.set_sync_debug_mode("error")
        try:
            loss = engine(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        engine.backward(loss)
    engine.step()


def test_fragmentation_is_reserved_less_allocated(group: None) -> None:
    _, memory = train(2)
    assert memory.fragmentation == memory.resident - torch.cuda.memory_allocated()
