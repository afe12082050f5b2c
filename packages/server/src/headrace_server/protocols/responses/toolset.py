"""The tools of a request: functions that the client runs, and tools that this server calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from starlette.exceptions import HTTPException

from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_server.chat.hosted_tools import without_foreign
from headrace_server.chat.tool_choice import check_distinct, check_name, function_tool, shown
from headrace_server.harmony.messages import BUILTIN_TOOLS, split_recipient, tool_kind
from headrace_server.protocols.base import check_size
from headrace_server.tools.base import Namespace, ToolServer, ToolServerUnreachable

Family = Literal["mcp_call", "web_search_call", "code_interpreter_call"]
_FAMILIES: Mapping[str, Family] = {
    "browser": "web_search_call",
    "python": "code_interpreter_call",
}
_REFUSED_MCP = ("server_url", "connector_id", "authorization", "headers", "tunnel_id")


@dataclass(frozen=True, slots=True)
class BuiltinTool:
    """A tool that this server calls."""

    label: str
    """Label of its tool server."""
    tool: str
    family: Family
    """Type of the items that show its calls."""


@dataclass(slots=True)
class ToolSet:
    """Tools that follow from a request's ``tools`` and ``tool_choice``."""

    functions: list[dict[str, Any]] = field(default_factory=list)
    """In the chat's form, for the prompt and the parser; built-in ones too, unless the model's
    format writes those apart."""
    paths: list[str] = field(default_factory=list)
    """Places of the schemas of :attr:`functions` in the request; the server, for a server's tools."""
    choice: str | dict[str, Any] | None = None
    """``tool_choice`` of the chat; None without tools."""
    builtin: dict[str, BuiltinTool] = field(default_factory=dict)
    """By the name that the model calls."""
    namespaces: tuple[Namespace, ...] = ()
    """Built-in tools of models whose format writes them apart."""
    client_names: frozenset[str] = frozenset()
    harmony: bool = False
    """The model writes whom a call is for."""

    def find(self, name: str) -> BuiltinTool | None:
        """The built-in tool of a call; None: the client's function.

        A call for a server that was not offered is one of a tool that does not exist: it fails and
        the model is told.
        """
        if name in self.client_names:
            return None
        found = self.builtin.get(name)
        if found is None and self.harmony and tool_kind(name) != "function":
            label, tool = split_recipient(name)
            if label != tool or label in BUILTIN_TOOLS.values():
                return BuiltinTool(label, tool, _FAMILIES.get(label, "mcp_call"))
        return found


async def resolve_tools(
    tools: Sequence[Mapping[str, Any]],
    choice: str | Mapping[str, Any],
    server: ToolServer | None,
    note: Callable[[str], None],
    *,
    harmony: bool,
) -> ToolSet:
    """Check a request's tools, and ask the tool servers for theirs.

    Args:
        note: is told of what is left out.

    Raises:
        RequestError: naming the tool, or ``tool_choice``.
        HTTPException: 424, a tool server does not answer.
    """
    check_size("tools", list(tools))
    check_size("tool_choice", choice)
    result = ToolSet(harmony=harmony)
    wanted: list[tuple[str, Namespace, Family]] = []
    own = tuple(BUILTIN_TOOLS) if server is not None else ()
    for index, tool in without_foreign(tools, note, own):
        where, kind = f"tools[{index}]", tool.get("type")
        if kind == "function":
            result.functions.append(_function(where, tool))
            result.paths.append(f"{where}.parameters")
        elif kind == "mcp":
            wanted.append((where, await _mcp(where, tool, server), "mcp_call"))
        elif isinstance(kind, str) and kind in BUILTIN_TOOLS:
            label = BUILTIN_TOOLS[kind]
            space = await _namespace(where, label, None, server)
            wanted.append((where, space, _FAMILIES.get(label, "mcp_call")))
        else:
            raise UnsupportedFeature(
                f"{where}: tools of type {str(kind)[:64]!r} are not supported; supported: function, mcp, "
                + ", ".join(sorted(BUILTIN_TOOLS)),
                param=f"{where}.type",
            )
    check_distinct(result.functions, result.paths)  # allowed_tools may leave one of them out
    result.client_names = frozenset(f["function"]["name"] for f in result.functions)
    for where, space, family in wanted:
        _offer(result, where, space, family, harmony)
    _choose(result, choice)
    return result


def _function(where: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    """The flat form as the chat's nested form."""
    name = check_name(f"{where}.name", tool.get("name"))
    return function_tool(name, tool.get("description"), tool.get("parameters"), tool.get("strict"))


async def _mcp(where: str, tool: Mapping[str, Any], server: ToolServer | None) -> Namespace:
    label = tool.get("server_label")
    if not isinstance(label, str):
        raise RequestError(f"{where}.server_label: must be a string", param=f"{where}.server_label")
    for name in _REFUSED_MCP:
        if tool.get(name) is not None:
            raise UnsupportedFeature(
                f"{where}.{name}: only the tool servers that the operator named are called "
                "(--tool-server); leave it out",
                param=f"{where}.{name}",
            )
    if tool.get("require_approval") not in (None, "never"):
        raise UnsupportedFeature(
            f"{where}.require_approval: must be 'never'; calls are made without asking",
            param=f"{where}.require_approval",
        )
    return await _namespace(where, label, _allowed(where, tool.get("allowed_tools")), server)


def _allowed(where: str, given: Any) -> list[str] | None:
    names = given.get("tool_names") if isinstance(given, dict) else given
    if names is None:
        if given:
            raise UnsupportedFeature(
                f"{where}.allowed_tools: must be a list of names, or hold tool_names",
                param=f"{where}.allowed_tools",
            )
        return None
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise RequestError(
            f"{where}.allowed_tools: must be a list of names", param=f"{where}.allowed_tools"
        )
    return names


async def _namespace(
    where: str, label: str, names: list[str] | None, server: ToolServer | None
) -> Namespace:
    if server is None:
        raise UnsupportedFeature(
            f"{where}: this server calls no tools (--tool-server is not set)", param=where
        )
    try:
        space = await server.describe(label, names)
        known = sorted(await server.namespaces()) if space is None else []
    except ToolServerUnreachable as error:
        raise HTTPException(424, f"{where}: a tool server does not answer") from error
    if space is None:
        raise RequestError(
            f"{where}: tool server {label[:64]!r} is not known; known: "
            + (", ".join(known) or "none"),
            param=where,
        )
    return space


def _offer(result: ToolSet, where: str, space: Namespace, family: Family, harmony: bool) -> None:
    if harmony:
        result.namespaces += (space,)
    for tool in space.tools:
        taken = result.client_names | result.builtin.keys()
        if harmony:
            name = space.label if space.label == tool.name else f"{space.label}.{tool.name}"
        else:
            name = tool.name if tool.name not in taken else f"{space.label}_{tool.name}"
        if name in taken:
            raise RequestError(f"{where}: two tools are called {name[:64]!r}", param=where)
        result.builtin[name] = BuiltinTool(space.label, tool.name, family)
        if not harmony:
            result.functions.append(function_tool(name, tool.description, tool.schema))
            result.paths.append(where)


def _choose(result: ToolSet, choice: str | Mapping[str, Any]) -> None:
    if isinstance(choice, str):
        result.choice = _word(result, choice)
    elif choice.get("type") == "function" and isinstance(choice.get("name"), str):
        if not result.functions:
            raise RequestError(f"tool_choice = {shown(choice)}: needs tools", param="tool_choice")
        result.choice = {"type": "function", "function": {"name": choice["name"]}}
    elif choice.get("type") == "allowed_tools":
        _allow(result, choice)
    else:
        raise UnsupportedFeature(
            f"tool_choice = {shown(choice)}: must be 'auto', 'none', 'required', "
            "{'type': 'function', 'name': ...} or {'type': 'allowed_tools', ...}",
            param="tool_choice",
        )


def _word(result: ToolSet, word: str) -> str | None:
    if word == "auto" and not result.functions:
        return None
    return word


def _allow(result: ToolSet, choice: Mapping[str, Any]) -> None:
    """Leave out all functions but the allowed ones."""
    allowed, mode = choice.get("tools"), choice.get("mode", "auto")
    if not isinstance(allowed, list) or mode not in ("auto", "required"):
        raise RequestError(
            "tool_choice: allowed_tools needs tools (a list) and mode (auto or required)",
            param="tool_choice",
        )
    names, labels = _texts(allowed, "name"), _texts(allowed, "server_label")

    def is_allowed(name: str) -> bool:
        builtin = result.builtin.get(name)
        return name in names or (builtin is not None and builtin.label in labels)

    pairs = zip(result.functions, result.paths)
    allowed_ = [(f, path) for f, path in pairs if is_allowed(f["function"]["name"])]
    kept, result.paths = [f for f, _ in allowed_], [path for _, path in allowed_]
    result.functions, result.choice = kept, _word_of(kept, mode)
    result.builtin = {n: b for n, b in result.builtin.items() if is_allowed(n)}
    result.namespaces = tuple(s for s in result.namespaces if s.label in labels)


def _texts(tools: Sequence[Any], key: str) -> set[str]:
    """The texts that tools have under a key."""
    found = (tool.get(key) for tool in tools if isinstance(tool, dict))
    return {text for text in found if isinstance(text, str)}


def _word_of(functions: Sequence[Any], mode: str) -> str | None:
    return mode if functions or mode == "required" else None
