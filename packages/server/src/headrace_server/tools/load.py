"""From ``--tool-server`` to a tool server."""

from __future__ import annotations

from headrace_server.tools.address import DEMO, parse_addresses
from headrace_server.tools.base import ToolServer


def check_tool_server(setting: str | None, *, hardened: bool = False) -> None:
    """True if a setting can be served; asks and starts nothing. For the beginning of a start.

    Args:
        hardened: code that a model wrote runs in a container or not at all.

    Raises:
        ConfigError: an address is malformed, or the demo tools' environment is.
        MissingDependency: naming the package and its install line.
    """
    if setting is None:
        return
    from headrace_server.tools.demo import check_demo
    from headrace_server.tools.mcp import require_mcp

    if setting.strip() == DEMO:
        check_demo(hardened=hardened)
    else:
        parse_addresses(setting)
        require_mcp()


def load_tool_server(setting: str | None) -> ToolServer | None:
    """The server of a setting; None, the default: no tool is called here.

    Raises: as :func:`check_tool_server`.
    """
    if setting is None:
        return None
    from headrace_server.tools.demo import demo_sources
    from headrace_server.tools.mcp import McpToolServer, address_source

    if setting.strip() == DEMO:
        return McpToolServer(demo_sources())
    return McpToolServer([address_source(a) for a in parse_addresses(setting)])
