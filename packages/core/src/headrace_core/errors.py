"""Every exception that headrace raises on purpose, in one tree.

HeadraceError
├── ConfigError (ValueError)        a setting is wrong; raised before anything is loaded
│   ├── AddressError                the port or socket cannot be taken
│   └── NetworkError                what a setting names could not be fetched
├── DeviceError                     the device is absent or does not work
├── CapacityError                   what was asked for does not fit into memory
├── PluginError
│   ├── PluginNotFound              no entry point of that name is installed
│   ├── PluginConflict              two distributions claim the same name
│   └── PluginLoadError             the plug-in exists and fails to import
├── MissingDependency (ImportError) an optional library is absent; carries its install line
├── ModelError
│   ├── UnsupportedModel (ValueError)  no implementation for this architecture or setting
│   └── WeightsError                a checkpoint's tensors or files are not what they should be
├── RequestError (ValueError)       one request is wrong; carries the field and the value (HTTP 400)
│   ├── UnsupportedFeature          a known field that this engine cannot honour
│   ├── PromptTooLong               prompt (plus output) exceeds the context
│   └── UnknownModel                the named model is not served (HTTP 404)
├── QueueFull                       the engine takes no more requests now (HTTP 429)
├── CaptureRefused                  a step cannot be recorded; it runs eagerly instead
├── ReplayFailed                    a recorded kernel met bad input; the eager step says which
└── EngineError
    ├── GenerateError               one request failed inside the engine; others go on (HTTP 500)
    │   └── EngineAsleep            the engine sleeps, and computes nothing before it is woken (HTTP 503)
    └── EngineDead                  the engine stopped; nothing more can be served (HTTP 500)

Each that reaches a user has a code (:data:`ERROR_CODES`): on the wire ``error.headrace_code``, on the command
line in the last line of standard error, with the exit status that stands beside it. Codes are never
reused and never change their meaning. What each means, and what to do about it, is said in
``headrace.error_catalogue`` and in ``docs/errors/``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class HeadraceError(Exception):
    """Base of all errors that headrace raises on purpose."""


class ConfigError(HeadraceError, ValueError):
    """A setting is wrong.

    Args:
        message: says the value, the field and what would be accepted.
        field: dotted name of the offending field (``cache.block_size``), if one is to blame.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class AddressError(ConfigError):
    """The address to listen on is taken, or not to be had."""


class NetworkError(ConfigError):
    """A model or file is not on this machine and could not be fetched."""


class DeviceError(HeadraceError):
    """The requested device is absent, or its driver does not work."""


class CapacityError(HeadraceError):
    """The request or model does not fit into memory; the message says what would fit."""


class PluginError(HeadraceError):
    """Base of plug-in look-up failures."""


class PluginNotFound(PluginError, LookupError):
    """No installed distribution offers a plug-in of that name."""


class PluginConflict(PluginError):
    """Two installed distributions claim the same plug-in name."""


class PluginLoadError(PluginError):
    """A plug-in that was asked for could not be imported; ``__cause__`` holds the reason."""


class MissingDependency(HeadraceError, ImportError):
    """An optional library is needed and absent, or too old.

    Args:
        library: import name of the library.
        needed_for: what asked for it.
        install: the command that provides it, as a user would type it.
        found: the version that is installed, if that is too old.
    """

    def __init__(
        self, library: str, *, needed_for: str, install: str, found: str | None = None
    ) -> None:
        state = "not installed" if found is None else f"too old ({found})"
        super().__init__(f"{needed_for} needs {library!r}, which is {state}. Run: {install}")
        self.library = library
        self.install = install


class ModelError(HeadraceError):
    """Base of failures to resolve, build or load a model."""


class UnsupportedModel(ModelError, ValueError):
    """No implementation serves this architecture with these settings."""


class WeightsError(ModelError):
    """A checkpoint's files or tensors are missing, left over or of the wrong shape or dtype."""


class RequestError(HeadraceError, ValueError):
    """A request is wrong; it alone fails.

    Args:
        message: names the value, the field and what would be accepted.
        param: the request's field, as the client spelled it (HTTP ``error.param``).
        value: the rejected value, if showing it helps.
    """

    def __init__(self, message: str, *, param: str | None = None, value: Any = None) -> None:
        super().__init__(message)
        self.param = param
        self.value = value


class UnsupportedFeature(RequestError):
    """A known field asks for something that this engine, as started, cannot do."""


class PromptTooLong(RequestError):
    """The prompt, or the prompt plus the output, does not fit into the context.

    The message begins with the sentences by which clients of OpenAI's API know this case.

    Args:
        limit: the context, in tokens.
        num_prompt_tokens: length of the prompt, in tokens.
        num_output_tokens: output for which there must be room, in tokens; 0: there is none.
        at_least: the prompt was not measured to its end.
        param: the request's field to blame.
        source: where the prompt's tokens are: ``prompt`` or ``messages``.
        hint: what the caller can do about it; "": the usual.
    """

    def __init__(
        self,
        limit: int,
        num_prompt_tokens: int,
        num_output_tokens: int = 0,
        *,
        at_least: bool = False,
        param: str = "prompt",
        source: str = "prompt",
        hint: str = "",
    ) -> None:
        self.limit = limit
        self.num_prompt_tokens = num_prompt_tokens
        self.num_output_tokens = num_output_tokens
        self.at_least = at_least
        total = f"{'at least ' if at_least else ''}{num_prompt_tokens + num_output_tokens}"
        parts = f"{num_prompt_tokens} in the {source}"
        if num_output_tokens:
            parts += f", {num_output_tokens} in the completion"
            hint = hint or f"Shorten the {source} or ask for fewer tokens of output."
        super().__init__(
            f"This model's maximum context length is {limit} tokens. However, you requested {total} "
            f"tokens ({parts}). {hint or f'Shorten the {source}.'}",
            param=param,
            value=num_prompt_tokens,
        )


class UnknownModel(RequestError):
    """The request names a model that is not served."""


class QueueFull(HeadraceError):
    """The waiting queue is at its limit.

    Args:
        retry_after: seconds after which trying again is sensible, from the measured rate.
    """

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class CaptureRefused(HeadraceError):
    """A step does what cannot be recorded; the message names the operation."""


class ReplayFailed(HeadraceError):
    """A recorded kernel reported an error; run eagerly, the step raises what is the matter."""


class EngineError(HeadraceError):
    """Base of failures inside a running engine."""


class GenerateError(EngineError):
    """One request failed inside the engine; its memory is freed and the others go on."""

    is_public = False
    """True: the text is about no request's or model's inside, and clients may read it."""


class EngineAsleep(GenerateError):
    """The engine sleeps: it takes requests again when it is awake and has weights."""


class EngineDead(EngineError):
    """The engine stopped and will not recover; ``__cause__`` or the message says why."""


class ErrorCode(NamedTuple):
    """One kind of error."""

    code: str
    http: int | None = None
    """Status, if it can be an answer to a request."""
    exit_status: int | None = None
    """Exit status of a command, if the error can end one."""
    classes: tuple[str, ...] = ()
    """Exceptions that it stands for, their subclasses included where those have no code."""


ERROR_CODES: tuple[ErrorCode, ...] = (
    ErrorCode("HR-REQ-001", 400, 2, ("RequestError",)),
    ErrorCode("HR-REQ-002", 400, 2, ("UnsupportedFeature",)),
    ErrorCode("HR-REQ-003", 400, 2, ("PromptTooLong",)),
    ErrorCode("HR-REQ-004", 404, 2, ("UnknownModel",)),
    ErrorCode("HR-REQ-005", 400, None, ("RequestValidationError",)),
    ErrorCode("HR-REQ-006", 400),
    ErrorCode("HR-REQ-007", 400),
    ErrorCode("HR-REQ-008", 413),
    ErrorCode("HR-REQ-009", 431),
    ErrorCode("HR-REQ-010", 404),
    ErrorCode("HR-REQ-011", 401),
    ErrorCode("HR-REQ-012", 499),
    ErrorCode("HR-QUE-001", 429, None, ("QueueFull",)),
    ErrorCode("HR-SRV-001", 503, None, ("ShuttingDown",)),
    ErrorCode("HR-SRV-002", 500),
    ErrorCode("HR-ENG-001", 500, 70, ("GenerateError", "EngineError")),
    ErrorCode("HR-ENG-002", 500, 70, ("EngineDead",)),
    ErrorCode("HR-ENG-003", 503, 70, ("EngineAsleep",)),
    ErrorCode("HR-CFG-001", None, 2, ("ConfigError",)),
    ErrorCode("HR-CFG-002", None, 2),
    ErrorCode("HR-FIL-001", None, 2, ("FileNotFoundError", "IsADirectoryError", "NotADirectoryError",
                                      "FileExistsError", "UnicodeDecodeError")),
    ErrorCode("HR-FIL-002", None, 8, ("OSError",)),
    ErrorCode("HR-MOD-001", None, 3, ("UnsupportedModel",)),
    ErrorCode("HR-MOD-002", None, 3, ("WeightsError",)),
    ErrorCode("HR-MOD-003", None, 3, ("ModelError",)),
    ErrorCode("HR-MEM-001", None, 4, ("CapacityError",)),
    ErrorCode("HR-MEM-002", None, 4, ("MemoryError", "OutOfMemoryError")),
    ErrorCode("HR-DEV-001", None, 5, ("DeviceError", "AcceleratorError")),
    ErrorCode("HR-NET-001", None, 6, ("NetworkError", "ConnectionError", "TimeoutError", "URLError",
                                      "gaierror", "SSLError")),
    ErrorCode("HR-PLG-001", None, 7, ("PluginNotFound", "PluginError")),
    ErrorCode("HR-PLG-002", None, 7, ("PluginConflict",)),
    ErrorCode("HR-PLG-003", None, 7, ("PluginLoadError",)),
    ErrorCode("HR-PLG-004", None, 7, ("MissingDependency",)),
    ErrorCode("HR-NET-002", None, 8, ("AddressError",)),
    ErrorCode("HR-BUG-001", None, 70),
)  # fmt: skip
"""All of them."""

BY_CODE: Mapping[str, ErrorCode] = {entry.code: entry for entry in ERROR_CODES}
BUG = BY_CODE["HR-BUG-001"]
_BY_CLASS: Mapping[str, ErrorCode] = {
    name: entry for entry in ERROR_CODES for name in entry.classes
}


def entry_of(error: BaseException) -> ErrorCode:
    """The code of an exception: of its class, else of the nearest base that has one;
    :data:`BUG` for what nobody foresaw."""
    for kind in type(error).__mro__:
        if kind.__name__ in _BY_CLASS:
            return _BY_CLASS[kind.__name__]
    return BUG
