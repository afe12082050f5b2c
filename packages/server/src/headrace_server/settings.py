"""All settings of the HTTP front end. The meta-package turns each field into a flag."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from headrace_core.config import option
from headrace_core.errors import ConfigError
from headrace_server.lora.modules import parse_modules
from headrace_server.security import profiles

MAX_API_SERVERS = 64
LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")
_JINJA_MARKS = ("{{", "{%", "{#")


LIMITED_FIELDS = ("n", "prompt", "stop", "logit_bias", "bad_words", "tools")
"""Fields of requests for which ``request_limits`` may hold a limit."""


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
    enable_ssl_refresh: bool = option(
        False, "Reload certificate chain, key and CA file when they change on disk."
    )
    hardened: bool = option(
        False, "Safe values for all settings that matter on an untrusted network (docs: security); also "
        "HEADRACE_HARDENED=1.",
    )  # fmt: skip
    h11_max_incomplete_event_size: int = option(
        None, "Most bytes of an incomplete request head. Default: 4 MiB; hardened: 64 KiB.",
        human_int=True,
    )  # fmt: skip
    h11_max_header_count: int = option(
        None, "Most header lines of a request; more is a 431. Default: 256; hardened: 100."
    )
    max_body_bytes: int | None = option(
        None, "Most bytes of a request body; more is a 413. Default: 4 MiB and 256 bytes for each token "
        "of the context, for models that take media or embeddings 64 MiB; at most 64 MiB, hardened: "
        "16 MiB.",
        human_int=True,
    )  # fmt: skip
    max_answer_numbers: int = option(
        1 << 26, "Most numbers of one answer of /v1/embeddings, /classify and /pooling (inputs, times "
        "tokens where there is a row for each, times the size of a row); more is a 400 before "
        "anything is computed.", human_int=True,
    )  # fmt: skip
    header_timeout: float = option(
        10.0,
        "Seconds that a client may take to send a request's head; then the connection is closed.",
    )
    body_timeout: float = option(
        60.0, "Seconds that a client may take to send a request's body; more is a 408."
    )
    min_body_rate: int = option(
        None, "Least bytes per second of a request body, after one second of grace; a slower body is a 408. "
        "Default: 0 (none); hardened: 1024.",
    )  # fmt: skip
    max_connections: int = option(
        None, "Most open connections; more are a 503. Default: 4096; hardened: 2048."
    )
    request_limits: Mapping[str, int] = option(
        None, "JSON: limits of one request, by field: n, prompt (prompts), stop, "
        "logit_bias, bad_words, tools. Default: the limits in the OpenAPI document; hardened: lower ones.",
    )  # fmt: skip
    max_connections_per_peer: int | None = option(
        None, "Most open connections of one address; more are closed. 0: no limit, for a server behind "
        "a proxy. Default: half of max_connections; hardened: 256.",
    )  # fmt: skip
    api_server_count: int = option(
        1, "HTTP processes that share the port and one engine process; for many cores and many streams.",
        cost="a process of some 150 MB each; no stored responses; limits of queue and connections "
        "are split evenly", other_flag="-asc",
    )  # fmt: skip
    drain_timeout: float = option(
        15.0, "Seconds to finish running requests after SIGTERM or SIGINT."
    )
    api_key: tuple[str, ...] = option(
        (), "Key that clients must send as 'Authorization: Bearer KEY'; may be repeated. Prefer "
        "--api-key-file or HEADRACE_API_KEY: a command line is visible to other users.",
    )  # fmt: skip
    api_key_file: str | None = option(
        None, "File with one key per line, or a name and a key; reloaded when it changes."
    )
    api_key_scope: Literal["all", "v1"] = option(
        "all", "Routes that need a key: all (but /health, /livez, /readyz, /ping, /version, "
        "/metrics), or v1 (only paths below /v1).",
    )  # fmt: skip
    protect_metrics: bool = option(
        False, "Require a key for /metrics, whatever api_key_scope is; refused without keys."
    )
    allowed_origins: tuple[str, ...] = option(
        (), "Web origins that may call this server from a browser (CORS); a list, or a JSON list. "
        "Default: none.", json_list=True,
    )  # fmt: skip
    allowed_methods: tuple[str, ...] = option(
        ("*",), "Methods that those origins may use.", json_list=True
    )
    allowed_headers: tuple[str, ...] = option(
        ("*",), "Headers that those origins may use.", json_list=True
    )
    allow_credentials: bool = option(False, "Allow those origins to send credentials.")
    check_hosts: bool = option(
        None, "Refuse requests unless their Host is in allowed_hosts, is the server's address, or is "
        "loopback. Default: off; on if hardened.",
    )  # fmt: skip
    allowed_hosts: tuple[str, ...] = option(
        (), "Host names of this server, without port; enables check_hosts.",
        json_list=True,
    )  # fmt: skip
    check_origin: bool = option(
        None, "Refuse requests of web pages unless their origin is this server or in allowed_origins. "
        "Default: off; on if hardened.",
    )  # fmt: skip
    prefix_cache_scope: Literal["shared", "key"] = option(
        None, "Sharing of cached prefixes: shared (all requests) or key (only requests with the same "
        "key). Default: shared; hardened: key.",
    )  # fmt: skip
    enable_control_routes: bool = option(
        False, "Serve /pause, /resume, /reset_prefix_cache and the like; needs a key."
    )
    dev_mode: bool = option(
        False, "Serve control routes and those for development (/collective_rpc, /server_info), on "
        "loopback also without a key; also HEADRACE_SERVER_DEV_MODE=1. Not for users.",
    )  # fmt: skip
    admin_host: str = option("127.0.0.1", "Address of the admin port.")
    admin_port: int | None = option(
        None, "Serve control routes on this port and not on the public one."
    )
    admin_api_key: tuple[str, ...] = option(
        (), "Key of control routes, instead of api_key; prefer --admin-api-key-file or "
        "HEADRACE_ADMIN_API_KEY.",
    )  # fmt: skip
    admin_api_key_file: str | None = option(
        None, "File with keys of control routes, in the format of api_key_file."
    )
    lora_modules: tuple[str, ...] = option(
        (), "Adapters (LoRA) to begin with, each chosen by its name as a request's model: name=path, a JSON "
        "object with name, path and perhaps base_model_name, or a JSON list of such; needs --enable-lora.",
    )  # fmt: skip
    allow_runtime_lora_updating: bool = option(
        False, "Let adapters come and go: serve /v1/load_lora_adapter and /v1/unload_lora_adapter, which "
        "need a key, and ask resolvers for unknown names. Also HEADRACE_ALLOW_RUNTIME_LORA_UPDATING=1.",
    )  # fmt: skip
    allowed_lora_path: str | None = option(
        None, "Folder in which adapters must lie that /v1/load_lora_adapter loads. Default: any folder of "
        "this machine.",
    )  # fmt: skip
    middleware: tuple[str, ...] = option(
        (), "Import path of an ASGI middleware class or an HTTP middleware function; repeatable."
    )
    enable_request_id_headers: bool = option(
        False, "Send X-Request-Id in answers: the request's own, or a random one."
    )
    disable_fastapi_docs: bool = option(False, "No OpenAPI document, Swagger page or ReDoc page.")
    strict_requests: bool = option(
        None, "Refuse unknown fields of a request body with a 400 that names the nearest known field. "
        "Default: off; on if hardened.",
    )  # fmt: skip
    response_role: str = option("assistant", "Role of answers to a chat.")
    chat_template: str | None = option(
        None, "File with a chat template, or the template itself; replaces the model's."
    )
    chat_template_content_format: Literal["auto", "string", "openai"] = option(
        "auto",
        "Form of message content that the template expects: string, openai (a list of parts), "
        "or auto (detected).",
    )
    trust_request_chat_template: bool = option(
        None, "Accept a chat_template from requests. Default: off; refused if hardened."
    )
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
        None,
        "Format of this model's tool calls: deepseek_v3, deepseek_v31, deepseek_v32, ernie45, "
        "functiongemma, gigachat3, glm45, glm47, granite, granite-20b-fc, hermes, "
        "hunyuan_a13b, internlm, jamba, kimi_k2, llama3_json, llama4_json, llama4_pythonic, "
        "longcat, minimax, minimax_m2, mistral, olmo3, openai, phi4_mini_json, pythonic, "
        "qwen3_coder, qwen3_xml, seed_oss, step3, xlam, or a plug-in's name (headrace plugins "
        "tool_parsers).",
    )  # fmt: skip
    tool_parser_plugin: str | None = option(
        None, "Python file that registers more names for --tool-call-parser."
    )
    reasoning_parser: str | None = option(
        None,
        "Format of this model's reasoning: deepseek_r1, deepseek_v3, ernie45, glm45, "
        "granite, holo2, hunyuan_a13b, kimi_k2, minimax_m2, minimax_m2_append_think, mistral, "
        "olmo3, openai_gptoss, qwen3, seed_oss, step3, or a plug-in's name (headrace plugins "
        "reasoning_parsers).",
    )  # fmt: skip
    reasoning_parser_plugin: str | None = option(
        None, "Python file that registers more names for --reasoning-parser."
    )
    enable_responses_store: bool = option(
        False, "Keep responses (/v1/responses): needed for previous_response_id, background and "
        "GET. HEADRACE_ENABLE_RESPONSES_API_STORE=1 does the same.",
    )  # fmt: skip
    responses_store_count: int = option(1000, "Most responses to keep.")
    responses_store_bytes: int = option(
        256 * 1024 * 1024, "Most bytes of kept responses, events included.", human_int=True
    )
    responses_store_seconds: float = option(
        24 * 3600.0, "Seconds after its last use at which a response is deleted."
    )
    max_background_responses: int = option(
        64, "Most responses that run in the background at once; more is a 429."
    )
    tool_server: str | None = option(
        None, "Servers of built-in tools (MCP): host:port, separated by commas; or demo: the "
        "browser and python tools of the gpt-oss package, in child processes (they need Docker and "
        "a search service's key). Default: none.",
    )  # fmt: skip
    return_tokens_as_token_ids: bool = option(
        False, "Show tokens in log-probabilities as token_id:N."
    )
    enable_prompt_tokens_details: bool = option(False, "Report cached prompt tokens in usage.")
    enable_force_include_usage: bool = option(
        False, "Send usage at the end of every stream, also without stream_options."
    )
    tokens_only: bool = option(
        False, "Serve only tokens in and tokens out (/inference/v1/generate), health, metrics and "
        "models; for deployments that tokenize elsewhere.",
    )  # fmt: skip
    enable_tokenizer_info_endpoint: bool = option(
        False, "Serve GET /tokenizer_info, which may show the chat template."
    )
    enable_server_load_tracking: bool = option(False, "Count requests in flight for GET /load.")
    metrics_prefix: str = option("headrace:", "Prefix of all metric names.")
    disable_log_stats: bool = option(False, "No /metrics, and no log lines about throughput.")
    otlp_traces_endpoint: str | None = option(
        None, "URL of an OpenTelemetry collector (http/protobuf), such as "
        "http://localhost:4318/v1/traces; the server exports one span per request.",
    )  # fmt: skip
    enable_log_requests: bool = option(
        False, "Log each request: id and parameters at INFO, prompt at DEBUG."
    )
    enable_log_outputs: bool = option(
        False, "Log each output: id, text, token ids, finish reason; needs enable_log_requests."
    )
    max_log_len: int | None = option(
        None,
        "Most characters or token ids of prompts and outputs in a log line. Default: no limit.",
    )
    log_responses: bool = option(
        False, "Log the body of every answer (for streams, the text); also "
        "HEADRACE_DEBUG_LOG_API_SERVER_RESPONSE=1.",
        cost="streams take the slow way through all middleware",
    )  # fmt: skip
    log_error_stack: bool | None = option(
        None, "Log the stack of every error answer. Default: only of unexpected ones; all in "
        "dev_mode.",
    )  # fmt: skip
    log_format: Literal["text", "json"] = option(
        "text",
        "Format of log lines: text, or one JSON object per line; also HEADRACE_LOGGING_FORMAT.",
    )
    log_config_file: str | None = option(
        None, "JSON file for logging.config.dictConfig, which configures all logging; "
        "also HEADRACE_LOGGING_CONFIG_PATH.",
    )  # fmt: skip
    uvicorn_log_level: Literal["critical", "error", "warning", "info", "debug", "trace"] = option(
        "info", "Log level of the HTTP layer."
    )
    disable_uvicorn_access_log: bool = option(False, "No log line per HTTP request.")
    disable_access_log_for_endpoints: tuple[str, ...] = option(
        (), "Paths that get no log line per HTTP request, such as /health /metrics."
    )

    def __post_init__(self) -> None:
        for name, value in profiles.resolve(self):
            object.__setattr__(self, name, value)
        if self.allowed_hosts:
            object.__setattr__(self, "check_hosts", True)
        if self.admin_port is not None:
            object.__setattr__(self, "enable_control_routes", True)
        if self.log_error_stack is None:
            object.__setattr__(self, "log_error_stack", self.dev_mode)
        profiles.check(self)
        self._check_operations()
        self._check_values()
        self._check_partners()

    def _check_values(self) -> None:
        """Check each setting by itself."""
        for name in (
            "api_key",
            "allowed_origins",
            "allowed_methods",
            "allowed_headers",
            "middleware",
            "allowed_hosts",
            "admin_api_key",
            "lora_modules",
            "disable_access_log_for_endpoints",
        ):
            _check(not isinstance(getattr(self, name), str), name, getattr(self, name), "a list")
        _check(0 <= self.port <= 65535, "port", self.port, "in 0..65535")
        _check(self.drain_timeout >= 0, "drain_timeout", self.drain_timeout, "at least 0")
        for name in ("responses_store_count", "responses_store_bytes", "max_background_responses"):
            _check(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        _check(self.responses_store_seconds > 0, "responses_store_seconds",
               self.responses_store_seconds, "above 0")  # fmt: skip
        _check(self.max_body_bytes is None or self.max_body_bytes >= 1, "max_body_bytes",
               self.max_body_bytes, "at least 1")  # fmt: skip
        for name in ("h11_max_incomplete_event_size", "h11_max_header_count",
                     "max_answer_numbers"):  # fmt: skip
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
        _check(bool(self.response_role), "response_role", self.response_role, "a non-empty string")
        _check(_is_metric_prefix(self.metrics_prefix), "metrics_prefix", self.metrics_prefix,
               "empty, or letters, digits, '_' and ':', not beginning with a digit")  # fmt: skip

    def _check_operations(self) -> None:
        _check(1 <= self.api_server_count <= MAX_API_SERVERS, "api_server_count",
               self.api_server_count, f"in 1..{MAX_API_SERVERS}")  # fmt: skip
        _check(self.api_server_count == 1 or not self.enable_responses_store,
               "enable_responses_store", self.enable_responses_store,
               "left out with api_server_count above 1: responses are kept in one process and the "
               "next request may reach another")  # fmt: skip
        parse_modules(self.lora_modules)
        folder = self.allowed_lora_path
        _check(folder is None or os.path.isdir(folder), "allowed_lora_path", folder,
               "an existing folder")  # fmt: skip
        for name in ("header_timeout", "body_timeout"):
            value = getattr(self, name)
            _check(0 < value < float("inf"), name, value, "above 0, and finite")
        for name in ("min_body_rate", "max_connections_per_peer"):
            _check((getattr(self, name) or 0) >= 0, name, getattr(self, name), "at least 0")
        for name, most in self.request_limits.items():
            _check(name in LIMITED_FIELDS, "request_limits", name,
                   "one of " + ", ".join(LIMITED_FIELDS))  # fmt: skip
            _check(isinstance(most, int) and most >= 1, f"request_limits.{name}", most,
                   "a whole number, at least 1")  # fmt: skip
        _check(self.max_connections >= 1, "max_connections", self.max_connections, "at least 1")
        _check(self.admin_port is None or 0 <= self.admin_port <= 65535, "admin_port",
               self.admin_port, "in 0..65535")  # fmt: skip
        _check(self.admin_port in (None, 0) or self.admin_port != self.port, "admin_port",
               self.admin_port, "another port than port")  # fmt: skip
        _check(all(self.admin_api_key), "admin_api_key", "", "non-empty strings")
        _check_choice("prefix_cache_scope", self.prefix_cache_scope, ("shared", "key"))
        _check_choice("log_format", self.log_format, ("text", "json"))
        _check(not self.enable_log_outputs or self.enable_log_requests, "enable_log_outputs",
               self.enable_log_outputs, "set together with enable_log_requests")  # fmt: skip
        _check(not self.enable_ssl_refresh or self.ssl_certfile is not None, "enable_ssl_refresh",
               self.enable_ssl_refresh, "set together with ssl_certfile")  # fmt: skip
        _check_endpoint(self.otlp_traces_endpoint)
        for path in self.quiet_paths:
            _check(path.startswith("/"), "disable_access_log_for_endpoints", path,
                   "a path, which begins with '/'")  # fmt: skip
        for origin in self.allowed_origins:
            _check(_is_origin(origin), "allowed_origins", origin,
                   "'*', 'null' or an origin such as https://example.org, without a path")  # fmt: skip

    def _check_partners(self) -> None:
        """Refuse a setting whose partner is absent, without which it has no effect."""
        _check(self.ssl_ca_certs is None or self.ssl_certfile is not None, "ssl_ca_certs",
               self.ssl_ca_certs, "set together with ssl_certfile")  # fmt: skip
        _check(self.admin_host == "127.0.0.1" or self.admin_port is not None, "admin_host",
               self.admin_host, "set together with admin_port")  # fmt: skip
        neutral = {option.name: option.default for option in fields(self)}
        for name in ("allow_credentials", "allowed_methods", "allowed_headers"):
            value = getattr(self, name)
            _check(value == neutral[name] or bool(self.allowed_origins), name, value,
                   "set together with allowed_origins")  # fmt: skip
        for name in ("responses_store_count", "responses_store_bytes", "responses_store_seconds",
                     "max_background_responses"):  # fmt: skip
            value = getattr(self, name)
            _check(value == neutral[name] or self.enable_responses_store, name, value,
                   "set together with enable_responses_store")  # fmt: skip
        _check((self.ssl_keyfile is None) or (self.ssl_certfile is not None), "ssl_certfile",
               self.ssl_certfile, "set together with ssl_keyfile")  # fmt: skip
        _check(self.ssl_cert_reqs == 0 or self.ssl_ca_certs is not None, "ssl_cert_reqs",
               self.ssl_cert_reqs, "0 unless ssl_ca_certs is given")  # fmt: skip
        _check(self.allowed_lora_path is None or self.allow_runtime_lora_updating,
               "allowed_lora_path", self.allowed_lora_path,
               "set together with allow_runtime_lora_updating")  # fmt: skip
        absent = (None, False)
        for name, partner in (
            ("enable_auto_tool_choice", "tool_call_parser"),
            ("tool_call_parser", "enable_auto_tool_choice"),
            ("tool_parser_plugin", "tool_call_parser"),
            ("reasoning_parser_plugin", "reasoning_parser"),
        ):
            value = getattr(self, name)
            _check(value in absent or getattr(self, partner) not in absent, name, value,
                   f"set together with {partner}")  # fmt: skip

    def share(self, limit: int) -> int:
        """One HTTP process's part of a limit of the whole server, rounded up; 0 stays 0."""
        return -(-limit // self.api_server_count)

    @property
    def quiet_paths(self) -> frozenset[str]:
        """:attr:`disable_access_log_for_endpoints`, whose words may hold commas."""
        words = (w for text in self.disable_access_log_for_endpoints for w in text.split(","))
        return frozenset(word.strip() for word in words if word.strip())


ENVIRONMENT: Mapping[str, str] = {
    profiles.HARDENED_VARIABLE: "hardened",
    "HEADRACE_SERVER_DEV_MODE": "dev_mode",
    "HEADRACE_DEBUG_LOG_API_SERVER_RESPONSE": "log_responses",
    "HEADRACE_ENABLE_RESPONSES_API_STORE": "enable_responses_store",
    "HEADRACE_ALLOW_RUNTIME_LORA_UPDATING": "allow_runtime_lora_updating",
}
"""Variable -> boolean setting that it switches on."""


def from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Settings that the environment switches on.

    Raises:
        ConfigError: a variable is neither 0 nor 1.
    """
    found = {}
    for variable, name in ENVIRONMENT.items():
        given = environ.get(variable, "")
        if given not in ("", "0", "1", "true", "false"):
            raise ConfigError(f"{variable} = {given!r}: must be 0 or 1", field=variable)
        if given in ("1", "true"):
            found[name] = True
    return found


def read_chat_template(settings: ServerSettings) -> str | None:
    """The template of ``settings.chat_template``: a file's text, or the setting itself.

    Raises:
        ConfigError: it is neither a readable file nor a Jinja template.
    """
    given = settings.chat_template
    if given is None:
        return None
    if os.path.isfile(given):  # unlike Path's, false for a name that is too long to be one
        try:
            return Path(given).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"chat_template = {given!r} (--chat-template): could not be read "
                f"({type(error).__name__})",
                field="chat_template",
            ) from error
    if any(mark in given for mark in _JINJA_MARKS):
        return given
    raise ConfigError(
        f"chat_template = {given[:200]!r} (--chat-template): must be an existing file or a Jinja "
        "template (it holds none of '{{', '{%', '{#')",
        field="chat_template",
    )


def _check_endpoint(url: str | None) -> None:
    try:
        parts = urlsplit(url or "http://none")
        usable = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port
    except ValueError:
        usable = False
    _check(usable, "otlp_traces_endpoint", url,
           "a URL that begins with http:// or https:// and names a host")  # fmt: skip


def _is_origin(text: str) -> bool:
    return text in ("*", "null") or re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s]+", text) is not None


def _is_metric_prefix(text: str) -> bool:
    return text == "" or (text.isascii() and text.replace(":", "_").isidentifier())


def _check(condition: bool, name: str, value: object, accepted: str) -> None:
    if not condition:
        raise ConfigError(f"{name} = {value!r}: must be {accepted}", field=name)


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    _check(value in choices, name, value, "one of " + ", ".join(map(repr, choices)))
