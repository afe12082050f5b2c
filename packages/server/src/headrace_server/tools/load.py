"""From ``--tool-server`` to a tool server."""

from __future__ import annotations

import importlib.util

from headrace_core.errors import ConfigError, MissingDependency
from headrace_server.tools.address import DEMO, parse_addresses
from headrace_server.tools.base import ToolServer


def load_tool_server(setting: str | None) -> ToolServer | None:
    """The server of a setting; None, the default: no tool is called here.

    Raises:
        ConfigError: an address is malformed, or ``demo`` cannot be served.
        MissingDependency: naming the package and its install line.
    """
    if setting is None:
        return None
    if setting.strip() == DEMO:
        _refuse_demo()
    from headrace_server.tools.mcp import McpToolServer

    return McpToolServer(parse_addresses(setting))


def _refuse_demo() -> None:
    """The demo tools run code in a container and search the web with a key of the operator's."""
    if importlib.util.find_spec("gpt_oss") is None:
        raise MissingDependency(
            "gpt_oss", needed_for="--tool-server demo", install="pip install 'gpt-oss>=0.0.7'"
        )
    raise ConfigError(
        "tool_server = 'demo': the demo tools do not run inside this server; start the MCP servers "
        "of the gpt-oss package and give their addresses, host:port,...",
        field="tool_server",
    )
