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
├── GraphError
│   ├── CaptureRefused              a step cannot be recorded; it runs eagerly instead
│   └── ReplayFailed                a recorded kernel met bad input; the eager step says which
└── EngineError
    ├── GenerateError               one request failed inside the engine; others go on (HTTP 500)
    └── EngineDead                  the engine stopped; nothing more can be served (HTTP 500)
"""

from __future__ import annotations

from typing import Any


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
    """What a setting names is not on this machine, and could not be fetched."""


class DeviceError(HeadraceError):
    """The device that was asked for is absent, or its driver does not work."""


class CapacityError(HeadraceError):
    """What was asked for does not fit into memory; the message says what would."""


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


class GraphError(HeadraceError):
    """Base of what goes wrong with captured steps; the engine handles these itself."""


class CaptureRefused(GraphError):
    """A step does what cannot be recorded; the message names the operation."""


class ReplayFailed(GraphError):
    """A recorded kernel reported an error; run eagerly, the step raises what is the matter."""


class EngineError(HeadraceError):
    """Base of failures inside a running engine."""


class GenerateError(EngineError):
    """One request failed inside the engine; its memory is freed and the others go on."""


class EngineDead(EngineError):
    """The engine stopped and will not recover; ``__cause__`` or the message says why."""
