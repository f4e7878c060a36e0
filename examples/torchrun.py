"""The engine without Ray or a service: one file, plain torchrun.

    torchrun --nproc-per-node 2 examples/torchrun.py

Each step has 6 micro-batches whatever the number of ranks; the engine says which are this rank's.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from zero_core import AdamWConfig, ZeroConfig, ZeroEngine

STEPS, MICRO_BATCHES, BATCH, WIDTH = 40, 6, 16, 64


def build() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


def batch(step: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Micro-batch `index` of a step: the same data whichever rank computes it."""
    generator = torch.Generator().manual_seed(step * MICRO_BATCHES + index)
    x = torch.randn(BATCH, WIDTH, generator=generator)
    return x, x[:, :8].sum(dim=1, keepdim=True).tanh()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    config = ZeroConfig(stage=3, micro_batches=MICRO_BATCHES, optimizer=AdamWConfig(lr=1e-2), clip_norm=1.0)
    engine = ZeroEngine(build(), config)
    for step in range(STEPS):
        for index in engine.micro_batches:
            x, y = batch(step, index)
            engine.backward(F.mse_loss(engine(x), y))
        report = engine.step()
        if engine.rank == 0 and (report.step == 1 or report.step % 10 == 0):
            sent = sum(report.bytes_sent.values())
            print(f"step {report.step:3}  loss {report.loss:.6f}  sent {sent:,} bytes")
    if engine.rank == 0:
        memory = engine.memory()
        print(f"model states of rank 0: {memory.model_states:,} bytes of {engine.world_size} ranks' shards")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
