"""Predicted bytes against the paper's formulas and table 1 (arXiv 1910.02054)."""

import pytest

from tests.unit.zero_core.paper import GB, PAPER, rounded
from zero_core.budget import predict, wire_elements
from zero_core.config import AdamConfig, AdamWConfig, OptimizerConfig, SGDConfig, ZeroConfig
from zero_core.layout import ParameterSpec, build_layout

TABLE_1 = PAPER["table1_GB_per_device"]


def layout_of(numel: int, world_size: int):
    return build_layout([ParameterSpec("w", (numel,))], lambda _: "", tile=256, world_size=world_size)


@pytest.mark.parametrize("column", range(len(TABLE_1["dp"])))
def test_model_states_of_table_1(column: int) -> None:
    layout = layout_of(7_500_000_000, TABLE_1["dp"][column])
    for stage in (1, 2, 3):
        config = ZeroConfig(stage=stage, precision="bf16")
        got = predict(layout, config, rank=0).model_states / GB
        assert rounded(got, 2 if got < 2 else 1) == TABLE_1["7.5B"][f"stage{stage}"][column]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("world", [1, 2, 8])
def test_formulas_in_mixed_precision(world: int, precision: str) -> None:
    psi = 256 * 64
    layout = layout_of(psi, world)
    want = [16 * psi, 4 * psi + 12 * psi / world, 2 * psi + 14 * psi / world, 16 * psi / world]
    for stage in (0, 1, 2, 3):
        config = ZeroConfig(stage=stage, precision=precision)
        assert predict(layout, config, rank=world - 1).model_states == want[stage]


@pytest.mark.parametrize(
    ("optimizer", "fp32", "mixed"),
    [
        (AdamWConfig(), 8, 12),
        (AdamConfig(), 8, 12),
        (SGDConfig(momentum=0.9), 4, 8),
        (SGDConfig(), 0, 4),
    ],
)
def test_optimizer_states_of_each_optimizer(optimizer: OptimizerConfig, fp32: int, mixed: int) -> None:
    psi = 256 * 64
    for precision, width in (("fp32", fp32), ("bf16", mixed), ("fp16", mixed)):
        config = ZeroConfig(stage=1, precision=precision, optimizer=optimizer)
        assert predict(layout_of(psi, 2), config, rank=0).optimizer_states == width * psi // 2


@pytest.mark.parametrize("world", [2, 4])
def test_volume_is_two_psi_then_three(world: int) -> None:
    psi = 256 * 64
    layout = layout_of(psi, world)
    for stage, multiple in ((0, 2), (1, 2), (2, 2), (3, 3)):
        volume = sum(wire_elements(layout, ZeroConfig(stage=stage)).values())
        assert volume == pytest.approx(multiple * psi * (world - 1) / world)
