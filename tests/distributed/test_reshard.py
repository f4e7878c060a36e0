"""Groups that take over from one another: any N to any N, every stage, and nobody notices in the numbers."""

import gc
import hashlib
import re
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.lives import Act, Diary, Script, digest, play
from tests.distributed.odd_model import batch
from tests.distributed.ranks import run_ranks
from tests.distributed.test_reproducible import WithAttention
from zero_core import AdamWConfig, SGDConfig, ZeroConfig, ZeroEngine, full_state_dict
from zero_core.errors import NothingHeldError, ReshardError, UsageError
from zero_core.moving import StateId
from zero_core.reshard import take_over
from zero_core.snapshot import Snapshot

pytestmark = pytest.mark.distributed

MICRO_BATCHES = 7


def config(stage: int, precision: str, **more: Any) -> ZeroConfig:
    settings: dict[str, Any] = {
        "micro_batches": MICRO_BATCHES,
        "optimizer": AdamWConfig(lr=1e-2),
        "clip_norm": 0.3,
        "tile": 64,
        "staging_bytes": 4096,
        "reproducible": True,
        "collective_timeout_s": 60.0,
    }
    return ZeroConfig(stage=stage, precision=precision, **settings | more)


def model() -> torch.nn.Module:
    torch.manual_seed(1)
    module = WithAttention()
    module.calls.fill_(41)
    return module


def train(engine: ZeroEngine, step: int) -> None:
    for index in engine.micro_batches:
        torch.manual_seed(1_000 * step + index)
        engine.backward(engine(*batch(step, index)))


def script(*acts: Act, stage: int, precision: str, **more: Any) -> Script:
    return Script(acts, config(stage, precision, **more), model, train)


def first(members: int) -> tuple[int, ...]:
    return tuple(range(members))


def curve(diaries: dict[int, Diary]) -> dict[int, str]:
    """Loss by step; what was computed more than once, or by several, must be the same each time."""
    found: dict[int, str] = {}
    for diary in diaries.values():
        for step, loss in diary.losses:
            assert found.setdefault(step, loss) == loss, f"step {step} has two losses"
    return found


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, tuple[dict[int, str], str]]:
    """Losses and digest after 15 steps on one rank."""
    found = {}
    for precision in ("fp32", "bf16", "fp16"):
        diaries = play(1, script(Act((0,), 15), stage=1, precision=precision))
        found[precision] = curve(diaries), diaries[0].digest
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_resizes_change_no_bit(stage: int, precision: str, undisturbed: Any) -> None:
    sizes = (2, 4, 3, 1, 5)
    acts = [Act(first(size), 3 * (number + 1)) for number, size in enumerate(sizes)]
    diaries = play(5, script(*acts, stage=stage, precision=precision))
    losses, digest = undisturbed[precision]
    assert curve(diaries) == losses
    for diary in diaries.values():
        assert diary.digest == digest
        assert diary.buffers == {"calls": 41}
        for number, taken in diary.taken.items():
            assert (taken.step, taken.generation) == (3 * number, number - 1)
            assert taken.bytes_moved == taken.bytes_needed
            assert taken.replica_ranks == ()
    received = [sum(d.taken[4].bytes_received for d in diaries.values() if 4 in d.taken)]
    assert received == [diaries[0].taken[4].bytes_moved], "what is said to move is what is received"


def grow_from_meta(rank: int, world: int, stage: int) -> tuple[str, str]:
    """Rank 0 trains alone, and leaves nothing of its engine; the other joins with a module on meta."""
    settings = config(stage, "fp32")
    alone = [dist.new_group([member]) for member in range(world)][rank]
    held: list[Snapshot] = []
    module = model()
    if rank == 0:
        engine = ZeroEngine(module, settings, group=alone)
        train(engine, 0)
        engine.step()
        held = engine.snapshots()
        before = weakref.ref(engine)
        gc.disable()
        engine.detach()
        engine.detach()  # once more is nothing
        del engine
        assert before() is None, "freed without the garbage collector"
        gc.enable()
    else:
        with torch.device("meta"):
            module = WithAttention()
    engine = ZeroEngine(module, settings, blank=True, initialise=refill, generation=1)
    for use in (lambda: engine(*batch(0, 0)), engine.full_parameters, lambda: full_state_dict(engine)):
        with pytest.raises(UsageError, match="holds no whole state"):
            use()
    assert engine.snapshots() == []
    taken = take_over(engine, held, group=dist.group.WORLD)
    assert (taken.step, engine.steps_done) == (1, 1)
    train(engine, 1)
    loss = engine.step().loss.hex()
    return loss, digest(engine)


def refill(module: torch.nn.Module, _name: str) -> None:
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        tensor.data.fill_(1) if tensor.dtype != torch.int64 else tensor.data.fill_(3)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_joiner_may_come_with_a_model_on_the_meta_device(stage: int, undisturbed: Any) -> None:
    first_answer, second_answer = run_ranks(2, grow_from_meta, stage)
    assert first_answer == second_answer
    assert first_answer[0] == undisturbed["fp32"][0][2]


def refused(rank: int, world: int) -> list[str]:
    def held_by(**settings: Any) -> list[Snapshot]:
        engine = ZeroEngine(model(), config(2, settings.pop("precision", "fp32"), **settings))
        train(engine, 0)
        engine.step()
        found = engine.snapshots()
        engine.detach()
        return found

    told = []

    def error(held: list[Snapshot], kind: type[Exception], **more: Any) -> None:
        engine = ZeroEngine(model(), config(2, "fp32"), blank=True)
        with pytest.raises(kind) as caught:
            take_over(engine, held, group=dist.group.WORLD, **more)
        assert engine.snapshots() == []
        told.append(str(caught.value))
        engine.detach()

    same = held_by()
    other = held_by(precision="bf16")
    fewer = held_by(optimizer=SGDConfig(momentum=0.9))
    error(other if rank else same, ReshardError)
    error(fewer if rank else same, ReshardError)
    error([] if rank else same, NothingHeldError)
    error(same, NothingHeldError, floor_step=2)
    engine = ZeroEngine(model(), config(2, "fp32"), blank=True)
    assert take_over(engine, same, group=dist.group.WORLD).step == 1, "what was held is untouched"
    return told


def test_what_cannot_be_taken_over_is_the_same_error_on_every_rank() -> None:
    first_told, second_told = run_ranks(2, refused)
    assert first_told == second_told
    for message, said in zip(
        first_told,
        (
            "participant 1 holds the part of rank 1 .* of precision bf16",
            "participant 1 .* of states master, momentum, and the new group's are master, momentum, variance",
            "There is step 1 of generation 0: ranks 0 of 2. Go on from a checkpoint",
            "no whole state of step 2 or later",
        ),
        strict=True,
    ):
        assert re.search(said, message), message


def content(engine: ZeroEngine) -> str:
    found = full_state_dict(engine, dtype="master")
    return hashlib.sha256(b"".join(found[name].numpy().tobytes() for name in sorted(found))).hexdigest()


def edited(rank: int, world: int) -> tuple[str, ...]:
    """An edit makes another state of the same step, frozen units included; then rank 1 is lost."""
    engine = ZeroEngine(model(), config(3, "bf16", replicas=1))
    train(engine, 0)
    engine.step()
    before = content(engine)
    with engine.full_parameters(write=True):
        for parameter in engine.module.parameters():
            if parameter.is_floating_point():
                parameter.data.mul_(0.5)
    after, states = content(engine), {snapshot.meta.state for snapshot in engine.snapshots()}
    assert max(states) == StateId(1, 0, 1)
    with pytest.raises(UsageError, match="every rank must make"), engine.full_parameters(write=True):
        engine.module.norm.weight.data.fill_(rank)
    assert {snapshot.meta.state for snapshot in engine.snapshots()} == states, "the former values are back"
    dist.barrier()  # the other's copies are complete
    held = engine.snapshots()
    engine.detach()
    group = dist.new_group([0])
    if rank == 1:
        return before, after, after
    lone = ZeroEngine(model(), config(3, "bf16"), group=group, blank=True)
    assert take_over(lone, held, group=group).replica_ranks == (1,)
    return before, after, content(lone)


def test_what_was_edited_is_what_is_recovered() -> None:
    for before, after, recovered in run_ranks(2, edited):
        assert before != after == recovered
