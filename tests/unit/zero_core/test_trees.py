"""Tensors within containers and dataclasses."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field

import torch

from zero_core.trees import map_tensors, tensors_in

Pair = namedtuple("Pair", ["left", "right"])


@dataclass(frozen=True)
class Output:
    logits: torch.Tensor
    extra: dict[str, torch.Tensor]
    note: str = "kept"
    derived: int = field(init=False, default=3)


def test_every_tensor_is_found_in_order() -> None:
    a, b, c, d, e = (torch.tensor(float(i)) for i in range(5))
    value = [None, Output(a, {"x": b}), Pair(c, (d,)), OrderedDict(z=e), "text", Output]
    assert [float(t) for t in tensors_in(value)] == [0, 1, 2, 3, 4]
    assert list(tensors_in(None)) == []
    assert list(tensors_in(torch.ones(2))) != []


def test_mapping_keeps_types_and_leaves_the_rest() -> None:
    value = (Pair(torch.ones(2), None), Output(torch.ones(1), {"x": torch.ones(3)}), {"n": 7})
    pair, output, rest = map_tensors(value, lambda t: t * 2)
    assert isinstance(pair, Pair)
    assert pair.right is None
    assert pair.left.tolist() == [2, 2]
    assert output.logits.tolist() == [2]
    assert output.extra["x"].tolist() == [2, 2, 2]
    assert (output.note, output.derived, rest) == ("kept", 3, {"n": 7})
    assert value[1].logits.tolist() == [1], "the argument stays as it was"
