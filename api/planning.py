"""What a model takes at every stage, as `elastic-zero plan` answers it: from a parameter count or from a job.

Owns the answer's JSON and what the command's options mean. The arithmetic lies in
`zero_core.estimate` and `service.planner`; no service is asked.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import Any

from service.planner import StageBudget, every_stage
from workers.engine_config import engine_config
from workers.spec import JobSpec
from zero_core import estimate
from zero_core.estimate import STAGES, Activations, Training

LARGEST_NUMBER = 10**18
"""Of parameters or bytes that are taken for meant."""

_COUNT = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_SIZES = ("--layers", "--hidden", "--batch", "--sequence")
_WAYS = ("--checkpointing", "--checkpoint-every", "--partition-activations", "--host-checkpoints")
_NUMBER = re.compile(r"([0-9][0-9_]*(?:\.[0-9]*)?(?:e\+?[0-9]{1,3})?)\s*([a-z]*)", re.IGNORECASE)


class WrongUsage(Exception):  # noqa: N818 - named for the outcome
    """A value cannot be, or options do not go together; the message says what would do."""


def parameter_count(text: str) -> int:
    """Parameters as people write them: 7.5e9, 7.5B, 124M, 1_000. Raises WrongUsage."""
    return _number("--params", text, _COUNT, "parameters, such as 7.5e9, 7.5B, 124M or 124000000")


def byte_count(text: str, option: str = "--device-bytes") -> int:
    """Bytes as people write them: 32e9, 32GB, 32GiB. Raises WrongUsage."""
    with_b = {f"{unit}b": size for unit, size in (_BYTES | _BINARY).items()}
    return _number(option, text, _BYTES | _BINARY | with_b, "bytes, such as 32e9, 32GB or 32GiB")


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One rank at one stage: the one that holds the most; what it sends is the average over the ranks.

    largest_model  parameters of the largest model that fits; None where no device was named
    beside         further bytes by name, in a job's plan: tile_rounding (part of the model states), padding,
                   communication_buffer, activation
    total          model states and all that lies beside them, where that is known
    """

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    wire: Mapping[str, int | float]
    beside: Mapping[str, int] = field(default_factory=dict)
    total_bytes: int | None = None
    largest_model: int | None = None

    @property
    def model_state_bytes(self) -> int:
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def wire_elements(self) -> int | float:
        return sum(self.wire.values())

    def as_json(self) -> dict[str, Any]:
        told: dict[str, Any] = {
            "model_state_bytes": self.model_state_bytes,
            "parameter_bytes": self.parameter_bytes,
            "gradient_bytes": self.gradient_bytes,
            "optimizer_bytes": self.optimizer_bytes,
            "wire_elements_per_rank": self.wire_elements,
            "wire_elements_by_kind": dict(self.wire),
            **{f"{name}_bytes": size for name, size in self.beside.items()},
        }
        if self.total_bytes is not None:
            told["total_bytes"] = self.total_bytes
        if self.largest_model is not None:
            told["largest_model_parameters"] = self.largest_model
        return told


@dataclass(frozen=True, slots=True)
class StagePlans:
    """A model at all stages. `facts` is what was planned for, JSON-ready; `notes` are for people."""

    facts: Mapping[str, Any]
    stages: Mapping[int, StagePlan]
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """One object, with a member "0" to "3" for each stage beside the facts."""
        told = dict(self.facts)
        if self.notes:
            told["notes"] = list(self.notes)
        return told | {str(stage): plan.as_json() for stage, plan in self.stages.items()}


def of_parameters(
    parameters: int,
    training: Training,
    *,
    optimizer: str = "adamw",
    activations: Activations | None = None,
    device_bytes: int | None = None,
) -> StagePlans:
    """The plan of a model of so many parameters; `optimizer` names the one whose moments `training` counts.

    Raises zero_core's ConfigError.
    """
    on_device = 0 if activations is None else activations.device_bytes
    stages = {}
    for stage in STAGES:
        states = estimate.model_states(parameters, training, stage)
        wire = estimate.wire_elements(parameters, training, stage)
        stages[stage] = StagePlan(
            states.parameters,
            states.gradients,
            states.optimizer_states,
            {kind: _plain(elements) for kind, elements in wire.items()},
            beside={} if activations is None else {"activation": on_device},
            total_bytes=None if activations is None else states.total + on_device,
            largest_model=_largest(device_bytes, on_device, training, stage),
        )
    facts: dict[str, Any] = {
        "parameters": parameters,
        "dp": training.dp,
        "mp": training.mp,
        "precision": training.precision,
        "optimizer": optimizer,
    }
    if device_bytes is not None:
        facts["device_bytes"] = device_bytes
    if activations is not None:
        facts["activations"] = _activations(activations)
    return StagePlans(facts, stages)


def of_job(spec: JobSpec, *, workers: int | None = None, device_bytes: int | None = None) -> StagePlans:
    """The plan of a job, over its exact layout. Raises InvalidRequest for a model that is not built in."""
    found = every_stage(spec, workers=workers)
    config = engine_config(spec)
    training = Training(
        dp=found.workers,
        precision=config.precision,
        moments=len(spec.optimizer.engine_settings().moments),
        micro_batches=spec.micro_batches,
        reproducible=config.reproducible,
    )
    facts: dict[str, Any] = {
        "job": spec.name,
        "stage": config.stage,
        "parameters": found.parameters,
        "dp": training.dp,
        "mp": training.mp,
        "precision": training.precision,
        "optimizer": spec.optimizer.kind,
        "micro_batches": spec.micro_batches,
    }
    if device_bytes is not None:
        facts["device_bytes"] = device_bytes
    stages = {
        int(stage): _of_budget(budget, training, int(stage), device_bytes, gpus=spec.resources.gpus > 0)
        for stage, budget in found.stages.items()
    }
    return StagePlans(facts, stages, found.notes)


def of_model_options(given: Mapping[str, Any], *, dp: int | None, device_bytes: str | None) -> StagePlans:
    """The plan of a model that options describe, by their names on the command line.

    Raises WrongUsage, or zero_core's ConfigError.
    """
    _check_positive({**given, "--dp": dp})
    optimizer = given.get("--optimizer", "adamw")
    training = Training(
        dp=dp or 1,
        mp=given.get("--mp", 1),
        precision=given.get("--precision", "bf16"),
        moments=estimate.moments_of(optimizer),
    )
    if "--params" in given:
        parameters = parameter_count(given["--params"])
    elif {"--layers", "--hidden"} <= given.keys():
        parameters = estimate.transformer_parameters(given["--layers"], given["--hidden"])
    else:
        raise WrongUsage("there is nothing to plan: give a job FILE, --params, or --layers and --hidden")
    return of_parameters(
        parameters,
        training,
        optimizer=optimizer,
        activations=_activations_of(given, training),
        device_bytes=None if device_bytes is None else byte_count(device_bytes),
    )


def of_job_options(
    spec: JobSpec, given: Mapping[str, Any], *, dp: int | None, device_bytes: str | None
) -> StagePlans:
    """The plan of a job; options that say what a model is are refused. Raises WrongUsage, InvalidRequest."""
    if given:
        raise WrongUsage(f"FILE says what the model is and how it is trained; leave out {', '.join(given)}")
    _check_positive({"--dp": dp})
    room = None if device_bytes is None else byte_count(device_bytes)
    return of_job(spec, workers=dp, device_bytes=room)


def _activations_of(given: Mapping[str, Any], training: Training) -> Activations | None:
    """What the sizes on the command line say of activations; None where they say nothing."""
    asked = [name for name in ("--batch", "--sequence", *_WAYS) if name in given]
    if "--params" in given:  # else they are there for the number of parameters
        asked += [name for name in ("--layers", "--hidden") if name in given]
    if not asked:
        return None
    missing = [name for name in _SIZES if name not in given]
    if missing:
        raise WrongUsage(f"{', '.join(asked)} ask for activations, which also need {', '.join(missing)}")
    further = [name for name in _WAYS[1:] if name in given]
    if further and "--checkpointing" not in given:
        raise WrongUsage(f"{', '.join(further)} say how activations are checkpointed; add --checkpointing")
    model = estimate.Transformer(
        layers=given["--layers"],
        hidden=given["--hidden"],
        batch=given["--batch"],
        sequence=given["--sequence"],
    )
    checkpointing = None
    if "--checkpointing" in given:
        checkpointing = estimate.Checkpointing(
            every=given.get("--checkpoint-every", 1),
            partitioned="--partition-activations" in given,
            on_host="--host-checkpoints" in given,
        )
    return estimate.activations(model, training, checkpointing)


def _check_positive(options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if isinstance(value, int) and value < 1:
            raise WrongUsage(f"{name} is {value}; it must be at least 1")


def _of_budget(
    found: StageBudget, training: Training, stage: int, device_bytes: int | None, *, gpus: bool
) -> StagePlan:
    """`gpus`: whether the device is one, on which copies in host memory take no room."""
    budget = found.largest
    beside = budget.total - budget.model_states - (budget.host_bytes if gpus else 0)
    return StagePlan(
        budget.parameters,
        budget.gradients,
        budget.optimizer_states,
        {kind: _plain(elements) for kind, elements in found.wire.items()},
        beside={
            "tile_rounding": found.tile_rounding,
            "padding": budget.padding,
            "communication_buffer": budget.communication_buffers,
            "activation": budget.activations,
            "replicas": budget.replicas,
            "save_copy": budget.save_copy,
        },
        total_bytes=budget.total,
        largest_model=_largest(device_bytes, beside, training, stage),
    )


def _largest(device_bytes: int | None, taken: int, training: Training, stage: int) -> int | None:
    """What fits into the device beside the `taken` bytes, which are left as they are."""
    if device_bytes is None:
        return None
    return estimate.largest_model(device_bytes - taken, training, stage)


def _activations(found: Activations) -> dict[str, Any]:
    return {
        "kept_bytes": found.kept_bytes,
        "recomputed_bytes": found.recomputed_bytes,
        "host_bytes": found.host_bytes,
        "copied_bytes": found.copied_bytes,
        "recompute": round(float(found.recompute), 4),
        "tensor_slicing_elements": _plain(found.slicing_elements),
        "partitioning_elements": _plain(found.gathered_elements),
    }


def _plain(elements: Fraction | float) -> int | float:
    """A whole number as one, so that JSON shows all its digits."""
    return int(elements) if elements == int(elements) else float(elements)


def _number(option: str, text: str, units: Mapping[str, int], wanted: str) -> int:
    found = _NUMBER.fullmatch(text.strip())
    unit = units.get(found[2].lower()) if found else None
    if found is None or unit is None:
        raise WrongUsage(f"{option} {text!r} is no number; give {wanted}")
    exact = Decimal(found[1].replace("_", "")) * unit
    if not 1 <= exact <= LARGEST_NUMBER:
        raise WrongUsage(f"{option} {text!r} does not lie between 1 and {LARGEST_NUMBER:.0e}; give {wanted}")
    if exact != exact.to_integral_value():
        raise WrongUsage(f"{option} {text!r} is not a whole number; give {wanted}")
    return int(exact)
