"""The engine over NCCL on one GPU. Needs a GPU; skipped elsewhere, and not yet run on one."""

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.distributed.odd_model import batch, build, plain_loop
from zero_core import AdamWConfig, ZeroConfig, ZeroEngine
from zero_core.errors import ConfigError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: CUDA is not available")

ADAMW = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield
    dist.destroy_process_group()


def engine_of(stage: int, precision: str, **settings: object) -> ZeroEngine:
    config = ZeroConfig(
        stage=stage,  # type: ignore[arg-type]
        precision=precision,  # type: ignore[arg-type]
        tile=64,
        staging_bytes=4096,
        optimizer=AdamWConfig(**ADAMW),  # type: ignore[arg-type]
        **settings,  # type: ignore[arg-type]
    )
    return ZeroEngine(build().cuda(), config)


def losses(engine: ZeroEngine, steps: int, micro_batches: int) -> list[float]:
    found = []
    for step in range(steps):
        for index in range(micro_batches):
            inputs, targets = batch(step, index)
            engine.backward(engine(inputs.cuda(), targets.cuda()))
        found.append(engine.step().loss)
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp32_equals_the_plain_loop(stage: int) -> None:
    want = plain_loop(6, 4, clip_norm=0.5, **dict(ADAMW))["losses"]
    got = losses(engine_of(stage, "fp32", micro_batches=4, clip_norm=0.5), 6, 4)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=0)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_stages_agree_in_low_precision(precision: str) -> None:
    runs = [losses(engine_of(stage, precision, micro_batches=3), 6, 3) for stage in (0, 1, 2, 3)]
    assert runs[1:] == runs[:-1]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_memory_is_what_the_budget_predicts(stage: int) -> None:
    engine = engine_of(stage, "bf16", micro_batches=2)
    losses(engine, 2, 2)
    memory, budget = engine.memory(), engine.budget
    for category in ("parameters", "gradients", "optimizer_states", "padding", "communication_buffers"):
        assert getattr(memory, category) == getattr(budget, category), category
    assert memory.model_states + memory.padding <= torch.cuda.memory_allocated()
    assert memory.fragmentation == torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def test_overlap_changes_no_bit() -> None:
    runs = [losses(engine_of(3, "bf16", overlap=on, micro_batches=2), 4, 2) for on in (True, False)]
    assert runs[0] == runs[1]


def test_the_ordered_reduction_gives_the_same_bits_at_one_rank() -> None:
    runs = [
        losses(engine_of(2, "bf16", reduction=how, micro_batches=3), 4, 3) for how in ("native", "ordered")
    ]
    assert runs[0] == runs[1]
    assert losses(engine_of(2, "bf16", reduction="ordered", reproducible=True, micro_batches=3), 4, 3)


def test_the_reproducible_mode_says_what_it_needs_on_nccl() -> None:
    with pytest.raises(ConfigError, match="need reduction='ordered' on NCCL"):
        engine_of(2, "bf16", reproducible=True)
