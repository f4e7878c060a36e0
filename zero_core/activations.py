"""Activation checkpointing: of a unit's forward only the inputs are kept, and backward computes it once more.

Owns where those inputs lie between forward and backward, and the wrapping of units' modules. The
recomputation itself, with its random state, is torch's (`torch.utils.checkpoint`, not reentrant). Knows
nothing of gradients and optimizers; stage 3 lends it one function, which brings a unit's parameters back.

Inputs are copied into one block (an `Arena`) that every micro-batch uses again, so that what lives from
forward to backward leaves no holes between the short-lived tensors of forward. Their sizes are known after
the first micro-batch; until then, and for what a longer micro-batch needs beyond the block, each has memory
of its own, and the next micro-batch finds a block that is large enough.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from zero_core.arena import Arena
from zero_core.budget import ALIGNMENT_BYTES, aligned
from zero_core.config import ZeroConfig
from zero_core.errors import ConfigError, ModelError, UsageError
from zero_core.memory import SavedTensors
from zero_core.units import FlatUnit, boundaries
from zero_core.widening import unseen

_Place = tuple[nn.Module, str]
"""A buffer: the module that owns it, and its name there."""


@dataclass(slots=True)
class Checkpoint:
    """One tensor that was an input of a unit.

    copy        [same shape and strides], in the block or beside it; in host memory where offloaded
    generation  the micro-batch, counted by the store, that it belongs to
    shared      the inputs of units that this copy stands for
    altered     whether a unit writes to it, so that a recomputation must not be given the copy itself
    """

    copy: torch.Tensor
    generation: int
    shared: int = 1
    altered: bool = False


class CheckpointStore:
    """Keeps copies of tensors from forward to backward of one micro-batch.

    device   where the tensors are, and come back to
    offload  keep the copies in page-locked host memory, moved by a stream of their own. ConfigError on a CPU
    """

    def __init__(self, device: torch.device, *, offload: bool = False) -> None:
        if offload and device.type != "cuda":
            raise ConfigError(
                f"checkpoint_offload moves activations from a GPU to host memory; on device {device} they "
                "are in host memory already and nothing can be saved: turn it off"
            )
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())  # as tensors name theirs
        self._device = device
        self._offload = offload
        self._stream = torch.cuda.Stream(device) if offload else None  # type: ignore[no-untyped-call]
        self._arena = Arena(0, device)
        self._generation = 0
        self._beside = 0
        # By storage and place in it: an input of several units (a mask, say) is copied once.
        self._known: dict[Any, tuple[StorageWeakRef, int, Checkpoint]] = {}

    @property
    def held_bytes(self) -> int:
        """Bytes of the block, and of the copies of this micro-batch that have memory of their own."""
        return self._arena.reserved_bytes + self._beside

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the block, which is held between micro-batches too."""
        return self._arena.reserved_bytes

    def begin(self) -> None:
        """A new micro-batch: the copies of the last one are over, and the block grows if it was too small."""
        self._generation += 1
        self._known.clear()
        if self._beside:
            needed = self._arena.used_bytes + self._beside
            self._arena = Arena(0, self._device)  # the old block goes before the new one comes
            self._arena = Arena(needed, self._device, pinned=self._offload)
            self._beside = 0
        self._arena.empty()

    def keep(self, tensor: torch.Tensor) -> Checkpoint | None:
        """A copy of the values now, or None for a tensor that is not copied.

        Copied is what lies densely, aligned and on the device, so that the copy has the same strides and
        alignment: a recomputation then rounds as the forward did. The rest is cheaper left where it is (an
        expanded tensor would grow).
        """
        if not self._copies(tensor):
            return None
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor.storage_offset(), tensor.dtype, tensor.size(), tensor.stride())
        if key in self._known:
            reference, version, known = self._known[key]
            # The reference holds the address: while it lives, no other storage can have come to be there.
            expired = reference.expired()  # type: ignore[no-untyped-call]
            if not expired and version == tensor._version:
                known.shared += 1
                return known
        kept = Checkpoint(self._copy(tensor), self._generation)
        reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._known[key] = reference, tensor._version, kept
        return kept

    def restore(self, kept: Checkpoint) -> torch.Tensor:
        """The values as they were kept, on the device."""
        if kept.generation != self._generation:
            raise UsageError(
                f"backward needs the inputs of a checkpointed unit from {self._generation - kept.generation} "
                "micro-batches ago, which have been overwritten: call backward before the next forward"
            )
        if self._stream is not None:
            return self._from_host(kept.copy)
        return kept.copy.clone() if kept.altered and kept.shared > 1 else kept.copy

    def _copies(self, tensor: torch.Tensor) -> bool:
        return (
            type(tensor) is torch.Tensor
            and tensor.layout == torch.strided
            and tensor.device == self._device
            and tensor.numel() > 0
            and not (tensor.is_conj() or tensor.is_neg() or tensor.is_inference())
            and tensor.data_ptr() % ALIGNMENT_BYTES == 0
            and _is_dense(tensor)
        )

    @torch.no_grad()
    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        numel, dtype = tensor.numel(), tensor.dtype
        if self._arena.has_room(numel, dtype):
            flat = self._arena.take(numel, dtype)
        else:
            place = torch.device("cpu") if self._offload else self._device
            flat = torch.empty(numel, dtype=dtype, device=place, pin_memory=self._offload)
            self._beside += aligned(numel * dtype.itemsize)
        copy = flat.as_strided(tensor.size(), tensor.stride())
        if self._stream is None:
            copy.copy_(tensor)
            return copy
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copy.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)  # not to be handed out again before it has been read
        return copy

    @torch.no_grad()
    def _from_host(self, copy: torch.Tensor) -> torch.Tensor:
        assert self._stream is not None
        # The same stream wrote the copy and will overwrite it, so both are ordered without the host waiting.
        with torch.cuda.stream(self._stream):
            back = torch.empty_strided(copy.size(), copy.stride(), dtype=copy.dtype, device=self._device)
            back.copy_(copy, non_blocking=True)
            arrived = self._stream.record_event()
        current = torch.cuda.current_stream(self._device)
        current.wait_event(arrived)
        back.record_stream(current)
        return back


def store_for(model: nn.Module, config: ZeroConfig, device: torch.device) -> CheckpointStore:
    """The store of an engine over `model`. Allocates nothing.

    Raises ConfigError or ModelError for settings with which nothing would be saved.
    """
    wanted = config.activation_checkpointing == "unit"
    if wanted and all(next(unit.parameters(), None) is None for unit in boundaries(model).values()):
        raise ModelError(
            f"activation_checkpointing is 'unit' and {type(model).__name__} has no unit but the root, "
            "which is never recomputed: put its layers into an nn.ModuleList or nn.Sequential"
        )
    return CheckpointStore(device, offload=config.checkpoint_offload)


class Recomputation:
    """Wraps the modules that are units of their own, so that backward computes their forward again.

    gather       brings a unit's parameters to the rank (at once where they are whole)
    pack, unpack how autograd saves a tensor that is not copied
    in_unit      whether a tensor lies in a gathered unit, whose bytes are not activations
    sample       called where memory peaks within a backward: after the first recomputation at which as much
                 is saved as ever
    """

    def __init__(
        self,
        store: CheckpointStore,
        saved: SavedTensors,
        *,
        gather: Callable[[FlatUnit], Any],
        pack: Callable[[torch.Tensor], Any],
        unpack: Callable[[Any], torch.Tensor],
        in_unit: Callable[[torch.Tensor], bool],
        sample: Callable[[], None],
    ) -> None:
        self._store = store
        self._saved = saved
        self._gather = gather
        self._pack = pack
        self._unpack = unpack
        self._in_unit = in_unit
        self._sample = sample
        self._sampled = False
        self._originals: list[tuple[nn.Module, Any]] = []

    def install(self, model: nn.Module, units: Sequence[FlatUnit]) -> None:
        """Wrap every module of `model` that bounds a unit and has parameters, also tied or frozen ones."""
        for module in dict.fromkeys(boundaries(model).values()):
            own = {id(parameter) for parameter in module.parameters()}
            needed = [unit for unit in units if any(id(p) in own for p in unit.parameters)]
            if needed:
                self._originals.append((module, module.__dict__.get("forward")))
                module.forward = self._checkpointed(module, needed)

    def remove(self) -> None:
        """Give the modules their own forward back."""
        for module, own in self._originals:
            if own is None:
                del module.forward
            else:
                module.forward = own
        self._originals.clear()

    def begin(self) -> None:
        """A new micro-batch's forward begins."""
        if self._originals:
            self._store.begin()
            self._sampled = False

    def _checkpointed(self, module: nn.Module, units: Sequence[FlatUnit]) -> Callable[..., Any]:
        forward = module.forward
        owners = [inner for inner in module.modules() if inner._buffers]

        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            leaves, structure = tree_flatten((args, kwargs))
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            others = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
            # The first call takes the caller's own objects: a module may fill a list or a dict it is given.
            first = [(args, kwargs)]

            def call(*inputs: torch.Tensor) -> Any:
                if first:
                    taken, named = first.pop()
                else:
                    filled = list(others)
                    for place, tensor in zip(places, inputs, strict=True):
                        filled[place] = tensor
                    taken, named = tree_unflatten(filled, structure)
                return forward(*taken, **named)

            kept: list[Checkpoint] = []
            versions, buffers = [_version(tensor) for tensor in tensors], _buffers(owners)
            written: list[_Place] = []
            # torch saves the inputs under these hooks; forward itself runs under its own.
            with torch.autograd.graph.saved_tensors_hooks(partial(self._keep, kept), self._restore):
                contexts = partial(self._contexts, units, written)
                outputs = checkpoint(call, *tensors, use_reentrant=False, context_fn=contexts)
            written += _written(buffers, _buffers(owners))
            if versions != [_version(tensor) for tensor in tensors]:
                for each in kept:
                    each.altered = True
            return outputs

        return run

    @unseen
    def _keep(self, kept: list[Checkpoint], tensor: torch.Tensor) -> Any:
        parameter = self._saved.excludes(tensor) or self._in_unit(tensor)
        copied = None if parameter else self._store.keep(tensor)
        if copied is None:
            return self._pack(tensor)
        kept.append(copied)
        if copied.copy.device == tensor.device:
            self._saved.count(copied.copy)
        return copied

    @unseen
    def _restore(self, packed: Any) -> torch.Tensor:
        return self._store.restore(packed) if isinstance(packed, Checkpoint) else self._unpack(packed)

    def _contexts(
        self, units: Iterable[FlatUnit], written: Iterable[_Place]
    ) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), self._recomputing(units, written)

    @contextmanager
    def _recomputing(self, units: Iterable[FlatUnit], written: Iterable[_Place]) -> Iterator[None]:
        for unit in units:
            self._gather(unit)
        # torch's hooks put what is recomputed where backward asks for it, and go on to do so behind a count.
        pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self._saved.begin_recomputation()

        def counted(tensor: torch.Tensor) -> Any:
            if not self._in_unit(tensor):
                self._saved.count_recomputed(tensor)
            return pack(tensor)

        try:
            with _preserved(written), torch.autograd.graph.saved_tensors_hooks(counted, unpack):
                yield
        finally:
            if self._saved.end_recomputation() and not self._sampled:
                self._sampled = True  # all units of one size are alike, and looking costs milliseconds
                self._sample()


def _buffers(owners: Iterable[nn.Module]) -> dict[_Place, tuple[int, int]]:
    """For each buffer which tensor it is, and how often that has been written to."""
    return {
        (owner, name): (id(buffer), _version(buffer))
        for owner in owners
        for name, buffer in owner._buffers.items()
        if buffer is not None
    }


def _written(before: dict[_Place, tuple[int, int]], after: dict[_Place, tuple[int, int]]) -> list[_Place]:
    """The buffers that changed in between. Batch norm's kernels write without being counted."""
    return [
        place
        for place, state in after.items()
        if before.get(place) != state or isinstance(place[0], _NormBase)
    ]


@contextmanager
def _preserved(places: Iterable[_Place]) -> Iterator[None]:
    """Buffers that forward writes to (statistics, counters) are left as the first forward left them."""
    kept = []
    for owner, name in places:
        buffer = owner._buffers[name]
        assert buffer is not None
        kept.append((owner, name, buffer, buffer.detach().clone()))
    try:
        yield
    finally:
        with torch.no_grad():
            for owner, name, buffer, values in kept:
                owner._buffers[name] = buffer
                buffer.copy_(values)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a run of memory, each place once, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
