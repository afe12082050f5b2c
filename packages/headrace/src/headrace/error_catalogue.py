"""The error catalogue: what each error code means, why it comes and what to do about it, for people.

The codes are :mod:`headrace_core.errors`. A page for each is made of this data (``docs/errors/``, by
``tools/error_pages.py``); a command that fails ends with its hint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class ErrorEntry(NamedTuple):
    """Title, cause and hint of one code."""

    code: str
    title: str
    cause: str
    hint: str


CATALOGUE: tuple[ErrorEntry, ...] = (
    ErrorEntry(
        "HR-REQ-001", "A value of a request is wrong",
        "A field of the request is out of range, or cannot be combined with another field. In an answer "
        "over HTTP, error.param is the field.",
        "The message names the field, its value and the accepted values.",
    ),
    ErrorEntry(
        "HR-REQ-002", "A feature is not supported",
        "The request asks for something that this model, device or configuration cannot do.",
        "The message says how to enable it, often with a flag of headrace serve. Or leave the field out.",
    ),
    ErrorEntry(
        "HR-REQ-003", "The prompt is too long",
        "The prompt, or the prompt and the output that was asked for, exceed the context. In an answer "
        "over HTTP, error.code is context_length_exceeded, by which clients of OpenAI's API know the "
        "case; Anthropic's know the message.",
        "Shorten the prompt, ask for fewer max_tokens, set truncate_prompt_tokens, or start the "
        "server with a larger --max-model-len.",
    ),
    ErrorEntry(
        "HR-REQ-004", "The model is not served",
        "The request names a model that this server does not have.",
        "GET /v1/models lists the names; --served-model-name adds some.",
    ),
    ErrorEntry(
        "HR-REQ-005", "The body does not fit the schema",
        "A field is missing, or has a value of the wrong type or size.",
        "error.param names the first such field; /openapi.json has the schema.",
    ),
    ErrorEntry(
        "HR-REQ-006", "The body is not JSON",
        "The body cannot be read as JSON (RFC 8259): NaN and Infinity are not part of it, nor are "
        "comments, trailing commas or anything after the value. Or it has too many fields, names, lists "
        "or values, or nests them too deeply.",
        "Send the output of a JSON library, as UTF-8; the message says which limit is exceeded.",
    ),
    ErrorEntry(
        "HR-REQ-007", "The body is not declared as JSON",
        "The header Content-Type is not application/json.",
        "Send Content-Type: application/json. Browsers may send other types across origins without "
        "asking, so they are not read.",
    ),
    ErrorEntry(
        "HR-REQ-008", "The body is too large",
        "The body has more bytes than --max-body-bytes.",
        "Send less, or raise the limit.",
    ),
    ErrorEntry(
        "HR-REQ-009", "The request has too many headers",
        "The request has more header lines than --h11-max-header-count.",
        "Send fewer, or raise the limit.",
    ),
    ErrorEntry(
        "HR-REQ-010", "No such route",
        "The server has no such path, or the path does not take this method.",
        "The message names the nearest path; GET / lists all paths; some exist only if a flag enables them.",
    ),
    ErrorEntry(
        "HR-REQ-011", "The key is missing or wrong",
        "The server requires a key, and the request has no valid key. The body is "
        "{\"error\": \"Unauthorized\"}, without a code.",
        "Send Authorization: Bearer KEY, once.",
    ),
    ErrorEntry(
        "HR-REQ-012", "The client has gone",
        "The client closed the connection before the answer; only the log shows this error.",
        "Nothing to do: the server stopped working on the request.",
    ),
    ErrorEntry(
        "HR-QUE-001", "The queue is full",
        "The number of waiting requests or prompt tokens has reached --max-queued-requests or "
        "--max-queued-tokens.",
        "Try again after the number of seconds in the header Retry-After; the server estimates it from "
        "its measured rate.",
    ),
    ErrorEntry(
        "HR-SRV-001", "The server is shutting down",
        "The server is stopping: it refuses new requests and gives running ones some seconds to finish.",
        "Try again, on another instance if there is one.",
    ),
    ErrorEntry(
        "HR-SRV-002", "An internal error",
        "An unexpected error ended the request. The server goes on.",
        "Please report the details, which the server's log has under the request's id.",
    ),
    ErrorEntry(
        "HR-ENG-001", "The engine failed on this request",
        "An error ended the computation of this request. Its memory is freed, and other requests go on.",
        "The server's log has the cause. A retry may succeed, unless the request itself is the cause.",
    ),
    ErrorEntry(
        "HR-ENG-002", "The engine has stopped",
        "The device or the engine process is lost. Every request has ended, and the server exits with "
        "status 1.",
        "The log has the cause (killed for memory, a device error, ...). Let a supervisor restart the "
        "server.",
    ),
    ErrorEntry(
        "HR-ENG-003", "The engine sleeps",
        "The engine has given back the memory of its weights or its cache, and was not woken wholly; or its "
        "weights were not read since it slept at level 2, or since reading them failed. It computes "
        "nothing meanwhile.",
        "Wake it (POST /wake_up, or wake_up()), after level 2 with reload_weights, and try again. Requests "
        "wait instead of being refused if the engine is paused before it sleeps.",
    ),
    ErrorEntry(
        "HR-CFG-001", "A setting is wrong",
        "A flag, configuration field or environment variable has a value that cannot be used, or "
        "contradicts another one.",
        "The message names the setting, its value and the accepted values.",
    ),
    ErrorEntry(
        "HR-CFG-002", "A command line is wrong",
        "A flag or command is unknown, or its value has the wrong form.",
        "headrace COMMAND --help=all lists the flags, --help=WORD those that contain a word.",
    ),
    ErrorEntry(
        "HR-FIL-001", "A file cannot be used",
        "A file or folder does not exist, is of the wrong kind (a folder in place of a file, or a file "
        "in place of a folder), or is not text.",
        "Check the path in the message.",
    ),
    ErrorEntry(
        "HR-FIL-002", "The system does not allow it",
        "This user may not read or write the file, its disk is full or read-only, or the system refused "
        "the operation.",
        "The message names the file and the reason: free space, change the permissions, or choose "
        "another path.",
    ),
    ErrorEntry(
        "HR-MOD-001", "The model is not supported",
        "No installed implementation serves this architecture with these settings.",
        "The message says what is missing; `headrace plugins` lists what is installed.",
    ),
    ErrorEntry(
        "HR-MOD-002", "The weights are missing or damaged",
        "A file of the checkpoint is missing, truncated or damaged, or its tensors do not fit the "
        "model.",
        "The message names the file and tensor: download the file again, and compare its size and hash.",
    ),
    ErrorEntry(
        "HR-MOD-003", "The model cannot be loaded",
        "The checkpoint cannot be used.",
        "The message says why.",
    ),
    ErrorEntry(
        "HR-MEM-001", "The model does not fit into memory",
        "Weights, activations and the cache of one request with the longest context, or a cache of the size "
        "that was chosen for it, need more memory than the device has.",
        "The message says what would fit: a smaller --max-model-len, more --gpu-memory-utilization, a "
        "--kv-cache-memory-bytes between what a request needs and what is free, or a smaller model.",
    ),
    ErrorEntry(
        "HR-MEM-002", "The system has no memory left",
        "The system refused an allocation.",
        "Free memory, or lower --max-num-batched-tokens, --max-num-seqs or the cache's size.",
    ),
    ErrorEntry(
        "HR-DEV-001", "The device cannot be used",
        "The requested device is absent, or its driver does not work.",
        "`headrace collect-env` shows what torch sees; --device cpu works everywhere.",
    ),
    ErrorEntry(
        "HR-NET-001", "A download or connection failed",
        "A model is not on this machine and could not be downloaded from the hub, or a server did not "
        "answer.",
        "Check the name or the URL, and the network, or pass a folder. --offline and HF_HUB_OFFLINE=1 "
        "forbid downloads.",
    ),
    ErrorEntry(
        "HR-PLG-001", "No such plug-in",
        "No installed distribution offers a plug-in of that name.",
        "The message lists what is installed; `headrace plugins` shows all.",
    ),
    ErrorEntry(
        "HR-PLG-002", "Two plug-ins have one name",
        "Two installed distributions claim the same plug-in name.",
        "Uninstall one of the two that the message names.",
    ),
    ErrorEntry(
        "HR-PLG-003", "A plug-in cannot be imported",
        "The requested plug-in is installed but fails to import.",
        "The message has the cause, often a missing library.",
    ),
    ErrorEntry(
        "HR-PLG-004", "A library is missing",
        "The request or command needs an optional library that is not installed.",
        "Run the command in the message to install it.",
    ),
    ErrorEntry(
        "HR-NET-002", "The address is not available",
        "The port or socket is in use, or this user may not open it.",
        "Choose another --port (0 picks a free one) or --uds, or stop the process that uses it.",
    ),
    ErrorEntry(
        "HR-BUG-001", "A bug",
        "headrace reached an unexpected state.",
        "Please report it with the traceback above and `headrace collect-env`.",
    ),
)  # fmt: skip
"""All of them, in the order of the codes."""

BY_CODE: Mapping[str, ErrorEntry] = {entry.code: entry for entry in CATALOGUE}
