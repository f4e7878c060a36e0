"""Memory that outlives the object that made it, and its way to another process."""

import os

import pytest
import torch

from zero_core.errors import PeerLostError
from zero_core.handing import DescriptorServer, fetch
from zero_core.sharing import PeerMemory, SharedArena


@pytest.mark.parametrize("numel", [10, 100_000])
def test_what_is_filled_is_read_elsewhere(numel: int) -> None:
    arena = SharedArena()
    target = arena.allocate(numel, torch.bfloat16)
    memory = arena.handle()
    arena.close()
    source = torch.randn(numel + 3).bfloat16()
    memory.fill(target[3:], source[6:])
    assert torch.equal(target[3:], source[6:])
    assert target[:3].eq(0).all()
    offset = memory.offset(target[3:])
    assert offset is not None
    other = PeerMemory(os.dup(memory.descriptor))
    assert torch.equal(other.tensor(offset, numel - 3, torch.bfloat16), source[6:])
    other.close()


def test_what_lies_elsewhere_is_copied() -> None:
    arena = SharedArena()
    arena.allocate(8, torch.float32)
    memory, target = arena.handle(), torch.zeros(1 << 15)
    assert memory.offset(target) is None
    memory.fill(target, torch.ones(1 << 15))
    assert target.eq(1).all()
    arena.close()


def test_descriptors_are_handed_to_whoever_knows_the_token() -> None:
    arena = SharedArena()
    values = arena.allocate(4, torch.float32)
    values.copy_(torch.arange(4.0))
    server = DescriptorServer([arena.descriptor, arena.descriptor])
    first, second = fetch(server.name, server.token)
    memory = PeerMemory(second)
    os.close(first)
    assert memory.tensor(0, 4, torch.float32).tolist() == [0, 1, 2, 3]
    memory.close()
    with pytest.raises(PeerLostError, match="refused"):
        fetch(server.name, b"x" * len(server.token))
    server.close()
    with pytest.raises(PeerLostError, match="does not hand over"):
        fetch(server.name, server.token)
    arena.close()
