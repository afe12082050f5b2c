"""Settings of the router."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import urlsplit

from headrace_core.config import option, require
from headrace_core.errors import ConfigError

KEY_VARIABLE = "HEADRACE_SERVER_API_KEY"
FRONTEND = frozenset({
    "host", "port", "uds", "root_path", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs",
    "enable_ssl_refresh", "hardened", "h11_max_incomplete_event_size", "h11_max_header_count",
    "max_body_bytes", "header_timeout", "body_timeout", "min_body_rate", "max_connections",
    "max_connections_per_peer", "drain_timeout", "api_key", "api_key_file", "api_key_scope",
    "protect_metrics", "allowed_origins", "allowed_methods", "allowed_headers", "allow_credentials",
    "check_hosts", "allowed_hosts", "check_origin", "enable_control_routes", "dev_mode", "admin_api_key",
    "admin_api_key_file", "enable_request_id_headers", "metrics_prefix", "log_format", "log_config_file",
    "uvicorn_log_level", "disable_uvicorn_access_log", "quiet_paths",
})  # fmt: skip
"""Settings of a server (:class:`headrace_server.settings.ServerSettings`) that a router has, too."""


class KVEventAddress(NamedTuple):
    """Where one server publishes its KV events."""

    endpoint: str
    replay_endpoint: str | None


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """The servers, and how requests are spread over them.

    Raises:
        ConfigError: naming the field, its value and what would be accepted.
    """

    server: tuple[str, ...] = option(
        (), "URL of a server, as http://127.0.0.1:8001; may be repeated. Requests go to the one that has "
        "seen the longest part of their beginning.",
    )  # fmt: skip
    prefill: tuple[str, ...] = option(
        (), "URL of a server that computes prompts for those of --decode; may be repeated. Both kinds need "
        "a --kv-transfer-config by which blocks go from one to the other.",
    )  # fmt: skip
    decode: tuple[str, ...] = option(
        (), "URL of a server that answers, with prompts that servers of --prefill have computed; may be "
        "repeated. In place of --server.",
    )  # fmt: skip
    server_api_key: str | None = option(
        None, f"Key that the router sends to the servers. Prefer {KEY_VARIABLE}: a command line is visible "
        "to other users. Default: the client's own is passed on.",
    )  # fmt: skip
    kv_events: tuple[str, ...] = option(
        (), "Addresses at which the servers publish KV events, in the order of --server: ENDPOINT, or "
        "ENDPOINT,REPLAY_ENDPOINT. The router then knows what is cached, also after its restart.",
        cost="one more request to a server (/tokenize) for each completion or chat",
    )  # fmt: skip
    max_imbalance: float = option(
        1.5, "Requests in flight at a server, as a multiple of the least busy one's, beyond which it gets "
        "none for its cached prefix.", cost="more spreads load, less keeps prefixes together",
    )  # fmt: skip
    imbalance_slack: int = option(
        8,
        "Requests in flight that a server may have more than the least busy one, whatever max_imbalance.",
    )
    health_interval: float = option(1.0, "Seconds between looks at each server's health.")
    health_timeout: float = option(5.0, "Seconds that a server may take to say that it is healthy.")
    connect_timeout: float = option(5.0, "Seconds that a connection to a server may take.")
    max_failures: int = option(
        3, "Answers in a row that a server breaks off before it gets no more requests; its next good look "
        "brings it back.",
    )  # fmt: skip
    prefix_entries: int = option(
        65536, "Pieces of 128 bytes of prompts that are remembered for each server.", human_int=True,
        cost="about 100 bytes each",
    )  # fmt: skip

    def __post_init__(self) -> None:
        _check_urls(self)
        urls = self.servers
        require(
            len(self.kv_events) in (0, len(urls)), "kv_events", self.kv_events,
            f"one address for each server ({len(urls)}), or none",
        )  # fmt: skip
        for address in self.event_addresses:
            for endpoint in filter(None, address):
                require(_is_endpoint(endpoint), "kv_events", endpoint,
                        "an address as tcp://host:port or ipc://path")  # fmt: skip
        require(self.max_imbalance >= 1, "max_imbalance", self.max_imbalance, "at least 1")
        require(self.imbalance_slack >= 0, "imbalance_slack", self.imbalance_slack, "at least 0")
        for name in ("health_interval", "health_timeout", "connect_timeout"):
            require(getattr(self, name) > 0, name, getattr(self, name), "above 0")
        for name in ("max_failures", "prefix_entries"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")

    @property
    def servers(self) -> list[str]:
        """URLs of the servers that answer, without slashes at their ends."""
        return [url.rstrip("/") for url in self.server or self.decode]

    @property
    def event_addresses(self) -> list[KVEventAddress]:
        """:attr:`kv_events`, taken apart."""
        parts = [text.partition(",") for text in self.kv_events]
        return [KVEventAddress(endpoint, replay or None) for endpoint, _, replay in parts]

    def key_of_servers(self, environ: Mapping[str, str] = os.environ) -> str | None:
        """The key that the servers get; None: the client's own."""
        return self.server_api_key or environ.get(KEY_VARIABLE) or None


def _check_urls(settings: RouterSettings) -> None:
    """Raises: ConfigError: servers are missing, or are no URLs."""
    if not settings.servers:
        raise ConfigError("server: must be given, as --server http://127.0.0.1:8001",
                          field="server")  # fmt: skip
    names = ("server", "prefill", "decode")
    for name in names:
        for url in getattr(settings, name):
            require(_is_server_url(url), name, url,
                    "a URL as http://host:port, without user, query or fragment")  # fmt: skip
            require(not url.rstrip("/").endswith("/v1"), name, url,
                    "the server's URL without /v1: requests bring their own paths")  # fmt: skip
    require(not (settings.server and settings.decode), "decode", settings.decode,
            "left out with --server")  # fmt: skip
    require(bool(settings.prefill) == bool(settings.decode), "prefill", settings.prefill,
            "given with --decode, and only then")  # fmt: skip
    require(not (settings.prefill and settings.kv_events), "kv_events", settings.kv_events,
            "left out with --prefill")  # fmt: skip
    urls = [url.rstrip("/") for name in names for url in getattr(settings, name)]
    name = "server" if settings.server else "prefill"
    require(len(set(urls)) == len(urls), name, tuple(urls), "different URLs")


def _is_server_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        has_address = bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, or an address that is none
        return False
    more = parts.query or parts.fragment or parts.username or parts.password
    return parts.scheme in ("http", "https") and has_address and not more


def _is_endpoint(endpoint: str) -> bool:
    """True if ZeroMQ can connect to an address, whoever may listen there."""
    try:
        parts = urlsplit(endpoint)
        if parts.scheme == "tcp":
            return bool(parts.hostname) and bool(parts.port)
    except ValueError:
        return False
    return parts.scheme == "ipc" and len(endpoint) > len("ipc://")
