"""Tries the files, parsers and middleware that the settings name before an engine is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping

from headrace_core.errors import ConfigError
from headrace_server.app import foreign_middleware, gates_of, may_control
from headrace_server.observability.tracing import check_exporter
from headrace_server.parsing.registry import load_parsers
from headrace_server.run import keep_alive_seconds, stays_when_dead
from headrace_server.security.tls import check_certificates
from headrace_server.settings import ServerSettings
from headrace_server.tools.load import check_tool_server


def try_settings(settings: ServerSettings, environ: Mapping[str, str] = os.environ) -> None:
    """Read, import and look up whatever the settings and the environment name, and keep none of it.
    Takes no address and asks nobody.

    Raises:
        ConfigError: a file, key, middleware or variable cannot be used; names it.
        PluginError: a parser cannot be had.
        MissingDependency: a library that is needed is absent.
    """
    check_certificates(settings)
    gates = gates_of(settings)
    if settings.enable_control_routes:
        may_control(settings, gates)
    if settings.api_key_scope != "all" and not gates.public:
        raise ConfigError(
            f"api_key_scope = {settings.api_key_scope!r}: must be set together with a key "
            "(HEADRACE_API_KEY, --api-key-file); without one every route is open",
            field="api_key_scope",
        )
    load_parsers(settings)
    for path in settings.middleware:
        foreign_middleware(path)
    check_tool_server(settings.tool_server, hardened=settings.hardened)
    if settings.otlp_traces_endpoint is not None:
        check_exporter(environ)
    keep_alive_seconds(environ)
    stays_when_dead(environ)
