"""A checkpoint written at one N and stage, read at another: the same bits, and errors on every rank."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.odd_model import batch, build
from tests.distributed.ranks import RankFailedError, run_ranks
from zero_core import AdamWConfig, ZeroConfig, ZeroEngine, checkpoint
from zero_core.checkpoint import manifest
from zero_core.errors import CheckpointError

pytestmark = pytest.mark.distributed


def make(stage: int, precision: str) -> ZeroEngine:
    config = ZeroConfig(
        stage=stage,
        precision=precision,
        micro_batches=5,
        optimizer=AdamWConfig(lr=1e-2),
        tile=64,
        staging_bytes=4096,
    )
    return ZeroEngine(build(), config)


def states(engine: ZeroEngine) -> dict[str, Any]:
    """Everything that a step depends on, gathered whole, as bytes."""
    with engine.full_parameters():
        found = {n: p.detach().float().numpy().tobytes() for n, p in engine.module.named_parameters()}
    for state in engine.optimizer.states:
        for kind in ("master", "momentum", "variance"):
            flat = torch.zeros(state.unit.padded, dtype=torch.float32)
            flat[state.start : state.stop] = getattr(state, kind)
            engine.collectives.gather_from_owners(
                flat, state.unit.chunk, state.unit.numel, kind="test", tag=0
            )
            found[f"{kind}/{state.unit.index}"] = flat[: state.unit.numel].numpy().tobytes()
    found["calls"] = int(engine.module.calls)
    found["steps"] = engine.steps_done
    return found


def run_and_save(rank: int, world: int, stage: int, precision: str, root: Path) -> Any:
    engine = make(stage, precision)
    engine.module.calls.fill_(41)
    for step in range(3):
        for index in engine.micro_batches:
            engine.backward(engine(*batch(step, index)))
        engine.step()
    saved = checkpoint.save(engine, root, extra={"step": 3, "note": "x"}, generation=2)
    assert saved.step == 3
    again = checkpoint.save(engine, root, extra={}, generation=2)
    assert again.path == saved.path
    return states(engine)


def load_and_compare(rank: int, world: int, stage: int, precision: str, root: Path) -> Any:
    engine = make(stage, precision)
    info = manifest.latest(root)
    assert info is not None
    assert checkpoint.load(engine, info.path) == {"step": 3, "note": "x"}
    return states(engine)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("saver", "loaders"), [((3, 2), [(1, 0), (4, 3), (2, 1)]), ((2, 3), [(5, 2), (3, 3)]), ((4, 0), [(2, 3)])]
)
def test_any_n_and_stage_to_any_other(
    saver: tuple[int, int], loaders: list[tuple[int, int]], precision: str, tmp_path: Path
) -> None:
    """L3 (DeepSpeed 2898, 3810): saved at one number of ranks, loaded at any other."""
    want = run_ranks(saver[0], run_and_save, saver[1], precision, tmp_path)[0]
    assert [info.step for info in manifest.scan(tmp_path)] == [3]
    for world, stage in loaders:
        for got in run_ranks(world, load_and_compare, stage, precision, tmp_path):
            assert got == want


def load_damaged(rank: int, world: int, root: Path) -> str:
    engine = make(2, "fp32")
    info = manifest.latest(root)
    if info is None:
        return "none"
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(engine, info.path)
    return str(caught.value)


def test_an_error_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    run_ranks(2, run_and_save, 2, "fp32", tmp_path)
    folder = manifest.scan(tmp_path)[0].path
    shard = folder / manifest.shard_name(1)
    # The same size, but the header is gone: only ranks that read this file can notice.
    shard.write_bytes(b"\0" * shard.stat().st_size)
    messages = run_ranks(2, load_damaged, tmp_path)
    assert all("failed on rank" in message for message in messages)


def test_an_uncommitted_or_truncated_folder_is_no_checkpoint(tmp_path: Path) -> None:
    run_ranks(1, run_and_save, 2, "fp32", tmp_path)
    folder = manifest.scan(tmp_path)[0].path
    shard = folder / manifest.shard_name(0)
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    assert manifest.scan(tmp_path) == []
    shard.write_bytes(whole)
    (folder / manifest.MANIFEST).rename(folder / "gone")
    assert manifest.latest(tmp_path) is None


def load_other_precision(rank: int, world: int, root: Path) -> None:
    info = manifest.latest(root)
    assert info is not None
    checkpoint.load(make(2, "bf16"), info.path)


def test_another_precision_is_refused(tmp_path: Path) -> None:
    run_ranks(1, run_and_save, 2, "fp32", tmp_path)
    with pytest.raises(RankFailedError, match="saved in fp32, the engine runs in bf16"):
        run_ranks(1, load_other_precision, tmp_path)
