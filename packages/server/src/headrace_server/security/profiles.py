"""Two profiles of settings: compatible, the default, and hardened, for a server that faces a network.

One table. A setting that it names is ``None`` until the profile fills it in, so whatever the operator
sets wins, except where the hardened profile refuses it by name (:func:`check`).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace_core.errors import ConfigError

if TYPE_CHECKING:
    from headrace_core.served_model import ServedModel
    from headrace_server.settings import ServerSettings

HARDENED_VARIABLE = "HEADRACE_HARDENED"
MIN_KEY_LENGTH = 22
"""Characters of a key under the hardened profile: 128 bits in base64."""


HARDENED_CONNECTIONS = 256
"""Connections that one address may hold under the hardened profile."""
FEW_CONNECTIONS = 16
"""Connections that one address may always hold, however few there may be in all."""
LARGEST_BODY, HARDENED_BODY = 64 << 20, 16 << 20
BODY_WITHOUT_TEXT = 4 << 20
"""Bytes of a body for tools, schemas and the like, or for many short texts."""
_TEXTLESS = frozenset({"transcription", "plugin"})
BODY_BYTES_PER_TOKEN = 256
"""Bytes of a body for each token of the context: of a long token, or of many texts."""


class ProfileSetting(NamedTuple):
    """A setting's values in the two profiles."""

    name: str
    compatible: Any
    hardened: Any
    risk: str = ""
    """Risk that the compatible value leaves open; "" = nothing worth a warning."""


TABLE = (
    ProfileSetting("check_hosts", False, True, "any Host header is taken (DNS rebinding)"),
    ProfileSetting("check_origin", False, True, "web pages of any origin can send requests to this port"),
    ProfileSetting("strict_requests", False, True, "unknown request fields are ignored"),
    ProfileSetting("trust_request_chat_template", False, False),
    ProfileSetting("prefix_cache_scope", "shared", "key",
        "requests with different keys share cached prefixes, which shows in their latency"),
    ProfileSetting("h11_max_incomplete_event_size", 4 << 20, 64 << 10),
    ProfileSetting("h11_max_header_count", 256, 100),
    ProfileSetting("min_body_rate", 0, 1024, "a body may be sent as slowly as body_timeout allows"),
    ProfileSetting("request_limits", {},
        {"n": 16, "prompt": 256, "stop": 16, "logit_bias": 1024, "bad_words": 256, "tools": 128},
        "one request may ask for 128 completions of 2,048 prompts"),
    ProfileSetting("max_connections", 4096, 2048),
)  # fmt: skip
"""Section 0a and the limits of section 5 of the security requirements, as far as they are settings
of the HTTP front end."""


STRUCTURED_OUTPUT_LIMITS: Mapping[str, Any] = {
    "compile_seconds": 2.0, "max_source_bytes": 64 << 10, "max_depth": 32, "max_regex_length": 1024,
}  # fmt: skip
"""Settings of structured output that the hardened profile changes
(:class:`headrace_core.config.StructuredOutputsConfig`)."""

MAX_AUDIO_SECONDS = 3600.0
"""Longest audio file under the hardened profile, in seconds
(:class:`headrace_core.config.SpeechConfig`)."""


def resolve(settings: ServerSettings) -> Iterator[tuple[str, Any]]:
    """(name, value) of the settings that the profile decides."""
    for row in TABLE:
        if getattr(settings, row.name) is None:
            yield row.name, row.hardened if settings.hardened else row.compatible


def body_limit(settings: ServerSettings, model: ServedModel | None) -> int:
    """Bytes of a request body: what the operator says; else what requests to this model may need.

    Args:
        model: None: several models, which come and go.
    """
    if settings.max_body_bytes is not None:
        return settings.max_body_bytes
    most = HARDENED_BODY if settings.hardened else LARGEST_BODY
    if model is None or model.modalities or model.prompt_embeds or _TEXTLESS & set(model.tasks):
        return most  # their bodies hold more than text
    return min(most, BODY_WITHOUT_TEXT + BODY_BYTES_PER_TOKEN * model.max_model_len)


def check(settings: ServerSettings) -> None:
    """Refuse what the hardened profile does not allow.

    Raises:
        ConfigError: naming the setting.
    """
    if not settings.hardened:
        return
    _refuse(settings.dev_mode, "dev_mode", "development routes are not for a network")
    _refuse(
        settings.trust_request_chat_template,
        "trust_request_chat_template",
        "requests may not bring templates",
    )
    _refuse(
        settings.allow_runtime_lora_updating and settings.allowed_lora_path is None,
        "allow_runtime_lora_updating",
        "say in which folder adapters lie (allowed_lora_path)",
    )
    _refuse("*" in settings.allowed_origins, "allowed_origins", "name the origins instead of '*'")
    _refuse(
        bool(settings.api_key) or bool(settings.admin_api_key),
        "api_key" if settings.api_key else "admin_api_key",
        "a command line is visible to others; use the file or the environment",
    )
    _refuse(settings.api_key_scope != "all", "api_key_scope", "every route but health needs a key")


def check_listening(settings: ServerSettings, num_keys: int) -> None:
    """Refuse to listen beyond this machine without a key, under the hardened profile.

    Raises:
        ConfigError: naming host and keys.
    """
    if settings.hardened and not num_keys and not is_local(settings.host, settings.uds):
        raise ConfigError(
            f"host = {settings.host!r}: with --hardened, a server without keys listens on loopback "
            "only; set HEADRACE_API_KEY or --api-key-file",
            field="host",
        )


def check_metrics(settings: ServerSettings, num_keys: int) -> None:
    """Refuse to protect metrics by a key where there is none.

    Raises:
        ConfigError: naming setting and keys.
    """
    if settings.protect_metrics and not num_keys:
        raise ConfigError(
            "protect_metrics = True: needs a key; set HEADRACE_API_KEY or --api-key-file",
            field="protect_metrics",
        )


def connections_per_peer(settings: ServerSettings) -> int:
    """Open connections that one address may hold; 0: as many as there may be."""
    if settings.max_connections_per_peer is not None:
        return settings.max_connections_per_peer
    total = settings.max_connections
    share = HARDENED_CONNECTIONS if settings.hardened else max(total // 2, FEW_CONNECTIONS)
    return share if share < total else 0


def check_key(settings: ServerSettings, key: str, where: str) -> None:
    """Refuse a short key, under the hardened profile. The key is not shown.

    Raises:
        ConfigError: naming where it came from.
    """
    if settings.hardened and len(key) < MIN_KEY_LENGTH:
        raise ConfigError(
            f"{where}: a key of {len(key)} characters; with --hardened, keys have at least "
            f"{MIN_KEY_LENGTH} (128 bits): python -c 'import secrets; print(secrets.token_urlsafe())'",
            field=where,
        )


def is_local(host: str, uds: str | None) -> bool:
    """True if only this machine reaches the address."""
    if uds is not None or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def warnings(settings: ServerSettings, num_keys: int) -> list[str]:
    """Risks that this configuration leaves open, one line each, for the log of the start."""
    lines = []
    local = is_local(settings.host, settings.uds)
    if not num_keys and not local:
        lines.append(
            f"listening on {settings.host or 'all interfaces'} without a key: anybody who reaches "
            "this port can use the model and read /metrics; set HEADRACE_API_KEY or --api-key-file"
        )
    if settings.api_key_scope == "v1" and num_keys:
        lines.append("api_key_scope = v1: routes outside /v1 need no key")
    if settings.dev_mode:
        lines.append("dev_mode: development routes are served; they must not face users")
    if settings.allow_runtime_lora_updating:
        where = settings.allowed_lora_path or "any folder of this machine"
        lines.append(
            "allow_runtime_lora_updating: whoever has the key of control routes can load adapters from "
            f"{where}, and change what a name stands for; not for production"
        )
    if "*" in settings.allowed_origins:
        lines.append("allowed_origins = *: web pages of any origin may read answers")
    if settings.trust_request_chat_template:
        lines.append("trust_request_chat_template: requests bring their own templates")
    if not local:
        if settings.max_connections_per_peer == 0:
            lines.append("max_connections_per_peer = 0: one peer may hold all connections")
        for row in TABLE:
            value = getattr(settings, row.name)
            if row.risk and value == row.compatible and value != row.hardened:
                lines.append(f"{row.name} = {value}: {row.risk}")
    return lines


def _refuse(condition: bool, name: str, reason: str) -> None:
    if condition:
        raise ConfigError(f"{name}: not with --hardened: {reason}", field=name)
