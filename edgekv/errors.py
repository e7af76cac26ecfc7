"""Every error edgekv raises on purpose.

    EdgeKVError
    ├── InvalidOption        an option or argument that cannot be used (also a ValueError)
    ├── DependencyMissing    a package that is not installed, or the wrong one
    ├── ModelError
    │   ├── ModelNotFound    no such name or folder
    │   ├── DownloadFailed   a source could not be fetched or verified
    │   ├── BadCheckpoint    a file is truncated, inconsistent or not what it claims
    │   └── UnsupportedModel understood, and known not to run here
    ├── ScalesError          KV scales are missing or belong to something else
    ├── MemoryBudgetError    the plan does not fit the budget
    ├── ContextOverflow      the prompt does not fit the cache (also a ValueError)
    ├── CacheFull            an engine was asked to append past its capacity
    ├── TemplateError        the model's chat template refuses these messages
    ├── Busy                 too many are waiting for an answer, or one has waited too long
    ├── SessionError         a saved session is missing, damaged, or for another model or cache
    ├── EngineError          the backend failed, or produced non-finite numbers
    └── StorageError         a file could not be written

A message is one sentence or two: what happened, with the numbers, and what to do about it. The CLI prints it after
"error: " and exits with code 2; a traceback means a bug in edgekv.
"""

from __future__ import annotations


class EdgeKVError(Exception):
    """Base of all errors that edgekv raises on purpose."""


class InvalidOption(EdgeKVError, ValueError):
    """An option or argument that cannot be used."""


class DependencyMissing(EdgeKVError, ImportError):
    """A package is missing, or the wrong build of it is installed."""


class ModelError(EdgeKVError):
    """Something is wrong with the model itself."""


class ModelNotFound(ModelError):
    """No model of that name, or no model in that folder."""


class DownloadFailed(ModelError):
    """A source could not be fetched, or what came is not what was expected."""


class BadCheckpoint(ModelError):
    """A model file is truncated, inconsistent or not what it claims to be."""


class UnsupportedModel(ModelError):
    """The model was understood, and it is known that it cannot run here."""


class ScalesError(EdgeKVError):
    """KV scales are missing, damaged, or belong to another model, dtype or granularity."""


class MemoryBudgetError(EdgeKVError):
    """No useful cache fits the memory budget."""


class TemplateError(EdgeKVError, ValueError):
    """The model's chat template refuses these messages."""


class Busy(EdgeKVError):
    """Too many are waiting for an answer, or one has waited too long; nothing was run.

    Attributes:
        full: it was the line that was too long, not the wait.
    """

    def __init__(self, message: str, *, full: bool) -> None:
        self.full = full
        super().__init__(message)


class SessionError(EdgeKVError, ValueError):
    """A saved session is missing, damaged, or fits another model, dtype, scales or capacity."""


class EngineError(EdgeKVError):
    """The backend failed, or produced numbers that are not finite."""


class StorageError(EdgeKVError, OSError):
    """A file could not be written; what was there before is untouched."""


class CacheFull(EdgeKVError):
    """An engine was asked to append past its capacity; nothing was appended.

    Attributes:
        length: filled slots.
        tokens: how many tokens were to be appended.
        capacity: slots in all.
    """

    def __init__(self, *, length: int, tokens: int, capacity: int) -> None:
        self.length, self.tokens, self.capacity = length, tokens, capacity
        super().__init__(
            f"The cache holds {length} of {capacity} tokens, so {tokens} more do not fit: evict or truncate first."
        )


class ContextOverflow(EdgeKVError, ValueError):
    """A prompt that does not fit the cache, found before anything reached the device.

    Attributes:
        input_tokens: tokens of the rendered prompt (or of the one message that is too long).
        max_allowed: the most that would have been accepted in its place.
        told_client: the message for someone who sends messages to a server, and has no say in how it runs.
    """

    def __init__(self, message: str, *, input_tokens: int, max_allowed: int, told_client: str = "") -> None:
        self.input_tokens, self.max_allowed = input_tokens, max_allowed
        self.told_client = told_client or message
        super().__init__(message)
