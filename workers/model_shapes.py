"""The built-in GPT as arithmetic: its parameters, their units, and what it saves for backward.

The planner reads these without loading torch. `workers.models` builds the real module; a test holds the
two equal, name by name and shape by shape.
"""

from collections.abc import Callable

from workers.spec import GPTModel, Precision
from zero_core.budget import aligned
from zero_core.config import ITEM_BYTES, Checkpointing
from zero_core.layout import ParameterSpec, module_units

MLP_RATIO = 4
"""Width of a block's feed-forward layer as a multiple of the residual stream."""


def gpt_parameters(model: GPTModel, *, sequence_length: int) -> tuple[ParameterSpec, ...]:
    """The parameters in registration order; a tied head adds none."""
    hidden, inner = model.hidden, MLP_RATIO * model.hidden
    shapes: list[tuple[str, tuple[int, ...]]] = [
        ("token.weight", (model.vocabulary, hidden)),
        ("position.weight", (sequence_length, hidden)),
    ]
    for block in range(model.layers):
        shapes += [
            (f"blocks.{block}.{name}", shape)
            for name, shape in (
                ("attention_norm.weight", (hidden,)),
                ("attention_norm.bias", (hidden,)),
                ("attention_in.weight", (3 * hidden, hidden)),
                ("attention_in.bias", (3 * hidden,)),
                ("attention_out.weight", (hidden, hidden)),
                ("attention_out.bias", (hidden,)),
                ("mlp_norm.weight", (hidden,)),
                ("mlp_norm.bias", (hidden,)),
                ("mlp_in.weight", (inner, hidden)),
                ("mlp_in.bias", (inner,)),
                ("mlp_out.weight", (hidden, inner)),
                ("mlp_out.bias", (hidden,)),
            )
        ]
    shapes += [("norm.weight", (hidden,)), ("norm.bias", (hidden,))]
    if not model.tied_head:
        shapes.append(("head.weight", (model.vocabulary, hidden)))
    return tuple(ParameterSpec(name, shape) for name, shape in shapes)


def gpt_unit_of(model: GPTModel) -> Callable[[str], str]:
    """Which ZeRO unit a parameter of the GPT belongs to: its block, or the root unit ""."""
    return module_units(f"blocks.{block}" for block in range(model.layers))


def gpt_activation_bytes(
    model: GPTModel,
    *,
    sequence_length: int,
    micro_batch: int,
    precision: Precision,
    checkpointing: Checkpointing = "none",
) -> int:
    """Bytes that one micro-batch's forward saves for its backward: an estimate, close to what autograd keeps.

    Counted in tensors of [micro_batch, sequence, hidden]: a block keeps its input, the normed input, query,
    key and value, the attention's output, the middle of the residual stream and its normed form (8), and the
    feed-forward layer before and after its activation function (2 * MLP_RATIO). The attention kernel adds a
    fp32 log-sum-exp for each head and position, the norms an fp32 mean and deviation for each position.

    With checkpointing a block keeps its input alone. The peak is then at the end of forward, or where
    backward has freed what lay behind the last block and computed that block again, whichever is more.
    """
    item = ITEM_BYTES[precision]
    positions = micro_batch * sequence_length
    stream = positions * model.hidden
    block = (8 + 2 * MLP_RATIO) * stream * item
    block += positions * model.heads * 4 + 4 * positions * 4
    # Token ids and targets are int64; the loss keeps fp32 log-probabilities.
    before = positions * 8 + sequence_length * 8
    behind = 2 * stream * item + 2 * positions * 4 + positions * model.vocabulary * 4 + positions * 8
    if model.dropout:
        # Which elements were dropped: twice in a block, once after the embedding. The CPU keeps it in the
        # compute dtype, a GPU in one byte; the larger is counted.
        block += 2 * stream * item
        before += stream * item
    if checkpointing == "none":
        return before + model.layers * block + behind
    # The last block's input is part of what its recomputation saves: one tensor, in the block of checkpoints.
    return before + model.layers * aligned(stream * item) + max(behind, block - stream * item)
