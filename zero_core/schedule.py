"""Learning rates over the updates, for each parameter group. Pure: knows neither torch nor a clock.

The rate of an update depends on its number alone, so it is the same on every rank and after every resume.
A step that fp16 skips is no update and does not move the schedule on.
"""

from math import cos, pi

from zero_core.config import DEFAULT_GROUP, ScheduleConfig, ZeroConfig


def factor(schedule: ScheduleConfig, update: int) -> float:
    """The rate of update `update`, counted from 0, as a factor of the base.

    The warm-up rises linearly and reaches 1 at its last update; the decay starts at 1 at the update after it
    and reaches `final_ratio` at update `total_steps - 1`, where it stays.
    """
    if update < schedule.warmup_steps:
        return (update + 1) / schedule.warmup_steps
    if schedule.kind == "constant":
        return 1.0
    assert schedule.total_steps is not None
    length = schedule.total_steps - 1 - schedule.warmup_steps
    progress = min((update - schedule.warmup_steps) / length, 1.0) if length > 0 else 1.0
    shape = 1 - progress if schedule.kind == "linear" else (1 + cos(pi * progress)) / 2
    return schedule.final_ratio + (1 - schedule.final_ratio) * shape


def rates(config: ZeroConfig, update: int, *, lr: float | None = None) -> dict[str, float]:
    """The learning rate of every group at an update, by name.

    lr  takes the place of the optimizer's: it moves the default group and groups with an `lr_factor` or
        without a rate of their own, not those with an `lr`
    """
    base = config.optimizer.lr if lr is None else lr
    now = factor(config.schedule, update)
    found = {DEFAULT_GROUP: base * now}
    for group in config.groups:
        own = base * (1.0 if group.lr_factor is None else group.lr_factor) if group.lr is None else group.lr
        found[group.name] = own * now
    return found
