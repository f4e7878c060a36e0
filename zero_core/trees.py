"""Tensors inside whatever a module takes or returns: containers of torch's pytree, and dataclasses.

Knows nothing of what is done with them. torch's own walk takes a dataclass for a leaf unless somebody has
registered it; here its fields are walked too.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor within `value`, in order; other leaves, None among them, are passed over."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif _is_dataclass(leaf):
            for field in dataclasses.fields(leaf):
                yield from tensors_in(getattr(leaf, field.name, None))


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with each tensor replaced by `change(tensor)`, in containers of the same types."""

    def mapped(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return change(leaf)
        if not _is_dataclass(leaf):
            return leaf
        found = copy.copy(leaf)  # `replace` would run __post_init__ again, and refuses init=False fields
        for field in dataclasses.fields(leaf):
            if hasattr(leaf, field.name):
                object.__setattr__(found, field.name, map_tensors(getattr(leaf, field.name), change))
        return found

    return tree_map(mapped, value)


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
