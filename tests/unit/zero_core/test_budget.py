"""Predicted bytes against the paper's formulas and table 1 (arXiv 1910.02054)."""

import pytest

from zero_core.budget import predict, wire_elements
from zero_core.config import ZeroConfig
from zero_core.layout import ParameterSpec, build_layout

TABLE_1_GB = {  # 7.5B parameters, data-parallel degree -> stages 1, 2, 3
    1: (120, 120, 120),
    4: (52.5, 41.3, 30),
    16: (35.6, 21.6, 7.5),
    64: (31.4, 16.6, 1.88),
    256: (30.4, 15.4, 0.47),
    1024: (30.1, 15.1, 0.12),
}


def layout_of(numel: int, world_size: int):
    return build_layout([ParameterSpec("w", (numel,))], lambda _: "", tile=256, world_size=world_size)


@pytest.mark.parametrize(("world", "row"), TABLE_1_GB.items())
def test_model_states_of_table_1(world: int, row: tuple[float, ...]) -> None:
    layout = layout_of(7_500_000_000, world)
    for stage, printed in enumerate(row, start=1):
        config = ZeroConfig(stage=stage, precision="bf16")
        got = predict(layout, config, rank=0).model_states / 1e9
        digits = 2 if printed < 2 else 1
        assert round(got + 1e-9, digits) == pytest.approx(printed, abs=0.5 * 10**-digits + 1e-9)


@pytest.mark.parametrize("world", [1, 2, 8])
def test_formulas_in_mixed_precision(world: int) -> None:
    psi = 256 * 64
    layout = layout_of(psi, world)
    want = [16 * psi, 4 * psi + 12 * psi / world, 2 * psi + 14 * psi / world, 16 * psi / world]
    for stage in (0, 1, 2, 3):
        config = ZeroConfig(stage=stage, precision="bf16")
        assert predict(layout, config, rank=world - 1).model_states == want[stage]


@pytest.mark.parametrize("world", [2, 4])
def test_volume_is_two_psi_then_three(world: int) -> None:
    psi = 256 * 64
    layout = layout_of(psi, world)
    for stage, multiple in ((0, 2), (1, 2), (2, 2), (3, 3)):
        volume = sum(wire_elements(layout, ZeroConfig(stage=stage)).values())
        assert volume == pytest.approx(multiple * psi * (world - 1) / world)
