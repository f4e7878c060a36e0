"""What a job's specification means to the engine: one translation for the planner and for the workers.

Loads neither torch nor Ray, so that the planner predicts from the very settings the workers use.
"""

from typing import TYPE_CHECKING

from zero_core.config import LossScale, ScheduleConfig, ZeroConfig

if TYPE_CHECKING:
    from workers.spec import JobSpec  # which has each specification translated as it is read


def saves_behind(spec: "JobSpec") -> bool:
    """Whether any checkpoint of the job is written while it trains on, from a copy of the states.

    Those of an interval are; the last one, a pause's and one on demand are waited for.
    """
    every = spec.checkpoints.every_steps
    return spec.checkpoints.asynchronous and every is not None and every < spec.steps


def engine_config(spec: "JobSpec") -> ZeroConfig:
    """The engine's settings for the job, whatever its world size."""
    schedule = spec.schedule
    return ZeroConfig(
        stage=spec.zero.stage,
        precision=spec.precision.value,
        low_precision_products=spec.zero.low_precision_products,
        micro_batches=spec.micro_batches,
        optimizer=spec.optimizer.engine_settings(),
        groups=spec.optimizer.engine_groups(),
        schedule=ScheduleConfig(
            kind=schedule.kind,
            warmup_steps=schedule.warmup_steps,
            total_steps=spec.steps,
            final_ratio=schedule.final_ratio,
        ),
        loss_scale=LossScale(**spec.loss_scale.model_dump()),
        clip_norm=spec.optimizer.clip_norm,
        tile=spec.zero.tile,
        staging_bytes=spec.zero.staging_bytes,
        reproducible=spec.zero.reproducible,
        reduction=spec.zero.reduction,
        keep_gathered_bytes=spec.zero.keep_gathered_bytes,
        divergence_check=spec.zero.divergence_check,
        activation_checkpointing=spec.zero.activation_checkpointing,
        collective_timeout_s=spec.recovery.collective_timeout_s,
        replicas=spec.elastic.replicas,
        replica_every_steps=spec.elastic.replica_every_steps,
    )
