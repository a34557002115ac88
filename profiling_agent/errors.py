"""Everything that can go wrong, on one screen."""


class ProfilingAgentError(Exception):
    """Root of the errors we raise on purpose; the message is one line a user can act on."""


class RequestError(ProfilingAgentError):
    """The request can't be carried out as it stands: what was wrong, what was seen, what to change."""


class TermError(RequestError, ValueError):
    """A term of a request is unknown or not allowed; as a ValueError, LangGraph's server passes its message on."""


class AcquisitionError(RequestError):
    """The model or the data set can't be had, or isn't what the job needs."""


class ShapeUnresolvedError(RequestError):
    """No rule gave an input shape that the model accepts."""


class PlanError(RequestError):
    """A plan names layers that don't exist, can't be pruned, or asks for an impossible ratio."""


class RunError(RequestError):
    """The run folder is missing, taken, locked, or written by another schema version."""


class StorageError(RunError):
    """The disk is full, read-only, somebody else's, or fails: what was done stays, and a resume goes on once that is mended."""


class ApprovalPendingError(RunError):
    """The run waits for a person's answer; everything done so far is kept."""


class ArtifactError(ProfilingAgentError):
    """A saved model is damaged, or doesn't compute what it did when it was saved."""


class CorruptImageError(ArtifactError):
    """An image's bytes are damaged, of a format that isn't read, or absurdly large."""


class PruningError(ProfilingAgentError):
    """A prune failed one of its gates; the candidate is discarded."""


class QuantizationError(ProfilingAgentError):
    """A model could not be quantized as asked; the candidate is discarded."""


class JobError(ProfilingAgentError):
    """A child process crashed, hung, or used more memory than it was given."""


class KilledError(JobError):
    """A child process was killed by somebody else, which says nothing of what it did."""


class AdvisorError(ProfilingAgentError):
    """The language model gave no usable answer; the built-in rules go on without it."""


class ContextTooLongError(AdvisorError):
    """A question is longer than the language model can read; a shorter one may be answered."""
