"""What is trained: the built-in GPT, and the way a user's own model comes in.

The protocol of a user's model, named `package.module:Class` in the job: `Class(**arguments)` is an
`nn.Module`; `forward(inputs, targets)`, both int64 [batch, sequence], returns the scalar mean loss over all
positions. Children of an `nn.ModuleList` or `nn.Sequential` become ZeRO units, so a model's layers belong in
one. Randomness comes from torch's default generator, which the loop seeds for each micro-batch.

Knows nothing of ranks, data or the engine.
"""

from importlib import import_module
from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn import functional

from workers.errors import ModelError
from workers.model_shapes import MLP_RATIO
from workers.spec import CustomModel, GPTModel, JobSpec

_INITIAL_DEVIATION = 0.02


def build_model(spec: JobSpec) -> nn.Module:
    """The job's model on the CPU in fp32. `spec.seed` alone decides its initial parameters.

    Raises ModelError if a user's class cannot be imported or built. The process's own random state is
    left as it was.
    """
    with torch.random.fork_rng():
        torch.manual_seed(spec.seed)
        if isinstance(spec.model, GPTModel):
            return GPT(spec.model, sequence_length=spec.sequence_length)
        return _build_custom(spec.model)


def vocabulary(spec: JobSpec) -> int | None:
    """Number of token ids the model takes; None where only a user's model knows."""
    return spec.model.vocabulary if isinstance(spec.model, GPTModel) else None


def load_class(factory: str) -> type[nn.Module]:
    """Import `package.module:Class`. Raises ModelError if that is not possible or is no nn.Module."""
    module_name, _, class_name = factory.partition(":")
    try:
        module = import_module(module_name)
    except Exception as error:  # a user's module may raise anything while it is imported
        raise ModelError(
            f"model {factory!r}: importing {module_name!r} failed with {type(error).__name__}: {error}. "
            "It must be importable on every worker"
        ) from error
    found = getattr(module, class_name, None)
    if found is None:
        raise ModelError(f"model {factory!r}: module {module_name!r} has no {class_name!r}")
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ModelError(f"model {factory!r}: {class_name!r} is {found!r}, not a subclass of torch.nn.Module")
    return found


def _build_custom(model: CustomModel) -> nn.Module:
    factory = load_class(model.factory)
    try:
        built = factory(**model.arguments)
    except Exception as error:  # a user's constructor may raise anything
        raise ModelError(
            f"model {model.factory!r}: building it with arguments {sorted(model.arguments)} failed with "
            f"{type(error).__name__}: {error}"
        ) from error
    if not any(parameter.requires_grad for parameter in built.parameters()):
        raise ModelError(f"model {model.factory!r} has no trainable parameter")
    return built


class Block(nn.Module):
    """One pre-norm transformer block: causal self-attention, then a feed-forward layer. One ZeRO unit."""

    def __init__(self, model: GPTModel) -> None:
        super().__init__()
        hidden, inner = model.hidden, MLP_RATIO * model.hidden
        self.heads = model.heads
        self.dropout = model.dropout
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention_in = nn.Linear(hidden, 3 * hidden)
        self.attention_out = nn.Linear(hidden, hidden)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.mlp_in = nn.Linear(hidden, inner)
        self.mlp_out = nn.Linear(inner, hidden)

    def forward(self, stream: Tensor) -> Tensor:
        """[batch, sequence, hidden] -> the same shape."""
        stream = stream + self._drop(self._attend(self.attention_norm(stream)))
        inner = functional.gelu(self.mlp_in(self.mlp_norm(stream)))
        return stream + self._drop(self.mlp_out(inner))

    def _attend(self, stream: Tensor) -> Tensor:
        batch, sequence, hidden = stream.shape
        split = self.attention_in(stream).view(batch, sequence, 3, self.heads, hidden // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind()  # each [batch, heads, sequence, head size]
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(batch, sequence, hidden))
        return out

    def _drop(self, stream: Tensor) -> Tensor:
        return functional.dropout(stream, self.dropout, self.training) if self.dropout else stream


class GPT(nn.Module):
    """A decoder-only transformer with learned positions. Its blocks are ZeRO units, the rest the root unit.

    `workers.model_shapes` lists the same parameters without torch.
    """

    def __init__(self, model: GPTModel, *, sequence_length: int) -> None:
        super().__init__()
        self.sequence_length = sequence_length
        self.dropout = model.dropout
        self.token = nn.Embedding(model.vocabulary, model.hidden)
        self.position = nn.Embedding(sequence_length, model.hidden)
        self.blocks = nn.ModuleList(Block(model) for _ in range(model.layers))
        self.norm = nn.LayerNorm(model.hidden)
        self.head = nn.Linear(model.hidden, model.vocabulary, bias=False)
        self._initialise(model)
        if model.tied_head:
            self.head.weight = self.token.weight

    def _initialise(self, model: GPTModel) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                # Each block adds two terms to the residual stream; scaling them keeps its variance level.
                residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
                scale = 1 / sqrt(2 * model.layers) if residual else 1.0
                nn.init.normal_(parameter, std=_INITIAL_DEVIATION * scale)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in fp32 over all positions; inputs and targets int64 [batch, sequence]."""
        sequence = inputs.shape[1]
        if sequence > self.sequence_length:
            raise ModelError(f"inputs have {sequence} positions, the model {self.sequence_length}")
        positions = torch.arange(sequence, device=inputs.device)
        stream = self.token(inputs) + self.position(positions)
        if self.dropout:
            stream = functional.dropout(stream, self.dropout, self.training)
        for block in self.blocks:
            stream = block(stream)
        logits = self.head(self.norm(stream))
        return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
