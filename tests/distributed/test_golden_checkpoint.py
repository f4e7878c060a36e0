"""Checkpoints that earlier releases have written, kept in the repository, are read by this one.

tests/data/checkpoint-2 was written by `write_golden` with format 2. It is never written again: a new format
gets a folder, and a number, of its own.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.odd_model import OddModel, batch
from tests.distributed.ranks import run_ranks
from tests.unit.zero_core import written
from zero_core import AdamWConfig, ZeroConfig, ZeroEngine
from zero_core.checkpoint import load, manifest, save
from zero_core.checkpoint.container import buffer_contents, digest, digests_in, rank_contents
from zero_core.snapshot import held_states, persistent_buffers

pytestmark = pytest.mark.distributed

GOLDEN = Path(__file__).parents[1] / "data" / "checkpoint-2"
FOLDER = GOLDEN / "step-00000003.g0002"


def make(stage: int) -> ZeroEngine:
    torch.manual_seed(5)
    config = ZeroConfig(
        stage=stage,
        precision="fp16",
        micro_batches=4,
        optimizer=AdamWConfig(lr=1e-2),
        tile=64,
        staging_bytes=4096,
    )
    return ZeroEngine(OddModel(vocabulary=29, width=5, layers=2), config)


def digests_of(engine: ZeroEngine) -> dict[str, str]:
    """Of every state by kind and unit, and of every buffer, of an engine of one rank."""
    found = {
        f"{one.kind}/{one.unit}": one.tensor
        for one in held_states(engine.optimizer.states, engine.units, whole_replicas=True)
    } | persistent_buffers(engine.module)
    return {
        name: digest(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)
        for name, tensor in sorted(found.items())
    }


def write_golden(rank: int, world: int, root: Path) -> None:
    """How it was made: on 2 ranks. `digests.json` is what `read_golden` then gave."""
    engine = make(3)
    for step in range(3):
        for index in engine.micro_batches:
            engine.backward(engine(*batch(step, index)))
        engine.step()
    save(engine, root, extra={"note": "golden", "numbers": [1, 2.5, None]}, generation=2, seed=5)


def read_golden(rank: int, world: int, folder: Path) -> dict[str, Any]:
    engine = make(2)
    extra = load(engine, folder)
    return {"extra": extra, "steps": engine.steps_done, "digests": digests_of(engine)}


def test_a_checkpoint_of_format_2_is_read_to_the_bit() -> None:
    (found,) = run_ranks(1, read_golden, FOLDER)
    assert found == json.loads((GOLDEN / "digests.json").read_text())


def test_its_files_are_what_its_manifest_leads_to() -> None:
    found = manifest.read(FOLDER)
    assert (found.step, found.generation, found.world_size, found.stage) == (3, 2, 2, 3)
    assert (found.precision, found.kinds) == ("fp16", ("master", "momentum", "variance"))
    assert found.aliases == {"head.weight": "embed.weight"}
    assert (found.seed, found.buffers) == (5, (("calls", "I64", ()),))
    assert found.loss_scale is not None
    assert found.block_bytes == 1 << 18, "of the first releases; less is written since"
    of_buffers = buffer_contents(found.buffers, found.block_bytes)
    contents = [rank_contents(found, 0), rank_contents(found, 1), of_buffers]
    names = manifest.expected_files(2)
    for name, (size, told), one in zip(names, found.files, contents, strict=True):
        data = (FOLDER / name).read_bytes()
        assert len(data) == size == one.file_bytes
        front, tensors = data[: one.header_bytes], data[one.header_bytes :]
        assert digest(front) == told
        assert digests_in(front, one) == written.digests_of(tensors, found.block_bytes)
