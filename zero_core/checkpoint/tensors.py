"""What readers of files say of tensors: dtypes by safetensors' names, memory as bytes, names in messages."""

from collections.abc import Mapping

import torch

TORCH_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U64": torch.uint64,
    "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
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
