"""Optimizers, parameter groups and schedules against torch.optim in one process, at every stage."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.lives import digest
from tests.distributed.odd_model import OddModel, batch, build
from tests.distributed.ranks import RankFailedError, run_ranks
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
from zero_core.checkpoint import manifest
from zero_core.groups import members
from zero_core.schedule import factor

pytestmark = pytest.mark.distributed

STEPS, MICRO_BATCHES, CLIP = 6, 4, 0.5
ADAM = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
OPTIMIZERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "adamw": (AdamWConfig, torch.optim.AdamW, ADAM),
    "adam": (AdamConfig, torch.optim.Adam, ADAM),
    "sgd": (SGDConfig, torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.05}),
    "momentum": (
        SGDConfig,
        torch.optim.SGD,
        {"lr": 0.05, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.05},
    ),
    "nesterov": (SGDConfig, torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
}
SCHEDULE = ScheduleConfig(kind="cosine", warmup_steps=3, total_steps=STEPS)


def groups_for(kind: str) -> tuple[ParameterGroup, ...]:
    """Own rates, decay and betas or momentum; one without a match; one whose match is taken."""
    special: dict[str, Any] = {"betas": (0.8, 0.9)} if kind in ("adamw", "adam") else {}
    if kind in ("momentum", "nesterov"):
        special = {"momentum": 0.5}
    return (
        ParameterGroup(name="gains", patterns=("*.gain", "norm.*"), lr=1e-2, weight_decay=0.2, **special),
        ParameterGroup(name="nothing", patterns=("no.such.*",), lr=1.0),
        ParameterGroup(name="up", patterns=("blocks.*.up.*", "norm.*"), lr_factor=0.5),
        ParameterGroup(name="frozen", patterns=("blocks.1.*",), lr=9.0),
    )


def config_of(kind: str, stage: int, grouped: bool, **changes: Any) -> ZeroConfig:
    make, _, settings = OPTIMIZERS[kind]
    fields: dict[str, Any] = {
        "stage": stage,
        "micro_batches": MICRO_BATCHES,
        "clip_norm": CLIP,
        "optimizer": make(**settings),
        "groups": groups_for(kind) if grouped else (),
        "schedule": SCHEDULE if grouped else ScheduleConfig(),
        "tile": 64,
        "staging_bytes": 4096,
    }
    return ZeroConfig(**(fields | changes))


def plain(kind: str, grouped: bool) -> dict[str, Any]:
    """One process with torch.optim: its groups made by hand, not by the engine's matching."""
    _, make, settings = OPTIMIZERS[kind]
    model = build()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    taken: set[str] = set()
    torch_groups: list[dict[str, Any]] = []

    def take(names: list[str], **own: Any) -> None:
        assert names or own.get("empty")
        taken.update(names)
        decay = own.pop("weight_decay", None)
        for decays in (True, False):
            members = [trained[n] for n in names if (trained[n].dim() >= 2) == decays]
            used = decay if decay is not None else settings.get("weight_decay", 0.0) if decays else 0.0
            if members:
                torch_groups.append({"params": members, "weight_decay": used, **own})

    if grouped:
        special: dict[str, Any] = {"betas": (0.8, 0.9)} if "betas" in settings else {}
        if "momentum" in settings:
            special = {"momentum": 0.5}
        gains = [n for n in trained if n.endswith(".gain")] + ["norm.weight", "norm.bias"]
        take(gains, lr=1e-2, weight_decay=0.2, **special)
        take([n for n in trained if ".up." in n], lr=settings["lr"] * 0.5)
    take([n for n in trained if n not in taken])
    optimizer = make(torch_groups, **settings)
    peaks = [group["lr"] for group in optimizer.param_groups]
    losses, norms = [], []
    for step in range(STEPS):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * (factor(SCHEDULE, step) if grouped else 1.0)
        total = 0.0
        for index in range(MICRO_BATCHES):
            loss = model(*batch(step, index)) / MICRO_BATCHES
            loss.backward()
            total += loss.item()
        norms.append(torch.nn.utils.clip_grad_norm_(trained.values(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    parameters = {n: p.detach().float().numpy().copy() for n, p in model.named_parameters()}
    return {"losses": losses, "norms": norms, "parameters": parameters}


def trained_by(engine: ZeroEngine, steps: range) -> dict[str, Any]:
    reports = []
    for step in steps:
        for index in engine.micro_batches:
            engine.backward(engine(*batch(step, index)))
        reports.append(engine.step())
    with engine.full_parameters():
        parameters = {n: p.detach().float().numpy().copy() for n, p in engine.module.named_parameters()}
    memory, budget = engine.memory(), engine.budget
    return {
        "losses": [r.loss for r in reports],
        "norms": [r.grad_norm for r in reports],
        "lr": [r.lr for r in reports],
        "parameters": parameters,
        "digest": digest(engine),
        "bytes": (memory.optimizer_states, budget.optimizer_states),
        "states": engine.optimizer.states[0].kinds,
    }


CELLS = [*((kind, True) for kind in OPTIMIZERS), ("adam", False), ("momentum", False)]


def every_cell(rank: int, world: int) -> dict[tuple[int, str, bool], dict[str, Any]]:
    return {
        (stage, kind, grouped): trained_by(ZeroEngine(build(), config_of(kind, stage, grouped)), range(STEPS))
        for stage in (0, 1, 2, 3)
        for kind, grouped in CELLS
    }


def every_reference(rank: int, world: int) -> dict[tuple[str, bool], dict[str, Any]]:
    return {(kind, grouped): plain(kind, grouped) for kind, grouped in CELLS}


@pytest.fixture(scope="module")
def references() -> Any:
    return run_ranks(1, every_reference)[0]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_equals_torch_optim_in_one_process(
    world: int, references: dict[tuple[str, bool], dict[str, Any]]
) -> None:
    """Every stage, with tied, frozen, empty and 0-d parameters.

    The norms are E5 and E7 (PyTorch issue 88955, DeepSpeed issue 8475): every element counts once, however
    shards and replicas lie, and ranks that own different parameters add up squares.
    """
    for results in run_ranks(world, every_cell):
        for (stage, kind, grouped), got in results.items():
            want, name = references[kind, grouped], f"stage {stage}, {kind}, groups {grouped}"
            torch.testing.assert_close(got["losses"], want["losses"], rtol=1e-5, atol=0, msg=name)
            torch.testing.assert_close(got["norms"], want["norms"], rtol=2e-5, atol=0, msg=name)
            for parameter, array in want["parameters"].items():
                torch.testing.assert_close(
                    torch.from_numpy(got["parameters"][parameter]),
                    torch.from_numpy(array),
                    rtol=1e-5,
                    atol=2e-6,
                    msg=f"{name}: {parameter}",
                )
            moments = {"sgd": (), "momentum": ("momentum",), "nesterov": ("momentum",)}
            assert got["states"] == ("master", *moments.get(kind, ("momentum", "variance")))
            assert got["bytes"][0] == got["bytes"][1]
            peak = OPTIMIZERS[kind][2]["lr"]
            assert got["lr"][2] == (
                {"default": peak, "gains": 1e-2, "nothing": 1.0, "up": peak * 0.5, "frozen": 9.0}
                if grouped
                else {"default": peak}
            )


def reproducible(rank: int, world: int, stage: int) -> list[str]:
    return [
        trained_by(
            ZeroEngine(build(), config_of(kind, stage, True, precision=precision, reproducible=True)),
            range(6),
        )["digest"]
        for kind, precision in (("adam", "fp32"), ("adamw", "fp16"), ("nesterov", "bf16"), ("sgd", "fp32"))
    ]


def test_masters_and_moments_are_the_same_bits_whoever_owns_them() -> None:
    """Groups cut the flat shard inside its tiles: the cuts must not show for any N or stage."""
    found = {
        tuple(answer)
        for world, stage in ((1, 0), (2, 3), (3, 1), (4, 2))
        for answer in run_ranks(world, reproducible, stage)
    }
    assert len(found) == 1


def saved_at(rank: int, world: int, root: Path, kind: str, after: int) -> str:
    """Save after some steps, go on to the end."""
    engine = ZeroEngine(build(), config_of(kind, 2, True))
    trained_by(engine, range(after))
    checkpoint.save(engine, root, extra={}, generation=1)
    return str(trained_by(engine, range(after, 5))["digest"])


def resumed(rank: int, world: int, root: Path, kind: str, stage: int) -> str:
    engine = ZeroEngine(build(), config_of(kind, stage, True))
    info = manifest.latest(root)
    assert info is not None
    checkpoint.load(engine, info.path)
    assert (engine.steps_done, engine.optimizer.steps_done) == (info.step, info.step)
    return str(trained_by(engine, range(info.step, 5))["digest"])


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("kind", ["momentum", "sgd", "adam"])
def test_a_resume_goes_on_to_the_bit(kind: str, after: int, tmp_path: Path) -> None:
    """E24 (ColossalAI issue 6433): state that exists before the first step is sharded like any other.

    Saved before the first step too: SGD's first gradient starts the momentum undampened, the second does not,
    and neither a buffer of zeros nor a resume may be taken for the other.
    """
    want = run_ranks(2, saved_at, tmp_path, kind, after)
    for stage in (0, 3):
        assert run_ranks(2, resumed, tmp_path, kind, stage) == want


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    run_ranks(1, saved_at, tmp_path, "momentum", 2)
    message = (
        r"holds master, momentum of each parameter, and AdamWConfig steps with master, momentum, variance"
    )
    with pytest.raises(RankFailedError, match=message):
        run_ranks(2, resumed, tmp_path, "adamw", 1)


def unlike(rank: int, world: int) -> dict[str, list[str]]:
    """What each group has, and an explicit learning rate over the configured one."""
    engine = ZeroEngine(build(), config_of("adamw", 1, True))
    for index in engine.micro_batches:
        engine.backward(engine(*batch(0, index)))
    third = factor(SCHEDULE, 0)
    assert engine.learning_rates["up"] == pytest.approx(1.5e-3 * third)
    report = engine.step(lr=0.4)
    assert report.lr == pytest.approx(
        {n: v * third for n, v in zip(report.lr, (0.4, 1e-2, 1.0, 0.2, 9.0), strict=True)}
    )
    return dict(members(engine.config, engine.layout))


def test_groups_have_what_their_patterns_say() -> None:
    (found,) = run_ranks(1, unlike)
    blocks = ("blocks.0", "blocks.2")
    assert sorted(found["gains"]) == sorted([*(f"{b}.gain" for b in blocks), "norm.weight", "norm.bias"])
    assert sorted(found["up"]) == sorted(f"{b}.up.{end}" for b in blocks for end in ("weight", "bias"))
    assert found["nothing"] == found["frozen"] == []
    trained = {n for n, p in OddModel().named_parameters() if p.requires_grad}
    assert sorted(name for names in found.values() for name in names) == sorted(trained)
