"""A model with everything that makes partitioning hard, and the plain loop that says what is right."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width + 1)
        self.down = nn.Linear(3 * width + 1, width)
        self.gain = nn.Parameter(torch.tensor(0.7))  # 0-d

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gain * self.down(F.gelu(self.up(self.norm(x))))


class OddModel(nn.Module):
    """Odd sizes, a tied head, a frozen block, a frozen integer table, an empty and a 0-d parameter."""

    def __init__(self, vocabulary: int = 29, width: int = 13, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        for parameter in self.blocks[1].parameters():
            parameter.requires_grad_(False)
        self.empty = nn.Parameter(torch.empty(0, width))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.permutation = nn.Parameter(torch.arange(vocabulary), requires_grad=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(self.permutation[inputs])
        for block in self.blocks:
            x = block(x)
        x = torch.cat([x, F.linear(x, self.empty)], dim=-1)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def build(seed: int = 3) -> OddModel:
    torch.manual_seed(seed)
    return OddModel()


def batch(step: int, index: int, size: int = 2, length: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + index)
    tokens = torch.randint(0, 29, (size, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def plain_loop(steps: int, micro_batches: int, *, clip_norm: float | None, **adamw: Any) -> dict[str, Any]:
    """What one process without any engine computes: losses, gradient norms and final parameters."""
    model = build()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": adamw.pop("weight_decay")},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, **adamw)
    losses, norms = [], []
    for step in range(steps):
        total = 0.0
        for index in range(micro_batches):
            loss = model(*batch(step, index)) / micro_batches
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(trained, clip_norm if clip_norm else float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        norms.append(norm.item())
    return {
        "losses": losses,
        "norms": norms,
        "parameters": {n: p.detach().clone() for n, p in model.named_parameters()},
    }
