"""Every error the engine raises on purpose.

    ZeroError
    |- ConfigError          a setting cannot work; raised before anything is allocated
    |- ModelError           the model breaks a rule of the engine (sharing, dtype, changed trainability)
    |- UsageError           calls in the wrong order or number
    |- DivergenceError      ranks are about to do different things
    |- PeerLostError        another rank ended, left the group or does not answer
    |- StateDictError       a state dict does not fit the engine's model, ranks or stage
    |- NonFiniteError       a loss or a gradient norm is inf or nan
    |  `- LossScaleError    fp16 gradients overflow at the smallest loss scale
    |- ArenaError           more was put into a block of memory than it was built for
    |- CheckpointError      a checkpoint cannot be written, or read back exactly
    |  |- DamagedError      bytes of a checkpoint are not those that were written
    |  `- FencedError       a newer generation has begun: this one may commit nothing
    `- ReshardError         a state cannot go from one group of ranks to another
       `- NothingHeldError  the ranks that are left hold no whole state

Each message says what failed, the value seen and what to change. `assert` guards our own invariants only.
"""


class ZeroError(Exception):
    """Root of the tree."""


class ConfigError(ZeroError):
    """A setting cannot work."""


class ModelError(ZeroError):
    """The model breaks a rule of the engine."""


class UsageError(ZeroError):
    """The engine's methods were called in the wrong order or number."""


class DivergenceError(ZeroError):
    """Ranks are about to do different things: another unit, another order, another size."""


class PeerLostError(ZeroError):
    """Another rank ended, left the group, or does not answer; or the group was aborted."""


class StateDictError(ZeroError):
    """A state dict does not fit the engine's model, ranks or stage."""


class NonFiniteError(ZeroError):
    """A loss or a gradient norm is inf or nan."""


class LossScaleError(NonFiniteError):
    """Gradients in fp16 are not finite although the loss scale is at its floor."""


class ArenaError(ZeroError):
    """A pre-allocated block of memory was asked for more than it was built for."""


class CheckpointError(ZeroError):
    """A checkpoint cannot be written, or cannot be read back exactly."""


class DamagedError(CheckpointError):
    """A checkpoint's file is not what was written, is gone, or is of another format.

    file         where it is
    start, stop  its bytes that are concerned
    what         is wrong with them
    """

    def __init__(self, file: str, start: int, stop: int, what: str) -> None:
        super().__init__(f"{file}, bytes {start} to {stop}: {what}")
        self.file, self.start, self.stop, self.what = file, start, stop, what

    def __reduce__(self) -> tuple[type["DamagedError"], tuple[str, int, int, str]]:
        return type(self), (self.file, self.start, self.stop, self.what)


class FencedError(CheckpointError):
    """A group of the past wants to commit a checkpoint: a newer generation has begun."""


class ReshardError(ZeroError):
    """A state cannot be taken over by another group of ranks: of another model, or a rank failed."""


class NothingHeldError(ReshardError):
    """What the ranks that are left hold does not add up to a whole state."""
