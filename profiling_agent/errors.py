"""Exceptions of the package, all on one screen."""


class ProfilingAgentError(Exception):
    """Root of the exceptions that we raise on purpose; the message is one line that a user can act on."""


class RequestError(ProfilingAgentError):
    """The request can't be carried out; the message has what was wrong, what was seen, and what to change."""


class FieldError(RequestError, ValueError):
    """A term of a request is unknown or not allowed; LangGraph's server passes on messages of ValueErrors."""


class AcquisitionError(RequestError):
    """The model or the data set is unavailable, or unfit for the job."""


class ShapeUnresolvedError(RequestError):
    """No rule gave an input shape that the model accepts."""


class PlanError(RequestError):
    """A plan names layers that don't exist, can't be pruned, or asks for an impossible ratio."""


class RunError(RequestError):
    """The run folder is missing, taken, locked, or written by another schema version."""


class StorageError(RunError):
    """The disk is full, read-only, not ours to write, or failing; once that is mended, a resume continues the run."""


class ApprovalPendingError(RunError):
    """The run waits for a person's answer; its results so far are stored."""


class ArtifactError(ProfilingAgentError):
    """A saved model is damaged, or doesn't compute what it did when it was saved."""


class CorruptImageError(ArtifactError):
    """An image's bytes are damaged, of an unsupported format, or absurdly large."""


class PruningError(ProfilingAgentError):
    """A pruned model failed a check; the candidate is discarded."""


class QuantizationError(ProfilingAgentError):
    """A model could not be quantized as requested; the candidate is discarded."""


class JobError(ProfilingAgentError):
    """A child process crashed, hung, or exceeded its memory limit."""


class LibraryError(JobError, RequestError):
    """A library can't be imported: the message names it and the command that installs it again."""


class KilledError(JobError):
    """A child process was killed from outside, which is no evidence on its work."""


class AdvisorError(ProfilingAgentError):
    """The LLM gave no usable answer; the built-in rules continue without it."""
