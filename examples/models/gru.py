"""A model of one's own for elastic-zero: a character-level GRU. See examples/jobs/own-model.yaml."""

from torch import Tensor, nn
from torch.nn import functional


class CharacterGRU(nn.Module):
    """Predicts the next byte. Its layers lie in a ModuleList, so each becomes a unit of its own."""

    def __init__(self, *, hidden: int, layers: int, vocabulary: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(nn.GRU(hidden, hidden, batch_first=True) for _ in range(layers))
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """inputs, targets: int64 [batch, sequence]. Returns the scalar mean loss."""
        stream = self.embedding(inputs)
        for layer in self.layers:
            stream = stream + layer(stream)[0]
        logits = self.head(stream)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
