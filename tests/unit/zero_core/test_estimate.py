"""Every figure of the ZeRO paper that can be computed, to the rounding printed; estimate and budget agree."""

from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.zero_core.paper import GB, PAPER, digits_of, formula, rounded, truncated
from zero_core.budget import predict, tile_rounding
from zero_core.budget import wire_elements as wire_of_layout
from zero_core.config import ZeroConfig
from zero_core.errors import ConfigError
from zero_core.estimate import (
    STAGES,
    Checkpointing,
    Training,
    Transformer,
    activations,
    largest_model,
    model_states,
    moments_of,
    transformer_parameters,
    wire_elements,
)
from zero_core.layout import Layout, ParameterSpec, build_layout

TABLE_1, TABLE_2 = PAPER["table1_GB_per_device"], PAPER["table2_largest_model_at_32GB_dp64"]
RESIDUAL = PAPER["residual_states"]
SIZES = {"7.5B": 7_500_000_000, "128B": 128_000_000_000, "1T": 1_000_000_000_000}
DEVICE_BYTES = 32 * GB

CELLS = [
    pytest.param(size, stage, dp, TABLE_1[size][f"stage{stage}"][column], id=f"{size}-stage{stage}-dp{dp}")
    for size in SIZES
    for stage in (1, 2, 3)
    for column, dp in enumerate(TABLE_1["dp"])
]


@pytest.mark.parametrize(("size", "stage", "dp", "printed"), CELLS)
def test_table_1(size: str, stage: int, dp: int, printed: Any) -> None:
    got = Fraction(model_states(SIZES[size], Training(dp=dp), stage).total, GB)
    if size == "7.5B":  # rounded as printed: to 0.1, below 2 GB to 0.01
        assert rounded(got, 2 if got < 2 else 1) == printed
    else:  # truncated to what is printed
        assert truncated(got, digits_of(printed)) == printed
    if dp == 1:
        assert model_states(SIZES[size], Training(dp=dp), 0).total == got * GB, "the unpartitioned baseline"


@pytest.mark.parametrize("row", ["baseline", "stage1", "stage2", "stage3"])
def test_table_2(row: str) -> None:
    stage = 0 if row == "baseline" else int(row[-1])
    first = TABLE_2[row][0]
    for mp, gpus, printed in zip(TABLE_2["mp"], TABLE_2["gpus"], TABLE_2[row], strict=True):
        training = Training(dp=64, mp=mp)
        assert training.dp * training.mp == gpus
        one = largest_model(DEVICE_BYTES, Training(dp=64), stage)
        assert rounded(Fraction(one, GB), digits_of(first)) == first
        assert first * mp == printed, "a row is its rounded first cell times MP"
        found = largest_model(DEVICE_BYTES, training, stage)
        assert found == one * mp
        assert model_states(found, training, stage).total <= DEVICE_BYTES
        assert model_states(found + 1, training, stage).total > DEVICE_BYTES


def test_what_was_trained_lies_below_what_fits() -> None:
    """Measured figures are no arithmetic, but none may exceed what the planner says could be."""
    for row, stage in (("measured_baseline", 0), ("measured_stage1", 1)):
        for mp, measured in zip(TABLE_2["mp"], TABLE_2[row], strict=True):
            assert measured * GB < largest_model(DEVICE_BYTES, Training(dp=64, mp=mp), stage)
    stages = {"C1": 1, "C2": 1, "C4": 2, "C5": 2}
    for name, billions in PAPER["ablations"]["largest_model_B_at_mp16"].items():
        assert billions * GB < largest_model(DEVICE_BYTES, Training(dp=400 // 16, mp=16), stages[name])
    # The headlines: 170B on 400 GPUs, 13B on 128 without model parallelism, at most 1.4B with plain DDP.
    assert largest_model(DEVICE_BYTES, Training(dp=25, mp=16), 2) > 170 * GB
    assert (
        largest_model(DEVICE_BYTES, Training(dp=128), 2)
        > 13 * GB
        > largest_model(DEVICE_BYTES, Training(dp=128), 1)
    )
    assert largest_model(DEVICE_BYTES, Training(dp=128), 0) > 1.4 * GB


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("world", [1, 2, 4, 16, 1024])
def test_bytes_per_parameter_in_mixed_precision(precision: str, world: int) -> None:
    told = PAPER["model_state_bytes_per_parameter"]
    psi = 1024 * 12_345
    for stage in STAGES:
        states = model_states(psi, Training(dp=world, precision=precision), stage)
        assert states.total == formula(told[f"stage{stage}"], Fraction(psi), world)
    baseline = model_states(psi, Training(dp=world, precision=precision), 0)
    assert (baseline.parameters, baseline.gradients) == (2 * psi, 2 * psi)
    assert baseline.optimizer_states == told["K"] * psi


@pytest.mark.parametrize(
    ("precision", "optimizer", "per_parameter"),
    [
        ("bf16", "adam", 16),
        ("fp16", "sgd", 12),
        ("fp32", "adamw", 16),
        ("fp32", "sgd", 12),
    ],
)
def test_other_precisions_and_optimizers(precision: str, optimizer: str, per_parameter: int) -> None:
    training = Training(dp=4, precision=precision, moments=moments_of(optimizer))
    assert model_states(4_000, training, 0).total == 4_000 * per_parameter
    assert model_states(4_000, training, 3).total == 1_000 * per_parameter


@pytest.mark.parametrize("world", [1, 2, 3, 64, 1024])
def test_volume(world: int) -> None:
    psi = 7_500_000_000
    for stage in STAGES:
        limit = formula(PAPER["communication_volume"][f"stage{stage}"], Fraction(psi), world)
        volume = wire_elements(psi, Training(dp=world), stage)
        assert sum(volume.values()) == limit * (world - 1) / world
        assert len(set(volume.values())) == 1
        kinds = {"reduce", "gather"} | ({"gather_backward"} if stage == 3 else set())
        assert volume.keys() == kinds


def test_activations_of_1_5_billion_parameters() -> None:
    """60 GB; about 8 GB with one checkpoint for isqrt(48) = 6 blocks: the paper speaks of the square root.

    1.5B are the 48 blocks of width 1600 of GPT-2.
    """
    told = RESIDUAL["example_1.5B"]
    assert rounded(Fraction(transformer_parameters(48, 1600), GB), 1) == Decimal("1.5")
    model = Transformer(layers=48, hidden=1600, batch=told["batch"], sequence=told["seq"])
    whole = activations(model, Training(dp=1))
    elements = eval(
        RESIDUAL["activation_elements_transformer"],
        {"__builtins__": {}},
        {"hidden": 1600, "batch": told["batch"], "seq": told["seq"], "layers": 48},
    )
    assert whole.device_bytes == 2 * elements
    assert rounded(Fraction(whole.device_bytes, GB), 0) == told["activations_GB"]
    assert whole.recompute == 0
    thinned = activations(model, Training(dp=1), Checkpointing(every=6))
    assert rounded(Fraction(thinned.device_bytes, GB), 0) == told["checkpointed_GB"]
    assert rounded(thinned.recompute, 2) == told["recompute"]
    # Every block's input, as the planner has it unless told otherwise, takes less: 5.0, and one block's 1.3.
    every_block = activations(model, Training(dp=1), Checkpointing())
    assert (every_block.kept_bytes, every_block.recomputed_bytes) == (5_033_164_800, 1_258_291_200)
    assert every_block.device_bytes < thinned.device_bytes


def test_partitioned_activations_of_100_billion_parameters() -> None:
    model = Transformer(layers=125, hidden=8192, batch=32, sequence=1024)
    assert rounded(Fraction(transformer_parameters(125, 8192), GB), 0) == 101  # "100B"
    assert rounded(Fraction(transformer_parameters(75, 8192), GB), 0) == 60  # "60B" of the superlinear run
    training = Training(dp=1, mp=16)
    plain = activations(model, training, Checkpointing())
    assert rounded(Fraction(plain.kept_bytes, 2 * GB), 2) == Decimal("33.55")
    assert rounded(Fraction(plain.kept_bytes, GB), 0) == 67
    partitioned = activations(model, training, Checkpointing(partitioned=True))
    assert rounded(Fraction(partitioned.kept_bytes, GB), 1) == Decimal("4.2")
    assert partitioned.recomputed_bytes == plain.recomputed_bytes
    # One all-gather of batch * seq * hidden a block, under 10% of tensor slicing's own 12 of them.
    share = Fraction(15, 16)
    assert partitioned.gathered_elements == share * model.stream * 125
    assert partitioned.slicing_elements == share * 12 * model.stream * 125
    assert partitioned.gathered_elements < partitioned.slicing_elements / 10
    assert plain.gathered_elements == 0
    on_host = activations(model, training, Checkpointing(partitioned=True, on_host=True))
    assert (on_host.kept_bytes, on_host.host_bytes) == (0, partitioned.kept_bytes)
    assert on_host.copied_bytes == 2 * on_host.host_bytes


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Trainable parameters of any sizes, 0-d and empty ones among them, in a few units."""
    shapes = draw(st.lists(st.lists(st.integers(0, 40), max_size=3), min_size=1, max_size=8))
    parameters = [ParameterSpec("scale", ())] + [
        ParameterSpec(f"{index % 3}.{index}", tuple(shape)) for index, shape in enumerate(shapes)
    ]
    return build_layout(
        parameters,
        lambda name: name.partition(".")[0],
        tile=64 * draw(st.integers(1, 4)),
        world_size=draw(st.integers(1, 64)),
    )


@given(
    layouts(), st.sampled_from(STAGES), st.sampled_from(["fp32", "bf16"]), st.integers(1, 130), st.booleans()
)
def test_the_estimate_is_the_budget_but_for_named_rounding(
    layout: Layout, stage: Any, precision: Any, micro_batches: int, reproducible: bool
) -> None:
    """E22 (DeepSpeed 5102): to the byte, parts, rounding to tiles and volume; padding lies beside."""
    config = ZeroConfig(
        stage=stage, precision=precision, micro_batches=micro_batches, reproducible=reproducible
    )
    training = Training(
        dp=layout.world_size, precision=precision, micro_batches=micro_batches, reproducible=reproducible
    )
    psi, largest = layout.numel(), predict(layout, config, 0)
    states = model_states(psi, training, stage)
    rounding = tile_rounding(layout, config, 0)
    assert largest.model_states == states.total + rounding
    assert rounding >= 0, "rank 0 owns at least an even share"
    if stage == 0 and not reproducible and micro_batches <= layout.world_size:
        assert rounding == 0, "nothing is partitioned"
    by_rank = [predict(layout, config, rank).model_states for rank in range(layout.world_size)]
    assert max(by_rank) == largest.model_states
    wire = wire_elements(psi, training, stage)
    exact = wire_of_layout(layout, config)
    # Only in a round that some ranks have no share in does it matter who owns a tile more or less.
    uneven = sum(layout.owned(i, 0)[1] for i in range(len(layout.units)))
    uneven = uneven if micro_batches % training.dp else 0
    assert exact == {kind: pytest.approx(float(elements), abs=uneven) for kind, elements in wire.items()}


def test_where_tiles_fit_evenly_there_is_no_rounding() -> None:
    layout = build_layout([ParameterSpec("w", (7_500_000_000,))], lambda _: "", tile=64, world_size=2)
    for stage in STAGES:
        config = ZeroConfig(stage=stage, precision="bf16", tile=64)  # type: ignore[arg-type]
        states, budget = model_states(layout.numel(), Training(dp=2), stage), predict(layout, config, 1)
        assert tile_rounding(layout, config, 1) == 0
        assert (budget.parameters, budget.gradients) == (states.parameters, states.gradients)
        assert budget.optimizer_states == states.optimizer_states
        assert budget.padding == 0


@given(
    st.integers(0, 10**12),
    st.sampled_from(STAGES),
    st.integers(1, 4096),
    st.integers(1, 16),
    st.sampled_from(["fp32", "fp16"]),
    st.integers(0, 2),
)
def test_the_largest_model_fits_and_one_parameter_more_does_not(
    device_bytes: int, stage: int, dp: int, mp: int, precision: str, moments: int
) -> None:
    training = Training(dp=dp, mp=mp, precision=precision, moments=moments)
    found = largest_model(device_bytes, training, stage)
    if found:
        assert model_states(found, training, stage).total <= device_bytes
    assert model_states(found + 1, training, stage).total > device_bytes


def test_what_cannot_be_is_told_with_its_value() -> None:
    model = Transformer(layers=2, hidden=8, batch=1, sequence=4)
    for call, expected in (
        (lambda: Training(dp=0), "dp 0"),
        (lambda: Training(dp=1, mp=-1), "mp -1"),
        (lambda: Training(dp=1, precision="int8"), "'int8' must be one of bf16, fp16, fp32"),
        (lambda: Training(dp=1, moments=-1), "moments -1"),
        (lambda: moments_of("lion"), "'lion' must be one of adamw, adam, sgd"),
        (lambda: model_states(1, Training(dp=1), 4), "stage 4"),
        (lambda: wire_elements(0, Training(dp=1), 0), "0 parameters"),
        (lambda: Transformer(layers=2, hidden=8, batch=0, sequence=4), "batch 0"),
        (lambda: Checkpointing(every=0), "0 blocks"),
        (lambda: activations(model, Training(dp=8), Checkpointing(partitioned=True)), "mp is 1; raise mp"),
    ):
        with pytest.raises(ConfigError, match=expected):
            call()
    assert largest_model(15, Training(dp=1), 0) == 0
    assert largest_model(-1, Training(dp=1), 3) == 0
