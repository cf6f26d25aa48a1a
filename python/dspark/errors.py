"""The errors of dspark: one base class, and one class for each kind of failure that callers tell apart."""


class DSparkError(Exception):
    """Base class of every error that dspark raises on purpose. Raised itself where no subclass fits, such as
    when a pass of the models failed."""

    def to_json(self) -> dict[str, str]:
        """The object that the command line prints under `error`."""
        return {"type": type(self).__name__, "message": str(self)}


class CheckpointError(DSparkError):
    """A checkpoint is missing, damaged, inconsistent or of a kind that is not supported."""


class ConfigError(DSparkError):
    """Options, flags or settings contradict each other, the models or the machine."""


class CapacityError(DSparkError):
    """A request does not fit the context window, the cache or the queue."""


class QueueFullError(CapacityError):
    """As many requests wait as the queue may hold: the same request may be sent again later."""


class RequestError(DSparkError):
    """A prompt, a chat or a sampling parameter is not valid."""


class NumericsError(DSparkError):
    """The target produced logits from which no token can be drawn (NaN, +inf, or all -inf), or training
    gradients that are not finite, many in a row."""


class KernelError(DSparkError):
    """A CUDA kernel cannot be compiled or loaded, or its launch failed."""


def shown(value: object) -> str:
    """A value as error messages show it: its `repr`, shortened if it is long.

    Python refuses to write out whole numbers of more than some thousand digits, alone or in a list.
    """
    try:
        text = repr(value)
    except ValueError:
        return "a number with too many digits to show"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


_SHOWN = 80


def first_line(error: BaseException) -> str:
    """The first line of another library's error, to be used within a sentence."""
    return (str(error).strip() or "no message").splitlines()[0]
