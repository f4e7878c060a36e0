"""Learning rate over the steps. Pure: a step has the same rate on every rank and after every resume."""

from math import cos, pi

from workers.spec import JobSpec


def learning_rate(spec: JobSpec, step: int) -> float:
    """The rate of step `step`, counted from 0; the last step is `spec.steps - 1`."""
    return spec.optimizer.lr * factor(spec, step)


def factor(spec: JobSpec, step: int) -> float:
    """The rate of a step as a factor of the peak.

    The warm-up rises linearly and reaches 1 at its last step; the decay starts at 1 at the step after it
    and reaches `final_ratio` at the last step of the job.
    """
    schedule = spec.schedule
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant":
        return 1.0
    length = spec.steps - 1 - schedule.warmup_steps
    progress = min((step - schedule.warmup_steps) / length, 1.0) if length > 0 else 1.0
    shape = 1 - progress if schedule.kind == "linear" else (1 + cos(pi * progress)) / 2
    return schedule.final_ratio + (1 - schedule.final_ratio) * shape
