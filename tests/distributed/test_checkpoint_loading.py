"""Loading: only the bytes that are needed, damage found wherever it is, one answer on all ranks."""

import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.odd_model import OddModel, batch, build
from tests.distributed.ranks import run_ranks
from zero_core import (
    AdamConfig,
    AdamWConfig,
    ParameterGroup,
    ScheduleConfig,
    SGDConfig,
    ZeroConfig,
    ZeroEngine,
    checkpoint,
)
from zero_core.checkpoint import loading, manifest, reading
from zero_core.checkpoint.container import BLOCK_BYTES
from zero_core.errors import CheckpointError, DamagedError, UsageError
from zero_core.snapshot import held_states
from zero_core.state_dict import full_state_dict

pytestmark = pytest.mark.distributed

GROUPS = (
    ParameterGroup(name="gains", patterns=("*.gain", "*.bias"), lr=3e-2, betas=(0.5, 0.9), weight_decay=0.2),
    ParameterGroup(name="nothing", patterns=("absent.*",), lr=1.0),
)


def make(
    stage: int,
    precision: str = "fp32",
    model: nn.Module | None = None,
    *,
    blank: bool = False,
    **changes: Any,
) -> ZeroEngine:
    settings: dict[str, Any] = {
        "micro_batches": 5,
        "optimizer": AdamWConfig(lr=1e-2),
        "groups": GROUPS,
        "reproducible": True,
        "tile": 64,
        "staging_bytes": 4096,
        **changes,
    }
    config = ZeroConfig(stage=stage, precision=precision, **settings)
    return ZeroEngine(model or build(), config, blank=blank)


def train(engine: ZeroEngine, steps: range) -> None:
    for step in steps:
        for index in engine.micro_batches:
            engine.backward(engine(*batch(step, index)))
        engine.step()


def state_of(engine: ZeroEngine) -> dict[str, bytes]:
    """Masters, moments and buffers, whole, as bytes."""
    found = {name: t.float().numpy().tobytes() for name, t in full_state_dict(engine, dtype="master").items()}
    for state in engine.optimizer.states:
        for kind in state.kinds:
            flat = torch.zeros(state.unit.padded)
            flat[state.start : state.stop] = getattr(state, kind)
            engine.collectives.gather_from_owners(
                flat, state.unit.chunk, state.unit.numel, kind="test", tag=state.unit.index
            )
            found[f"{kind}/{state.unit.index}"] = flat[: state.unit.numel].numpy().tobytes()
    found["counts"] = repr(
        (engine.steps_done, engine.optimizer.steps_done, engine.gate.state_dict())
    ).encode()
    return found


# -- bytes ----------------------------------------------------------------------------------------


def wide(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(1201, 1999), nn.Linear(1999, 1301, bias=False))


def save_wide(rank: int, world: int, root: Path) -> dict[str, bytes]:
    engine = make(3, model=wide(1), groups=())
    checkpoint.save(engine, root, extra={}, generation=1)
    return full_sums(engine)


def full_sums(engine: ZeroEngine) -> dict[str, bytes]:
    return {n: t.double().sum().numpy().tobytes() for n, t in full_state_dict(engine, dtype="master").items()}


def bytes_read() -> int:
    """By this process, as the operating system counts them."""
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


def load_wide(rank: int, world: int, root: Path, stage: int) -> tuple[int, int, int, dict[str, bytes]]:
    engine = make(stage, model=wide(2), groups=(), blank=stage != 3)
    info = manifest.latest(root)
    assert info is not None
    held = list(held_states(engine.optimizer.states, engine.units, whole_replicas=True))
    needed = sum(one.tensor.numel() * one.tensor.element_size() for one in held)
    reader = reading.Reader(info.location)
    wants = [reading.Want(h.kind, h.unit, h.start, h.start + h.tensor.numel()) for h in held]
    reads = reader.plan(wants)
    allowed = sum(reader.contents(read.file).header_bytes for read in reads) + 64_000  # manifest, buffers
    for read in reads:
        pieces = [piece for stretch in read.stretches for piece in stretch.pieces]
        runs = 1 + sum(a.stop != b.start for a, b in pairwise(pieces))
        allowed += 2 * BLOCK_BYTES * runs if read.bytes != sum(p.stop - p.start for p in pieces) else 0
    before = bytes_read()
    checkpoint.load(engine, info.location)
    read = bytes_read() - before
    foretold = checkpoint.dry_run(info.location, world, stage=stage)[rank]
    assert foretold <= read <= foretold + 64_000, "and the manifest, and what ranks say to each other"
    return read, needed, allowed, full_sums(engine)


@pytest.mark.parametrize(("saver", "loaders"), [(3, [(3, 3), (2, 3), (4, 1)]), (1, [(2, 0), (5, 2)])])
def test_the_system_counts_no_more_bytes_than_needed(
    saver: int, loaders: list[tuple[int, int]], tmp_path: Path
) -> None:
    """K5 (DeepSpeed 1111, 1525): every rank read everything."""
    want = run_ranks(saver, save_wide, tmp_path)[0]
    for world, stage in loaders:
        for read, needed, allowed, sums in run_ranks(world, load_wide, tmp_path, stage):
            assert sums == want
            assert needed <= read <= 1.01 * needed + allowed
            if world == saver:
                assert allowed < 100_000, "whole files, no edges"


# -- exactness ------------------------------------------------------------------------------------


def save_and_go_on(rank: int, world: int, root: Path) -> list[dict[str, bytes]]:
    found = []
    for precision in ("fp32", "fp16"):
        engine = make(2, precision)
        train(engine, range(2))
        checkpoint.save(engine, root / precision, extra={"at": 2}, generation=1)
        train(engine, range(2, 4))
        found.append(state_of(engine))
    return found


def load_and_go_on(rank: int, world: int, root: Path, stage: int) -> list[dict[str, bytes]]:
    found = []
    for precision in ("fp32", "fp16"):
        engine = make(stage, precision, model=build(seed=9), blank=stage == 3)
        loaded = checkpoint.load_newest(engine, root / precision)
        assert (loaded.step, loaded.extra, loaded.skipped) == (2, {"at": 2}, ())
        train(engine, range(2, 4))
        found.append(state_of(engine))
    return found


def test_groups_moments_counts_and_scale_go_on_to_the_bit_at_another_n(tmp_path: Path) -> None:
    """K3, K4, K7, K10: an empty group, groups with rates of their own, sizes of which few divide anything."""
    want = run_ranks(3, save_and_go_on, tmp_path)[0]
    for world, stage in ((2, 3), (4, 0)):
        for got in run_ranks(world, load_and_go_on, tmp_path, stage):
            assert got == want


def casts(rank: int, world: int, root: Path) -> None:
    for saved in ("bf16", "fp32"):
        engine = make(2, saved)
        engine.module.calls.fill_(9)
        train(engine, range(1))
        folder = checkpoint.save(engine, root / saved, extra={}, generation=1).location
        want = state_of(engine)
        for stage, precision in ((3, "fp32"), (1, "bf16"), (2, "fp16")):
            other = make(stage, precision, model=build(seed=9))
            if precision == saved:
                continue
            with pytest.raises(CheckpointError, match=f"saved in {saved}.*runs in {precision}.*cast=True"):
                checkpoint.load(other, folder)
            checkpoint.load(other, folder, cast=True)
            got = state_of(other)
            frozen = {name for name in got if name.startswith("blocks.1.")}
            assert frozen
            assert {n: v for n, v in got.items() if n not in frozen | {"counts"}} == {
                n: v for n, v in want.items() if n not in frozen | {"counts"}
            }
            dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
            for name in frozen:
                value = torch.frombuffer(bytearray(want[name]), dtype=torch.float32)
                assert got[name] == value.to(dtype).float().numpy().tobytes(), name
            assert (other.gate.state_dict() is None) == (precision != "fp16")
            train(other, range(1, 2))


def test_another_precision_is_taken_where_it_is_asked_for(tmp_path: Path) -> None:
    run_ranks(2, casts, tmp_path)


# -- damage ---------------------------------------------------------------------------------------


def save_three(rank: int, world: int, root: Path) -> list[dict[str, bytes]]:
    engine = make(2)
    found = []
    for step in range(3):
        train(engine, range(step, step + 1))
        checkpoint.save(engine, root, extra={"step": step + 1}, generation=1)
        found.append(state_of(engine))
    return found


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 8
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "header": lambda folder: flip(folder / manifest.shard_name(0), 100),
    "length": lambda folder: flip(folder / manifest.shard_name(1), 1),
    "padding": lambda folder: flip(folder / manifest.shard_name(2), 4000),
    "first": lambda folder: flip(folder / manifest.shard_name(0), 4096),
    "last": lambda folder: flip(folder / manifest.shard_name(2), -1),
    "buffers": lambda folder: flip(folder / manifest.BUFFERS, -1),
    "manifest": lambda folder: flip(folder / manifest.MANIFEST, 300),
    "cut": lambda folder: (folder / manifest.shard_name(1)).write_bytes(b""),
    "gone": lambda folder: (folder / manifest.shard_name(2)).unlink(),
    "no json": lambda folder: (folder / manifest.MANIFEST).write_bytes(b""),
    "partial": lambda folder: (folder / manifest.MANIFEST).unlink(),
    "copy": lambda folder: shutil.copytree(folder, folder.parent / "step-00000009.g0001"),
}


def load_damaged(rank: int, world: int, roots: dict[str, Path]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    engine = make(3)
    for what, root in roots.items():
        loaded = checkpoint.load_newest(engine, root)
        found[what] = (loaded, state_of(engine))
    folder = roots["last"] / manifest.folder_name(3, 1)
    with pytest.raises(DamagedError) as caught:
        checkpoint.load(engine, folder)
    found["error"] = caught.value
    if rank == 0:  # of the engine: it holds no state, and says so
        with pytest.raises(UsageError, match="holds no whole state"):
            engine.require_state()
    loaded = checkpoint.load_newest(engine, roots["last"], not_after=1)
    found["not after"] = (loaded.step, loaded.skipped)
    for root, match in ((folder, "has no checkpoint"), (roots["last"], "no checkpoint of step 0 or before")):
        with pytest.raises(CheckpointError, match=match):
            checkpoint.load_newest(engine, root, not_after=0 if root == roots["last"] else None)
    # Of another model is no damage: nothing is passed over.
    with pytest.raises(CheckpointError, match="another model") as caught_other:
        checkpoint.load_newest(make(3, model=OddModel(width=11)), roots["last"])
    assert not isinstance(caught_other.value, DamagedError)
    return found


def test_damage_anywhere_is_found_and_an_older_one_loaded(tmp_path: Path) -> None:
    """K8, K15: a flipped bit in any part of any file, partial folders, copies; all ranks load the same."""
    states = run_ranks(3, save_three, tmp_path / "whole")[0]
    roots = {"whole": tmp_path / "whole"}
    for what, damage in DAMAGE.items():
        roots[what] = tmp_path / what
        shutil.copytree(tmp_path / "whole", roots[what])
        damage(roots[what] / manifest.folder_name(3, 1))
    answers = run_ranks(2, load_damaged, roots)
    assert answers[0].keys() == answers[1].keys()
    for what, root in roots.items():
        (first, state), (second, _) = (answer[what] for answer in answers)
        assert first == second, what
        step = 3 if what in ("whole", "copy") else 2
        assert (first.step, first.extra) == (step, {"step": step}), what
        assert state == states[step - 1], what
        assert first.location == str(root / manifest.folder_name(step, 1))
        names = [name for name, _ in first.skipped]
        expected = {"whole": [], "partial": [], "copy": ["step-00000009.g0001"]}
        assert names == expected.get(what, [manifest.folder_name(3, 1)]), what
    reasons = {what: answers[0][what][0].skipped[0][1] for what in DAMAGE if what != "partial"}
    assert "rank-00000.safetensors, bytes 0 to 4096: the header is not what was written" in reasons["header"]
    assert "rank-00002.safetensors, bytes 4096 to " in reasons["last"]
    assert "buffers.safetensors, bytes 4096 to 4104" in reasons["buffers"]
    assert "has 0 bytes where the manifest says" in reasons["cut"]
    assert "has None bytes" in reasons["gone"]
    assert "a copy under another name" in reasons["copy"]
    assert "digest" in reasons["manifest"] or "manifest" in reasons["manifest"]
    assert all("failed on rank" in reason for reason in reasons.values())
    errors = [answer["error"] for answer in answers]
    assert str(errors[0]) == str(errors[1])
    assert errors[0].file.endswith("rank-00002.safetensors")
    assert [answer["not after"] for answer in answers] == [(1, ())] * 2


def fails_late(rank: int, world: int, root: Path) -> tuple[int, str]:
    """Rank 1's third read fails; the others hear of it long before they have read everything."""
    engine = make(3, model=wide(1), groups=())
    folder = checkpoint.save(engine, root, extra={}, generation=1).location
    # Rounds as short as a small model needs: a block at a time.
    loading._ROUND_BYTES = reading._STRIP_BYTES = BLOCK_BYTES
    calls = 0
    fill = reading.Reader._fill

    def failing(self: reading.Reader, *args: Any) -> None:
        nonlocal calls
        calls += 1
        if rank == 1 and calls == 5:
            raise RuntimeError("the disk burns")
        fill(self, *args)

    reading.Reader._fill = failing  # type: ignore[method-assign]
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(engine, folder)
    failed_after = calls
    listed, manifest.committed = manifest.committed, lambda *_: 1 / 0  # type: ignore[assignment, return-value]
    with pytest.raises(CheckpointError, match=r"looking for checkpoints in .* rank 0: ZeroDivisionError"):
        checkpoint.load_newest(engine, root)
    manifest.committed = listed
    reading.Reader._fill = fill  # type: ignore[method-assign]
    checkpoint.load(engine, folder)
    return failed_after, str(caught.value)


def test_an_error_on_one_rank_in_mid_reading_is_soon_one_on_all(tmp_path: Path) -> None:
    """K8 (Automodel 3254): the rest hung."""
    answers = run_ranks(2, fails_late, tmp_path)
    assert all("failed on rank 1: RuntimeError('the disk burns')" in message for _, message in answers)
    assert answers[0][0] <= 7, "of about 16 reads"


# -- another model --------------------------------------------------------------------------------


class Renamed(OddModel):
    def __init__(self) -> None:
        super().__init__()
        self.final = self.norm
        del self.norm
        self.register_buffer("mean", torch.zeros(3))


def refused(rank: int, world: int, root: Path) -> list[str]:
    engine = make(2)
    train(engine, range(1))
    folder = checkpoint.save(engine, root, extra={}, generation=1).location
    thawed, shaped = build(), OddModel(width=11)
    for parameter in thawed.blocks[1].parameters():
        parameter.requires_grad_(True)
    buffered = build()
    buffered.register_buffer("calls", torch.zeros((), dtype=torch.int32))
    engines = [
        make(2, model=Renamed()),
        make(2, model=shaped),
        make(2, model=thawed),
        make(2, model=buffered),
        make(2, optimizer=SGDConfig(lr=0.1), groups=()),
        make(2, optimizer=AdamConfig(lr=1e-2)),
    ]
    messages = []
    for other in engines:
        before = state_of(other)
        with pytest.raises(CheckpointError) as caught:
            checkpoint.load(other, folder)
        messages.append(str(caught.value))
        assert state_of(other) == before, "nothing was changed"
    return messages


def test_what_does_not_fit_is_told_by_name(tmp_path: Path) -> None:
    """K7 (KempnerForge 115): whatever is missing or unknown is an error that names it and what to do."""
    first, second = run_ranks(2, refused, tmp_path)
    assert first == second
    renamed, shaped, thawed, buffered, optimizer, alike = first
    assert "missing final.bias, final.weight; unknown norm.bias, norm.weight" in renamed
    assert "build the engine from the model that was saved" in renamed
    assert "of another shape blocks.0.down.bias: [13] saved, [11] here" in shaped
    assert " more" in shaped
    assert "frozen there and trained here blocks.1.down.bias" in thawed
    assert "calls: [] of int64 saved, [] of int32 here" in buffered
    assert "holds master, momentum, variance of each parameter, and SGDConfig steps with master" in optimizer
    assert "was saved with adamw, and the engine steps with adam" in alike, (
        "although it keeps the same states"
    )


def told_of_the_optimizer(rank: int, world: int, root: Path) -> Any:
    schedule = ScheduleConfig(kind="cosine", warmup_steps=2, total_steps=9)
    engine = make(1, schedule=schedule, clip_norm=0.5)
    train(engine, range(1))
    saved = checkpoint.save(engine, root, extra={}, generation=1)
    return manifest.read(saved.location).optimizer


def test_the_manifest_tells_how_parameters_are_stepped(tmp_path: Path) -> None:
    found = run_ranks(2, told_of_the_optimizer, tmp_path)[0]
    assert (found["kind"], found["lr"], found["clip_norm"]) == ("adamw", 1e-2, 0.5)
    assert (found["schedule"]["kind"], found["schedule"]["warmup_steps"]) == ("cosine", 2)
    assert [group["name"] for group in found["groups"]] == [group.name for group in GROUPS]
