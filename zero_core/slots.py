"""Where the copies of one rank's states lie, and what they are copies of at the moment.

Owns the arrangement of a *region*: two slots for masters, moments and buffers, each with a header that says
which state it holds, and at stage 3 one part for what is frozen. Owner and keeper compute the same one.
Knows bytes and headers; nothing of ranks' hosts, of messages, nor of when something is copied.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch

from zero_core import budget
from zero_core.budget import SLOT_HEADER_BYTES, aligned
from zero_core.config import ZeroConfig
from zero_core.moving import MODEL, Form, Key, Meta, StateId
from zero_core.sharing import SharedMemory
from zero_core.snapshot import Snapshot, Standing
from zero_core.units import held_dtype

FROZEN = 2
"""Number of the part for frozen units, after the slots 0 and 1."""

_LENGTH_BYTES = 8
_BEING_WRITTEN = Standing(StateId(-1, -1), 0, None, False)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a piece lies within a slot, or within the part for frozen units: [numel] of `dtype`."""

    offset: int
    numel: int
    dtype: torch.dtype

    def within(self, slot: torch.Tensor) -> torch.Tensor:
        size = self.numel * self.dtype.itemsize
        return slot[self.offset : self.offset + size].view(self.dtype)


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Where all pieces of one rank lie: in each slot, and, at stage 3, beside the slots what is frozen.

    starts  first element of each piece in its unit
    """

    slot: dict[Key, Place]
    buffers: dict[str, Place]
    frozen: dict[Key, Place]
    starts: dict[Key, int]
    slot_bytes: int
    frozen_bytes: int

    @property
    def bytes(self) -> int:
        return 2 * self.slot_bytes + self.frozen_bytes


def arrange(form: Form, config: ZeroConfig, rank: int, buffers: Mapping[str, torch.Tensor]) -> Arrangement:
    """The arrangement of a rank's region; `buffers` are like the rank's own.

    Pieces of the optimizer's arena come in its order, so that they can be copied as one.
    """
    layout, stage, precision = form.layout, form.stage, form.precision
    kinds = form.kinds if stage else ()
    in_arena = [kind for kind in kinds if kind != "master" or precision != "fp32"]
    slot: dict[Key, Place] = {}
    frozen: dict[Key, Place] = {}
    starts: dict[Key, int] = {}
    end, frozen_end = SLOT_HEADER_BYTES, SLOT_HEADER_BYTES
    trainable = [index for index, unit in enumerate(layout.units) if unit.trainable]
    order = [(index, kind) for index in trainable for kind in in_arena]
    order += [(index, "master") for index in trainable if kinds and "master" not in in_arena]
    for index, kind in order:
        start, stop = layout.owned(index, rank)
        slot[index, kind], starts[index, kind] = Place(end, stop - start, torch.float32), start
        end += aligned(4 * (stop - start))
    places = {}
    for name, size in form.buffers:
        places[name] = Place(end, buffers[name].numel(), buffers[name].dtype)
        end += aligned(size)
    for index, unit in enumerate(layout.units):
        if not unit.trainable and stage == 3:
            start, stop = layout.owned(index, rank)
            dtype = held_dtype(unit.dtype, precision)
            frozen[index, MODEL], starts[index, MODEL] = Place(frozen_end, stop - start, dtype), start
            frozen_end += aligned((stop - start) * dtype.itemsize)
    found = Arrangement(slot, places, frozen, starts, end, frozen_end if frozen else 0)
    buffer_bytes = sum(aligned(size) for _, size in form.buffers)
    expected = budget.region_bytes(layout, config, rank, buffer_bytes=buffer_bytes)
    assert found.bytes == expected, "the budget's arithmetic"
    return found


class Slot:
    """Bytes with a header that says what they hold, once they hold it.

    The header is the length of a JSON text, 0 while the rest is being written, and the text. So what a killed
    owner leaves is either complete or none.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._length = memory[:_LENGTH_BYTES].view(torch.int64)

    def open(self) -> None:
        self._length.zero_()

    def close(self, standing: Standing, edits: int) -> None:
        """Say what the slot holds. `edits`: how often values had been written from outside by then."""
        state = standing.state
        told = {
            "state": [state.step, state.generation, state.revision],
            "updates": standing.updates,
            "gate": standing.gate,
            "edits": edits,
        }
        text = json.dumps(told).encode()
        assert len(text) <= SLOT_HEADER_BYTES - _LENGTH_BYTES, "a header holds a few numbers"
        end = _LENGTH_BYTES + len(text)
        self.memory[_LENGTH_BYTES:end] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._length.fill_(len(text))

    def read(self) -> tuple[Standing, int] | None:
        """What the slot holds, and the count of edits then; None while it is being written."""
        length = int(self._length)
        if not length:
            return None
        text = bytes(self.memory[_LENGTH_BYTES : _LENGTH_BYTES + length].tolist())
        told = json.loads(text)
        return Standing(StateId(*told["state"]), told["updates"], told["gate"], False), told["edits"]


class Region:
    """One rank's two slots and its frozen part, in one piece of memory: [bytes] uint8.

    rank     whose states they are
    replica  whether the rank is another than the one that holds this object
    buffers  like the rank's own, for their shapes
    own      of an owner's region: its frozen units, which need no copy to be offered by itself
    shared   the shared memory that it lies in, if it does
    """

    def __init__(
        self,
        form: Form,
        rank: int,
        arrangement: Arrangement,
        memory: torch.Tensor,
        *,
        replica: bool,
        buffers: Mapping[str, torch.Tensor],
        own: Mapping[Key, tuple[int, torch.Tensor]],
        shared: SharedMemory | None,
    ) -> None:
        self._form = form
        self._rank = rank
        self.arrangement = arrangement
        size = arrangement.slot_bytes
        self.slots = (Slot(memory[:size]), Slot(memory[size : 2 * size]))
        self.frozen = Slot(memory[2 * size : arrangement.bytes]) if arrangement.frozen else None
        self.arrived = [True, True, True]
        """Whether each slot, and the frozen part, is all there: not while a message is filling it."""
        self.edits: int | None = 0
        """Of an owner's region: the count of edits whose slots fit what is frozen now; None: none does."""
        self._replica = replica
        self._shapes = {name: tuple(buffers[name].shape) for name in arrangement.buffers}
        self._own = own
        self._shared = shared

    def parts(self, slot: int, *, frozen: bool) -> list[tuple[int, torch.Tensor]]:
        """What one replication writes, by number."""
        found = [(slot, self.slots[slot].memory)]
        if frozen and self.frozen is not None:
            found.append((FROZEN, self.frozen.memory))
        return found

    def holding(self, number: int) -> Standing | None:
        """Which state slot `number` holds, whole and in keeping with what is frozen."""
        found = self.slots[number].read() if self.arrived[number] else None
        if found is None:
            return None
        edits = self.edits
        if self._replica:
            frozen = self.frozen.read() if self.frozen is not None and self.arrived[FROZEN] else None
            edits = found[1] if self.frozen is None else None if frozen is None else frozen[1]
        return found[0] if found[1] == edits else None

    def snapshot(self, number: int) -> Snapshot:
        """What slot `number` holds, by reference; `Snapshot.current` looks again."""
        at, slot, arrangement = self.holding(number) or _BEING_WRITTEN, self.slots[number], self.arrangement
        starts = arrangement.starts
        pieces = {key: (starts[key], place.within(slot.memory)) for key, place in arrangement.slot.items()}
        pieces |= self._own
        if self._replica and self.frozen is not None:
            for key, place in arrangement.frozen.items():
                pieces[key] = starts[key], place.within(self.frozen.memory)
        meta = Meta(self._form, at.state, self._rank, False, self._replica, at.updates, at.gate)
        again = partial(self.snapshot, number)
        return Snapshot(meta, pieces, None, self.buffers(number), self._shared, again)

    def buffers(self, number: int) -> dict[str, torch.Tensor]:
        memory = self.slots[number].memory
        return {
            name: place.within(memory).view(self._shapes[name])
            for name, place in self.arrangement.buffers.items()
        }
