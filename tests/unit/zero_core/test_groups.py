"""Which settings a parameter is stepped with; units are cut at the same places whoever owns the pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_core.config import (
    TILE_STEP,
    AdamConfig,
    AdamWConfig,
    ParameterGroup,
    SGDConfig,
    ZeroConfig,
)
from zero_core.errors import ConfigError
from zero_core.groups import members, runs, stepping
from zero_core.layout import ParameterSpec, Slot, build_layout

shapes = st.lists(st.integers(0, 90), max_size=2).map(tuple)
GROUPS = (
    ParameterGroup(name="even", patterns=("*.0", "*.2"), lr=0.5),
    ParameterGroup(name="decayed", patterns=("*.[13]",), weight_decay=0.3),
    ParameterGroup(name="nothing", patterns=("absent.*",), lr_factor=2.0),
)


@given(
    st.lists(st.tuples(shapes, st.integers(0, 5)), min_size=1, max_size=8),
    st.integers(1, 9),
    st.sampled_from([(), GROUPS]),
)
def test_cuts_lie_at_slots_or_at_fixed_steps(
    sizes: list[tuple[tuple[int, ...], int]], world_size: int, groups: tuple[ParameterGroup, ...]
) -> None:
    config = ZeroConfig(groups=groups)
    parameters = [ParameterSpec(f"p{i}.{kind}", shape) for i, (shape, kind) in enumerate(sizes)]
    layout = build_layout(parameters, lambda _: "", tile=TILE_STEP, world_size=world_size)
    unit = layout.units[0]
    whole = list(runs(config, unit, 0, unit.numel))
    edges = {edge for a, b, _ in whole for edge in (a, b)}
    covered = 0
    for rank in range(world_size):
        start, stop = layout.owned(0, rank)
        for a, b, how in runs(config, unit, start, stop):
            assert covered == start + a
            covered = start + b
            # An edge is one of the whole unit's, or falls on a step a vectorised kernel does not notice.
            assert all(edge in edges or edge % TILE_STEP == 0 for edge in (start + a, start + b))
            assert any(x <= start + a and start + b <= y and h == how for x, y, h in whole)
    assert covered == unit.numel
    for slot in unit.slots:
        inside = {how for a, b, how in whole if a < slot.stop and slot.offset < b and slot.numel}
        assert inside <= {stepping(config, slot)}


def of(config: ZeroConfig, name: str, *shape: int) -> tuple[str, object]:
    found = stepping(config, Slot(name, shape, 0))
    return found.group, found.settings


def test_the_first_match_wins_and_the_rest_takes_the_optimizers() -> None:
    config = ZeroConfig(
        optimizer=AdamWConfig(lr=1.0, weight_decay=0.1),
        groups=(
            ParameterGroup(name="head", patterns=("head.*",), lr=0.5, betas=(0.5, 0.6)),
            ParameterGroup(name="all heads", patterns=("*head*",), lr_factor=0.1, weight_decay=0.3),
        ),
    )
    assert of(config, "head.weight", 2, 2) == (
        "head",
        AdamWConfig(lr=0.5, betas=(0.5, 0.6), weight_decay=0.1),
    )
    # A group without a weight decay of its own keeps the rule: only two or more dimensions decay.
    assert of(config, "head.bias", 2) == ("head", AdamWConfig(lr=0.5, betas=(0.5, 0.6), weight_decay=0.0))
    # One that sets it means all of its parameters.
    assert of(config, "overhead.bias", 2) == ("all heads", AdamWConfig(lr=0.1, weight_decay=0.3))
    assert of(config, "Head.weight", 2, 2) == ("default", AdamWConfig(lr=1.0, weight_decay=0.1))
    assert of(config, "body.bias", 2) == ("default", AdamWConfig(lr=1.0, weight_decay=0.0))
    assert of(config, "scalar") == ("default", AdamWConfig(lr=1.0, weight_decay=0.0))


def test_members_name_the_trainable_parameters_of_each_group() -> None:
    parameters = [
        ParameterSpec("a.0", (2, 2)),
        ParameterSpec("b.1", (3,)),
        ParameterSpec("c.0", (3,), trainable=False),
        ParameterSpec("d.9", ()),
    ]
    layout = build_layout(parameters, lambda _: "", tile=TILE_STEP, world_size=1)
    found = members(ZeroConfig(groups=GROUPS), layout)
    assert found == {"default": ["d.9"], "even": ["a.0"], "decayed": ["b.1"], "nothing": []}


@pytest.mark.parametrize(
    ("optimizer", "fields", "message"),
    [
        (AdamConfig(), {"momentum": 0.5}, r"sets \['momentum'\], which AdamConfig has not"),
        (SGDConfig(), {"betas": (0.1, 0.2)}, r"sets \['betas'\], which SGDConfig has not"),
        (SGDConfig(), {"momentum": 0.5}, "either all parameters have a momentum or none"),
        (SGDConfig(momentum=0.9), {"momentum": 0.0}, "either all parameters have a momentum or none"),
        (SGDConfig(momentum=0.9), {"nesterov": True, "dampening": 0.1}, "group 'x': nesterov needs"),
        (AdamWConfig(), {"lr": 1.0, "lr_factor": 1.0}, "set one of them"),
        (AdamWConfig(), {"lr": -1.0}, r"group 'x': lr -1\.0"),
        (AdamWConfig(), {"lr_factor": float("nan")}, "lr_factor nan"),
        (AdamWConfig(), {"name": "default"}, "cannot be called 'default'"),
        (AdamWConfig(), {"patterns": "head.*"}, "must be a tuple"),
    ],
)
def test_what_cannot_work_is_refused(optimizer: object, fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ZeroConfig(
            optimizer=optimizer,
            groups=(ParameterGroup(**{"name": "x", "patterns": ("*",), **fields}),),
        )


def test_two_groups_of_one_name_are_refused() -> None:
    group = ParameterGroup(name="x", patterns=())
    with pytest.raises(ConfigError, match="different names"):
        ZeroConfig(groups=(group, group))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: AdamWConfig(lr=float("inf")),
        lambda: AdamConfig(betas=(0.9, 1.0)),
        lambda: AdamConfig(eps=0.0),
        lambda: SGDConfig(momentum=1.0),
        lambda: SGDConfig(nesterov=True),
        lambda: SGDConfig(momentum=0.9, nesterov=True, dampening=0.1),
        lambda: SGDConfig(weight_decay=-1.0),
    ],
)
def test_an_optimizer_that_cannot_work_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigError):
        wrong()  # type: ignore[operator]
