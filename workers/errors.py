"""Every error that the rooms on the cluster raise on purpose.

    WorkersError
    |- UserError             the job itself cannot work: shown to its owner, never retried
    |  |- ModelError         the model class cannot be imported, built or called
    |  |- DataError          the data cannot be read, or is too short, or holds a token id it must not
    |  |- DeviceError        the worker has not the device that the job asks for
    |  |- ResumeError        the data differ from those the checkpoint was made with
    |  `- DivergedError      loss or gradient norm is inf or nan
    |- RendezvousError       a process group could not be formed
    |- UntoldError           the controller does not collect what this worker has done
    |- StaleGenerationError       a command for a generation that this worker is not in
    `- LogError              the job's numbered log is damaged

Each takes one message and nothing else, so that it survives pickling on its way through Ray.
"""


class WorkersError(Exception):
    """Root of the tree."""


class UserError(WorkersError):
    """The job itself cannot work; trying again would end the same way."""


class ModelError(UserError):
    """The model class cannot be imported, built or called."""


class DataError(UserError):
    """The data cannot be read, or are too short, or hold a token id outside of the vocabulary."""


class DeviceError(UserError):
    """The worker has not the device that the job asks for."""


class ResumeError(UserError):
    """The data differ from those the checkpoint was made with."""


class DivergedError(UserError):
    """The loss or the gradient norm is no longer finite."""


class RendezvousError(WorkersError):
    """A process group could not be formed."""


class UntoldError(WorkersError):
    """The controller does not collect this worker's reports: it may be cut off, and replaced by now."""


class StaleGenerationError(WorkersError):
    """A command names a generation that this worker is not in."""


class LogError(WorkersError):
    """The job's numbered log is damaged in a way that dropping a torn last line does not mend."""
