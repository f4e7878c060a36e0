"""How many bytes a resize has to move, by the arithmetic of the layout alone: no engine is asked.

fp32 with AdamW. A parameter's fp32 value is its own master, and two moments of 4 bytes go with it. Moments
are owned from stage 1 on, values at stage 3; up to stage 2 every rank has all values, so a rank that stays
lacks none of them, and one that joins lacks them all.
"""

from benchmarks.elastic_model import SEQUENCE, gpt_of
from workers.model_shapes import gpt_parameters, gpt_unit_of
from zero_core.layout import Layout, build_layout, moves

_VALUE_BYTES, _MOMENT_BYTES = 4, 8


def gpt_layout(size: str, *, tile: int) -> Layout:
    """The layout of the GPT of that size, for one rank."""
    model = gpt_of(size)
    parameters = gpt_parameters(model, sequence_length=SEQUENCE)
    return build_layout(parameters, gpt_unit_of(model), tile=tile, world_size=1)


def bytes_needed(layout: Layout, *, stage: int, old_workers: int, new_workers: int) -> int:
    """Bytes that the ranks of the new group lack, all of them together. Rank r stays rank r."""
    state_bytes = _VALUE_BYTES + _MOMENT_BYTES
    owned_bytes = {0: 0, 1: _MOMENT_BYTES, 2: _MOMENT_BYTES, 3: state_bytes}[stage]
    whole_bytes = state_bytes - owned_bytes
    joiners = max(0, new_workers - old_workers)
    changing = sum(
        move.stop - move.start
        for move in moves(layout.at(old_workers), layout.at(new_workers))
        if move.source != move.target
    )
    return changing * owned_bytes + joiners * layout.numel() * whole_bytes
