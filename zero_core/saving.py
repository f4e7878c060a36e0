"""What autograd saves during a forward, seen through its hooks.

Owns the hooks: at stage 3 a saved parameter is kept as a reference into its unit, which backward gathers
again; everywhere the bytes of what is saved are counted. Knows neither steps nor reductions.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from zero_core.errors import UsageError
from zero_core.gathering import Gatherer
from zero_core.memory import SavedTensors
from zero_core.trees import tensors_in
from zero_core.widening import unseen

_MOST_SHAPES = 64
"""Shapes of inputs that are remembered as counted."""


class SavingHooks:
    """The hooks around one model's forwards.

    always  whether every forward needs them: at stage 3 and where units are recomputed. Else they only
            count; they cost microseconds a tensor, so they do where inputs have new shapes or `due` says
    """

    def __init__(
        self, saved: SavedTensors, gatherer: Gatherer, *, always: bool, due: Callable[[], bool]
    ) -> None:
        self._saved = saved
        self._gatherer = gatherer
        self._always = always
        self._due = due
        self._counted: set[tuple[torch.Size, ...]] = set()

    def watching(self, inputs: Any) -> AbstractContextManager[None]:
        """The context of a forward over `inputs`."""
        if not self._always:
            shapes = tuple(tensor.shape for tensor in tensors_in(inputs))
            if shapes in self._counted and not self._due():
                return nullcontext()
            if len(self._counted) < _MOST_SHAPES:
                self._counted.add(shapes)
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    @unseen
    def pack(self, tensor: torch.Tensor) -> Any:
        """What is kept of a saved tensor."""
        reference = self._gatherer.reference(tensor)
        if reference is not None:
            return reference
        self._saved.count(tensor)
        return tensor.detach(), tensor._version

    @unseen
    def unpack(self, packed: Any) -> torch.Tensor:
        """The saved tensor's values. Raises UsageError if they were written over."""
        if isinstance(packed, tuple):
            tensor, version = packed
            if tensor._version != version:
                raise UsageError(
                    f"a tensor of shape {tuple(tensor.shape)} that backward needs was modified in place "
                    f"(version {tensor._version}, saved at {version})"
                )
            return tensor  # type: ignore[no-any-return]
        return self._gatherer.resolve(packed)
