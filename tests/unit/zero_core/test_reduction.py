"""When a buffer for whole gradients is lent again: never while a rank may read it, and always in time."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from zero_core import ZeroConfig
from zero_core.buffers import BufferPool
from zero_core.collectives import Collectives, Exchange
from zero_core.ledger import Ledger
from zero_core.links import Kind, Notice
from zero_core.reduction import Reducer
from zero_core.residency import gradient_buffers
from zero_core.units import bind_units

WIDTH, LAYERS = 8, 7

Choose = Callable[[int, int], int]
"""A number between the two given ones, both included."""


class ScriptedLink:
    """A rank on this host that adds zeros, and is as far ahead or behind as `choose` says."""

    def __init__(self, choose: Choose) -> None:
        self._choose = choose
        self.depth = 0
        """Reductions that it has under way at most when its backward goes on."""
        self._told: list[Notice] = []
        self.memory = self
        self.contributions: dict[int, int] = {}
        self.heard = self.finished = 0

    def tell(self, notice: Notice, *, at_once: bool) -> None:
        self._told.append(notice)

    def hear(self, through: int) -> None:
        assert through <= len(self._told), "it would have to wait for this rank, which waits for it"
        for number in range(self.heard + 1, through + 1):
            reductions = [n for n, told in enumerate(self._told[: number - 1], 1) if told.kind is Kind.REDUCE]
            if self._told[number - 1].kind is Kind.REDUCE:
                self.contributions[number] = 0
                # At most so many are under way when it announces the next one.
                must = max(0, len(reductions) - max(0, self.depth - 1))
            else:
                must = len(reductions)
            done = self._choose(must, len(reductions))
            self.finished = max(self.finished, reductions[done - 1] if done else 0)
        self.heard = max(self.heard, through)

    def catch_up(self, through: int) -> None:
        self.hear(self._choose(self.heard, through))

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype)


class ScriptedCollectives(Collectives):
    """The real ones, but for their links."""

    def __init__(self, links: list[ScriptedLink]) -> None:
        self.rank, self.world_size = 0, len(links) + 1
        self.device, self.on_gpu, self.native = torch.device("cpu"), False, False
        self.ledger = Ledger()
        self.staging = torch.empty(0, dtype=torch.uint8)
        self.steps = self._told = self._finished = 0
        self._check = "off"
        self._arena = self._block = None
        self._timeout_s = 1.0
        self._near = dict(enumerate(links, 1))  # type: ignore[arg-type]
        self._far = {}
        self.read_for: dict[int, int] = {}
        """The notice of the newest reduction that a buffer was read for, by the buffer's address."""

    def begin_reduce(self, full: torch.Tensor, *args: Any, **kwargs: Any) -> Exchange:
        exchange = super().begin_reduce(full, *args, **kwargs)
        self.read_for[full.data_ptr()] = exchange.announced
        return exchange

    def may_read(self, buffer: torch.Tensor) -> bool:
        """Whether a rank has not said yet that it is through with the buffer's newest reduction."""
        number = self.read_for.get(buffer.data_ptr(), 0)
        return any(link.finished < number for link in self._near.values())


class WatchedPool(BufferPool):
    """Fails where a buffer is lent that another rank may still read."""

    def __init__(self, collectives: ScriptedCollectives) -> None:
        super().__init__(lambda numel, dtype: torch.zeros(numel, dtype=dtype))
        self._collectives = collectives

    def lend(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        buffer = super().lend(numel, dtype)
        assert not self._collectives.may_read(buffer), "lent while another rank may read it"
        return buffer


def train(choose: Choose, *, peers: int, overlap: bool, rounds: int) -> WatchedPool:
    """One step of a model of `LAYERS` units and a root, at stage 2, beside scripted ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    model.register_parameter("scale", nn.Parameter(torch.ones(())))
    layout, units = bind_units(model, precision="fp32", tile=8, rank=0, world_size=peers + 1)
    for unit in units:
        for parameter, view in zip(unit.parameters, unit.views(torch.randn(unit.padded)), strict=True):
            parameter.data = view
    links = [ScriptedLink(choose) for _ in range(peers)]
    collectives = ScriptedCollectives(links)
    pool = WatchedPool(collectives)
    config = ZeroConfig(stage=2, overlap=overlap)
    for (numel, _), count in gradient_buffers(layout, config).items():
        pool.reserve(numel, torch.float32, count=count)
    reducer = Reducer(
        units,
        collectives,
        pool,
        keep_full=False,
        leaves=rounds * (peers + 1),
        reproducible=False,
        overlap=overlap,
        active=lambda: peers + 1,
        after_reduce=lambda unit: None,
    )
    for link in links:
        link.depth = reducer._depth  # all ranks do the same
    reserved = pool.allocated_bytes
    want = [torch.zeros_like(p) for p in model.parameters()]
    for turn in range(rounds):
        x = torch.full((2, WIDTH), 1.0 + turn)
        loss = (model(x) * model.scale).square().mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        want = [total + gradient for total, gradient in zip(want, gradients, strict=True)]
        reducer.begin_micro_batch()
        loss.backward()
        reducer.end_micro_batch()
        collectives.fence()
        reducer.free_buffers()
    assert pool.allocated_bytes == reserved, "no rank may need more than was predicted"
    by_parameter = dict(zip(map(id, model.parameters()), want, strict=True))
    for gradient in reducer.gradients:
        unit = gradient.unit
        flat = torch.cat([by_parameter[id(p)].flatten() for p in unit.parameters])
        assert torch.equal(gradient.owned, flat[unit.start : unit.stop])
    return pool


@given(st.data(), st.integers(1, 3), st.booleans(), st.integers(1, 2))
def test_no_buffer_is_lent_while_a_rank_may_read_it(
    data: st.DataObject, peers: int, overlap: bool, rounds: int
) -> None:
    """However far ahead or behind the others are: numbers are right, and the reserved buffers are enough."""
    train(lambda low, high: data.draw(st.integers(low, high)), peers=peers, overlap=overlap, rounds=rounds)


@pytest.mark.parametrize("overlap", [False, True])
def test_ranks_that_are_late_need_every_buffer(overlap: bool) -> None:
    """No more is reserved than what is needed where others announce and finish as late as they may."""
    pool = train(lambda low, high: low, peers=2, overlap=overlap, rounds=1)
    assert pool.most_lent_bytes == pool.allocated_bytes


def test_ranks_that_keep_up_are_not_waited_for() -> None:
    """What all have announced is finished at once, so that few buffers stay in use, the warmest."""
    pool = train(lambda low, high: high, peers=2, overlap=True, rounds=1)
    assert pool.most_lent_bytes < pool.allocated_bytes
