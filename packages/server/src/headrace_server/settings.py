"""All settings of the HTTP front end. The meta-package turns each field into a flag."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from headrace_core.config import option
from headrace_core.errors import ConfigError

LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")
_JINJA_MARKS = ("{{", "{%", "{#")


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of one HTTP server.

    Raises:
        ConfigError: naming the field, its value and what would be accepted.
    """

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 or :: for all interfaces.")
    port: int = option(8000, "TCP port; 0 picks a free one.")
    uds: str | None = option(None, "Unix socket to listen on instead of host and port.")
    root_path: str = option("", "Path prefix under which a proxy publishes this server.")
    ssl_keyfile: str | None = option(None, "TLS private key (PEM).")
    ssl_certfile: str | None = option(None, "TLS certificate chain (PEM).")
    ssl_ca_certs: str | None = option(
        None, "Certificates that clients' certificates must chain to."
    )
    ssl_cert_reqs: int = option(
        int(ssl.CERT_NONE), "Client certificates: 0 none, 1 optional, 2 required."
    )
    h11_max_incomplete_event_size: int = option(
        4 * 1024 * 1024, "Most bytes of an incomplete request head.", human_int=True
    )
    h11_max_header_count: int = option(256, "Most header lines of a request; more is a 431.")
    max_body_bytes: int = option(
        64 * 1024 * 1024, "Most bytes of a request body; more is a 413.", human_int=True
    )
    drain_timeout: float = option(
        15.0, "Seconds that running requests get to finish after SIGTERM or SIGINT."
    )
    api_key: tuple[str, ...] = option(
        (), "Key that clients must send as 'Authorization: Bearer KEY'; may be repeated. Prefer "
        "--api-key-file or HEADRACE_API_KEY: a command line is visible to other users.",
    )  # fmt: skip
    api_key_file: str | None = option(None, "File with one key a line.")
    api_key_scope: Literal["all", "v1"] = option(
        "all", "Routes that need a key: all (but /health, /livez, /readyz, /ping, /version, "
        "/metrics), or v1 (only paths below /v1).",
    )  # fmt: skip
    protect_metrics: bool = option(False, "/metrics needs a key, too.")
    allowed_origins: tuple[str, ...] = option(
        (), "Web origins that may call this server from a browser (CORS). Default: none."
    )
    allowed_methods: tuple[str, ...] = option(("*",), "Methods allowed to those origins.")
    allowed_headers: tuple[str, ...] = option(("*",), "Headers allowed to those origins.")
    allow_credentials: bool = option(False, "Let those origins send credentials.")
    middleware: tuple[str, ...] = option(
        (), "Import path of an ASGI middleware class or an HTTP middleware function; repeatable."
    )
    enable_request_id_headers: bool = option(
        False, "Answer with X-Request-Id: the request's own, or a random one."
    )
    disable_fastapi_docs: bool = option(False, "No OpenAPI document, Swagger page or ReDoc page.")
    strict_requests: bool = option(
        False, "Unknown fields of a request body are a 400 that names the nearest known field."
    )
    response_role: str = option("assistant", "Role of answers to a chat.")
    chat_template: str | None = option(
        None, "File with a chat template, or the template itself; replaces the model's."
    )
    chat_template_content_format: Literal["auto", "string", "openai"] = option(
        "auto", "What the template expects as content: a string, a list of parts, or detect."
    )
    trust_request_chat_template: bool = option(False, "Let requests bring their own chat_template.")
    default_chat_template_kwargs: Mapping[str, Any] = option(
        {}, "JSON object of template variables for requests that do not set them."
    )
    exclude_tools_when_tool_choice_none: bool = option(
        False, "Leave tools out of the prompt when tool_choice is 'none'."
    )
    enable_auto_tool_choice: bool = option(
        False, "Let the model call tools (tool_choice 'auto'); needs --tool-call-parser."
    )
    tool_call_parser: str | None = option(
        None, "How this model writes tool calls: hermes, or a plug-in's name."
    )
    reasoning_parser: str | None = option(
        None, "How this model marks its reasoning: qwen3, or a plug-in's name."
    )
    enable_responses_store: bool = option(
        False, "Keep responses (/v1/responses): needed for previous_response_id, background and "
        "GET. HEADRACE_ENABLE_RESPONSES_API_STORE=1 does the same.",
    )  # fmt: skip
    responses_store_count: int = option(1000, "Most responses that are kept.")
    responses_store_bytes: int = option(
        256 * 1024 * 1024, "Most bytes of kept responses, events included.", human_int=True
    )
    responses_store_seconds: float = option(
        24 * 3600.0, "Seconds after its last use that a response is forgotten."
    )
    max_background_responses: int = option(
        64, "Most responses that run in the background at once; more is a 429."
    )
    tool_server: str | None = option(
        None, "Servers of built-in tools (MCP): host:port, several separated by commas; or demo. "
        "Default: this server calls no tools.",
    )  # fmt: skip
    return_tokens_as_token_ids: bool = option(
        False, "Show tokens in log-probabilities as token_id:N."
    )
    enable_prompt_tokens_details: bool = option(False, "Report cached prompt tokens in usage.")
    enable_force_include_usage: bool = option(False, "Streams end with usage, asked for or not.")
    enable_tokenizer_info_endpoint: bool = option(
        False, "GET /tokenizer_info; may show the chat template."
    )
    enable_server_load_tracking: bool = option(False, "Count requests in flight for GET /load.")
    metrics_prefix: str = option("headrace:", "Beginning of all metric names.")
    enable_log_requests: bool = option(
        False, "Log each request: id and parameters at INFO, prompt at DEBUG."
    )
    max_log_len: int | None = option(
        None, "Most prompt characters or token ids in a log line. Default: no limit."
    )
    uvicorn_log_level: Literal["critical", "error", "warning", "info", "debug", "trace"] = option(
        "info", "Log level of the HTTP layer."
    )
    disable_uvicorn_access_log: bool = option(False, "No log line per HTTP request.")

    def __post_init__(self) -> None:
        for name in (
            "api_key",
            "allowed_origins",
            "allowed_methods",
            "allowed_headers",
            "middleware",
        ):
            _check(not isinstance(getattr(self, name), str), name, getattr(self, name), "a list")
        _check(0 <= self.port <= 65535, "port", self.port, "in 0..65535")
        _check(self.drain_timeout >= 0, "drain_timeout", self.drain_timeout, "at least 0")
        for name in ("responses_store_count", "responses_store_bytes", "max_background_responses"):
            _check(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        _check(self.responses_store_seconds > 0, "responses_store_seconds",
               self.responses_store_seconds, "above 0")  # fmt: skip
        for name in ("h11_max_incomplete_event_size", "h11_max_header_count", "max_body_bytes"):
            _check(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        _check(self.max_log_len is None or self.max_log_len >= 0, "max_log_len", self.max_log_len,
               "at least 0")  # fmt: skip
        root = self.root_path
        _check(not root or (root.startswith("/") and not root.endswith("/")), "root_path", root,
               "empty, or begin with '/' and not end with it")  # fmt: skip
        _check(all(self.api_key), "api_key", "", "non-empty strings")
        _check_choice("api_key_scope", self.api_key_scope, ("all", "v1"))
        _check_choice("uvicorn_log_level", self.uvicorn_log_level, LOG_LEVELS)
        _check_choice("chat_template_content_format", self.chat_template_content_format,
                      ("auto", "string", "openai"))  # fmt: skip
        _check_choice("ssl_cert_reqs", self.ssl_cert_reqs, (0, 1, 2))
        _check((self.ssl_keyfile is None) or (self.ssl_certfile is not None), "ssl_certfile",
               self.ssl_certfile, "given along with ssl_keyfile")  # fmt: skip
        _check(self.ssl_cert_reqs == 0 or self.ssl_ca_certs is not None, "ssl_cert_reqs",
               self.ssl_cert_reqs, "0 unless ssl_ca_certs is given")  # fmt: skip
        _check(not self.enable_auto_tool_choice or self.tool_call_parser is not None,
               "enable_auto_tool_choice", self.enable_auto_tool_choice,
               "given along with tool_call_parser")  # fmt: skip
        _check(self.tool_call_parser is None or self.enable_auto_tool_choice, "tool_call_parser",
               self.tool_call_parser, "given along with enable_auto_tool_choice")  # fmt: skip
        _check(bool(self.response_role), "response_role", self.response_role, "a non-empty string")
        _check(_is_metric_prefix(self.metrics_prefix), "metrics_prefix", self.metrics_prefix,
               "empty, or letters, digits, '_' and ':', not beginning with a digit")  # fmt: skip


def read_chat_template(settings: ServerSettings) -> str | None:
    """The template of ``settings.chat_template``: a file's text, or the setting itself.

    Raises:
        ConfigError: it is neither a readable file nor a Jinja template.
    """
    given = settings.chat_template
    if given is None:
        return None
    if "\n" not in given and len(given) < 4096 and Path(given).is_file():
        try:
            return Path(given).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"chat_template = {given!r}: could not be read ({type(error).__name__})",
                field="chat_template",
            ) from error
    if any(mark in given for mark in _JINJA_MARKS):
        return given
    raise ConfigError(
        f"chat_template = {given[:200]!r}: must be an existing file or a Jinja template (it holds "
        "none of '{{', '{%', '{#')",
        field="chat_template",
    )


def _is_metric_prefix(text: str) -> bool:
    return text == "" or (text.isascii() and text.replace(":", "_").isidentifier())


def _check(condition: bool, name: str, value: object, accepted: str) -> None:
    if not condition:
        raise ConfigError(f"{name} = {value!r}: must be {accepted}", field=name)


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    _check(value in choices, name, value, "one of " + ", ".join(map(repr, choices)))
