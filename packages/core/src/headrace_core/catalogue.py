"""The error catalogue: every error that reaches a user has a stable code, a cause and a hint.

Codes are never reused and never change their meaning. A page for each is made of this data
(``docs/errors/``, by ``tools/error_pages.py``). On the wire the code is ``error.headrace_code``; on
the command line it is in the last line of standard error, with the exit status beside it here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class ErrorCode(NamedTuple):
    """One kind of error."""

    code: str
    title: str
    cause: str
    hint: str
    http: int | None = None
    """Status, if it can be an answer to a request."""
    exit_status: int | None = None
    """Of a command, if it can end one."""
    classes: tuple[str, ...] = ()
    """Exceptions that it stands for, their subclasses included where those have no code."""


CATALOGUE: tuple[ErrorCode, ...] = (
    ErrorCode(
        "HR-REQ-001", "A value of a request is wrong",
        "A field of the request has a value that is out of range, or does not go with another one. In "
        "an answer over HTTP, error.param is the field.",
        "The message names the field, its value and what would be accepted.",
        400, 2, ("RequestError",),
    ),
    ErrorCode(
        "HR-REQ-002", "A feature is not served",
        "The request asks for something that this model, device or configuration cannot do.",
        "The message says what would make it possible, often a flag of headrace serve; or leave the "
        "field out.",
        400, 2, ("UnsupportedFeature",),
    ),
    ErrorCode(
        "HR-REQ-003", "The prompt is too long",
        "The prompt, or the prompt and the output that was asked for, exceed the context. In an answer "
        "over HTTP, error.code is context_length_exceeded, by which clients of OpenAI's API know the "
        "case; Anthropic's know the message.",
        "Shorten the prompt, ask for fewer max_tokens, set truncate_prompt_tokens, or start the "
        "server with a larger --max-model-len.",
        400, 2, ("PromptTooLong",),
    ),
    ErrorCode(
        "HR-REQ-004", "The model is not served",
        "The request names a model that this server does not have.",
        "GET /v1/models lists the names; --served-model-name adds some.",
        404, 2, ("UnknownModel",),
    ),
    ErrorCode(
        "HR-REQ-005", "The body does not fit the schema",
        "A field is missing, or has a value of the wrong type or size.",
        "error.param names the first such field; /openapi.json has the schema.",
        400, None, ("RequestValidationError",),
    ),
    ErrorCode(
        "HR-REQ-006", "The body is not JSON",
        "The body cannot be read as JSON (RFC 8259): NaN and Infinity are not part of it, nor are "
        "comments, trailing commas or anything after the value. Or it holds more fields, names, lists "
        "or values than are read, or nests them deeper.",
        "Send what a JSON library writes, as UTF-8; the message says what is too much.",
        400,
    ),
    ErrorCode(
        "HR-REQ-007", "The body is not declared as JSON",
        "The header Content-Type is not application/json.",
        "Send Content-Type: application/json. Browsers may send other types across origins without "
        "asking, so they are not read.",
        400,
    ),
    ErrorCode(
        "HR-REQ-008", "The body is too large",
        "The body has more bytes than --max-body-bytes.",
        "Send less, or raise the limit.",
        413,
    ),
    ErrorCode(
        "HR-REQ-009", "The head has too many lines",
        "The request has more header lines than --h11-max-header-count.",
        "Send fewer, or raise the limit.",
        431,
    ),
    ErrorCode(
        "HR-REQ-010", "No such route",
        "The path, or the method on it, does not exist here.",
        "The message names the nearest path; GET / lists all, some exist only if a flag switches them "
        "on.",
        404,
    ),
    ErrorCode(
        "HR-REQ-011", "The key is missing or wrong",
        "The server has keys, and the request carries none of them. The body is "
        "{\"error\": \"Unauthorized\"}, without a code.",
        "Send Authorization: Bearer KEY, once.",
        401,
    ),
    ErrorCode(
        "HR-REQ-012", "The client has gone",
        "The connection was closed before the answer; only the log shows this.",
        "Nothing to do: the request's work was ended.",
        499,
    ),
    ErrorCode(
        "HR-QUE-001", "The queue is full",
        "As many requests, or tokens of prompts, wait as --max-queued-requests or "
        "--max-queued-tokens allow.",
        "Try again after the seconds of the header Retry-After, which come from the measured rate.",
        429, None, ("QueueFull",),
    ),
    ErrorCode(
        "HR-SRV-001", "The server is shutting down",
        "The server was told to stop: new requests are refused, running ones get some seconds.",
        "Try again, on another instance if there is one.",
        503, None, ("ShuttingDown",),
    ),
    ErrorCode(
        "HR-SRV-002", "An internal error",
        "Something failed that should not. The request ended; the server goes on.",
        "The server's log has the details under the request's id: please report them.",
        500,
    ),
    ErrorCode(
        "HR-ENG-001", "The engine failed on this request",
        "Computing this request raised an error; its memory is freed and other requests go on.",
        "The server's log says what happened. Sent again, the request may work, unless it is its own "
        "cause.",
        500, 70, ("GenerateError", "EngineError"),
    ),
    ErrorCode(
        "HR-ENG-002", "The engine has stopped",
        "The device, or the process that computes, is lost. Every request has ended, and the server "
        "leaves with status 1.",
        "The log says why (killed for memory, a device error...). Let a supervisor start the server "
        "again.",
        500, 70, ("EngineDead",),
    ),
    ErrorCode(
        "HR-CFG-001", "A setting is wrong",
        "A flag, configuration field or environment variable has a value that cannot be used, or "
        "contradicts another one.",
        "The message names the setting, its value and what would be accepted.",
        None, 2, ("ConfigError",),
    ),
    ErrorCode(
        "HR-CFG-002", "A command line is wrong",
        "A flag or command is unknown, or its value has the wrong form.",
        "headrace COMMAND --help=all lists the flags, --help=WORD those that contain a word.",
        None, 2,
    ),
    ErrorCode(
        "HR-FIL-001", "A file cannot be used",
        "A file or folder that was named is not there, is of another kind than what is needed (a "
        "folder for a file, or a file for a folder), or does not hold text.",
        "The message names it: check the path.",
        None, 2, ("FileNotFoundError", "IsADirectoryError", "NotADirectoryError",
                  "FileExistsError", "UnicodeDecodeError"),
    ),
    ErrorCode(
        "HR-FIL-002", "The system does not allow it",
        "A file may not be read or written by this user, its disk is full or read-only, or the "
        "system refused the operation.",
        "The message names the file and the reason: free space, change its permissions, or name "
        "another place.",
        None, 8, ("OSError",),
    ),
    ErrorCode(
        "HR-MOD-001", "The model is not supported",
        "No installed implementation serves this architecture with these settings.",
        "The message names what is missing; `headrace plugins` lists what is installed.",
        None, 3, ("UnsupportedModel",),
    ),
    ErrorCode(
        "HR-MOD-002", "The weights are not what they should be",
        "A file of the checkpoint is missing, truncated or damaged, or its tensors do not fit the "
        "model.",
        "The message names the file and tensor: download it again, and compare its size and hash.",
        None, 3, ("WeightsError",),
    ),
    ErrorCode(
        "HR-MOD-003", "The model cannot be loaded",
        "The checkpoint cannot be used.",
        "The message says why.",
        None, 3, ("ModelError",),
    ),
    ErrorCode(
        "HR-MEM-001", "It does not fit into memory",
        "Weights, activations and a cache for one request of the longest context need more memory "
        "than there is.",
        "The message says what would fit: a smaller --max-model-len, more --gpu-memory-utilization "
        "or --kv-cache-memory-bytes, or a smaller model.",
        None, 4, ("CapacityError",),
    ),
    ErrorCode(
        "HR-MEM-002", "The system has no memory left",
        "The system refused an allocation.",
        "Free memory, or lower --max-num-batched-tokens, --max-num-seqs or the cache's size.",
        None, 4, ("MemoryError", "OutOfMemoryError"),
    ),
    ErrorCode(
        "HR-DEV-001", "The device cannot be used",
        "The device that was asked for is absent, or its driver does not work.",
        "`headrace collect-env` shows what torch sees; --device cpu works everywhere.",
        None, 5, ("DeviceError", "AcceleratorError"),
    ),
    ErrorCode(
        "HR-NET-001", "Something could not be fetched",
        "A model is not on this machine and could not be had from the hub; or a server did not "
        "answer.",
        "Check the name or the URL, and the network, or pass a folder. --offline and HF_HUB_OFFLINE=1 "
        "forbid asking.",
        None, 6, ("NetworkError", "ConnectionError", "TimeoutError", "URLError", "gaierror",
                  "SSLError"),
    ),
    ErrorCode(
        "HR-PLG-001", "No such plug-in",
        "No installed distribution offers a plug-in of that name.",
        "The message lists what is installed; `headrace plugins` shows all.",
        None, 7, ("PluginNotFound", "PluginError"),
    ),
    ErrorCode(
        "HR-PLG-002", "Two plug-ins have one name",
        "Two installed distributions claim the same plug-in name.",
        "Uninstall one of the two that the message names.",
        None, 7, ("PluginConflict",),
    ),
    ErrorCode(
        "HR-PLG-003", "A plug-in cannot be imported",
        "The plug-in that was asked for is installed, and fails to import.",
        "The message has the cause: often a library that it needs.",
        None, 7, ("PluginLoadError",),
    ),
    ErrorCode(
        "HR-PLG-004", "A library is missing",
        "An optional library is needed for what was asked.",
        "The message has the command that installs it.",
        None, 7, ("MissingDependency",),
    ),
    ErrorCode(
        "HR-NET-002", "The address cannot be taken",
        "The port or socket is in use, or this user may not have it.",
        "Choose another --port (0 picks a free one) or --uds, or end whoever has it.",
        None, 8, ("AddressError",),
    ),
    ErrorCode(
        "HR-BUG-001", "A bug",
        "headrace met a state that it does not know.",
        "Please report it with the traceback above and `headrace collect-env`.",
        None, 70,
    ),
)  # fmt: skip
"""All of them."""

BY_CODE: Mapping[str, ErrorCode] = {entry.code: entry for entry in CATALOGUE}
BUG = BY_CODE["HR-BUG-001"]
_BY_CLASS: Mapping[str, ErrorCode] = {name: entry for entry in CATALOGUE for name in entry.classes}


def entry_of(error: BaseException) -> ErrorCode:
    """The catalogue's entry for an exception: of its class, else of the nearest base that has one;
    :data:`BUG` for what nobody foresaw."""
    for kind in type(error).__mro__:
        if kind.__name__ in _BY_CLASS:
            return _BY_CLASS[kind.__name__]
    return BUG
