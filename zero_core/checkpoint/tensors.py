"""What readers of files say of tensors: dtypes by safetensors' names, memory as bytes, names in messages."""

from collections.abc import Mapping

import torch

from zero_core.checkpoint.container import DTYPE_NAMES

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, dtype) for dtype, name in DTYPE_NAMES.items()}
"""Torch's dtypes by the names that safetensors has for them."""

_MOST_NAMES = 5
"""So many names of each sort a message has."""


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, of any shape and dtype; writes reach the tensor."""
    flat: memoryview = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
    return flat


def named(groups: Mapping[str, set[str]]) -> str:
    """As "missing a, b; unknown c", the first few of each."""
    texts = []
    for what, names in groups.items():
        if names:
            more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
            texts.append(f"{what} {', '.join(sorted(names)[:_MOST_NAMES])}{more}")
    return "; ".join(texts)
