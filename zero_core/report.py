"""What one step did, in numbers. Knows nothing of how."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did.

    step        finished steps, so 1 after the first; skipped ones are counted
    loss        mean over the step's M micro-batches on all ranks; the same bits everywhere
    grad_norm   2-norm of the mean gradient before clipping, without the loss scale; not finite where the
                gradients overflowed
    clip_coefficient  what gradients were multiplied by
    lr          the learning rate of each group in this step, by name
    skipped     whether fp16 gradients (or the loss) were not finite, so that nothing was updated
    skipped_steps  how many steps were skipped so far, this one included
    loss_scale  that this step's losses were multiplied by; 1 but in fp16
    ballot      sums over ranks of the numbers passed to `step`
    bytes_sent  by this rank since the last step: reduce, gather, gather_backward, control; replica (copied to
                where its keeper reads it, or sent); access where parameters were read or written whole
    bytes_by_transport  the same bytes by the way they went: shared (memory of this host), network
    seconds     of this rank: forward and backward (without the collectives inside them), reduce, gather,
                control (the step's own small collective: mostly waiting for others), optimizer, idle,
                replica (copying states, and waiting until they have been sent)
    """

    step: int
    loss: float
    grad_norm: float
    clip_coefficient: float
    lr: dict[str, float]
    skipped: bool
    skipped_steps: int
    loss_scale: float
    ballot: tuple[float, ...]
    bytes_sent: dict[str, int] = field(default_factory=dict)
    bytes_by_transport: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
