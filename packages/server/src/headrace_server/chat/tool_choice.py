"""Tools of a request: which the model may or must call, and how calls are found.

Calls are in the model's own format, read by the parser that the operator chose. A forced call is
a constraint on the output besides: an answer that is nothing but calls in that format. Where no
parser was chosen, or its format cannot write a schema, a forced call is JSON by a schema made of
the tools' own (:func:`calls_schema`), read back by a parser of that form.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_core.sampling.params import StructuredOutputsParams
from headrace_core.text import ToolCallParser
from headrace_server.chat.tool_schemas import (
    DEFINITIONS,
    LITERAL_VALUES,
    NAMED_SCHEMAS,
    NO_SOURCES,
    Sources,
    check_references,
    place,
)
from headrace_server.protocols.base import check_size
from headrace_server.requests.constraints import MAX_SCHEMA_DEPTH, check_schema
from headrace_server.tool_parsers import structural_tags
from headrace_server.tool_parsers.forced import ForcedToolCallParser, NamedToolCallParser
from headrace_server.tool_parsers.streaming_parser import MAX_NAME, NOT_IN_NAMES, is_name

Tool = Mapping[str, Any]
Choice = Literal["none", "auto", "required", "named"]

MAX_FORCED_CALLS = 16
"""Calls of one answer that must call: more than models are trained to make at once, and an end for
those that would go on until ``max_tokens``."""

_MAX_SHOWN = 100
"""Characters of a value that a message quotes."""

MAX_FORM = 1_000_000
"""Characters of a form of forced calls; formats that would need more have them as JSON, whose form
is shorter. Engines take a constraint of 1 MiB by default."""


@dataclass(frozen=True)
class ToolPlan:
    """Tool handling of one request."""

    choice: Choice = "none"
    constraint: StructuredOutputsParams | None = None
    """Constraint on the output that the tools ask for."""
    make_parser: Callable[[], ToolCallParser] | None = None
    """Makes the parser of one answer; None: calls are not sought."""
    needs_special_tokens: bool = False
    """True if that parser reads special tokens."""
    delimiters: Sequence[Mapping[str, Any]] = ()
    """Delimiters of free calls, one ``{"begin", "schema", "end"}`` per tool; () if the format
    does not say."""
    parallel: bool = True
    bare: bool = False
    """Forced calls are JSON whatever the model's own format is."""
    includes_reasoning: bool = False
    """True if :attr:`constraint` describes the reasoning, too; see
    :attr:`ToolCallParser.structural_tags_include_reasoning`."""
    sources: Sources = NO_SOURCES
    """Schemas that :attr:`constraint` is made of."""

    @property
    def forced(self) -> bool:
        """True if there must be a call."""
        return self.choice in ("required", "named")

    @property
    def finish_reason(self) -> str:
        """Finish reason of an answer with calls, where it would otherwise end with ``stop``."""
        return "stop" if self.choice == "named" else "tool_calls"


def plan_tools(
    tools: Sequence[Tool],
    choice: str | Mapping[str, Any] | None,
    chosen: type[ToolCallParser] | None,
    *,
    forces_own: bool = True,
    parallel: bool = True,
    paths: Sequence[str] = (),
) -> ToolPlan:
    """Decide how a request deals with tools.

    Args:
        tools: as OpenAI's chats have them.
        choice: ``none``, ``auto``, ``required``, one function, or None for the default.
        chosen: the operator's parser for free calls.
        forces_own: whether calls may be forced in that parser's format; False: they are JSON.
        parallel: whether there may be more than one call.
        paths: where each tool's schema is in the client's request; (): as in OpenAI's chats.

    Raises:
        RequestError: tools or choice are malformed, contradict each other, or ask for what is not
            served.
    """
    paths = paths or [schema_path(index) for index in range(len(tools))]
    check_tools(tools, paths)
    if choice is None:
        choice = "auto" if tools else "none"
    if choice == "none":
        return ToolPlan()
    if not tools:
        raise RequestError(f"tool_choice = {shown(choice)}: needs tools", param="tool_choice")
    if choice == "auto":
        return _auto(tools, chosen, parallel, paths)
    forced = chosen if forces_own else None
    if choice == "required":
        sources = _sources(tools, tools, paths)
        most = MAX_FORCED_CALLS if parallel else 1
        own = _own_format("required", tools, tools, forced, most, sources)
        return own or ToolPlan(
            "required",
            StructuredOutputsParams(json=calls_schema(tools, most=most)),
            partial(ForcedToolCallParser, tools),
            bare=True,
            sources=sources,
        )
    name = _named(choice)
    tool = next((tool for tool in tools if tool["function"]["name"] == name), None)
    if tool is None:
        raise RequestError(
            f"tool_choice: {name[:64]!r} is not one of the tools", param="tool_choice", value=name
        )
    sources = replace(_sources(tools, [tool], paths), only=tools.index(tool))
    return _own_format("named", tools, [tool], forced, 1, sources) or ToolPlan(
        "named",
        StructuredOutputsParams(json=parameters_of(tool)),
        partial(NamedToolCallParser, tools, name=name),
        bare=True,
        sources=sources,
    )


def schema_path(index: int) -> str:
    """Place of a tool's schema in a chat of OpenAI's."""
    return f"tools[{index}].function.parameters"


def _sources(tools: Sequence[Tool], held: Sequence[Tool], paths: Sequence[str]) -> Sources:
    """The schemas of all tools, of which some will hold.

    Raises:
        RequestError: one of those is too large, or refers to what is not there; names the place.
    """
    for path, tool in zip(paths, tools):
        if any(tool is one for one in held):
            schema = parameters_of(tool)
            check_schema(path, schema)
            check_references(path, schema)
    return Sources([(path, parameters_of(tool)) for path, tool in zip(paths, tools)])


def _own_format(
    choice: Choice,
    tools: Sequence[Tool],
    allowed: Sequence[Tool],
    parser: type[ToolCallParser] | None,
    most: int,
    sources: Sources,
) -> ToolPlan | None:
    """Forced calls in a parser's format; None: it cannot write them.

    Args:
        allowed: the tools that may be called.
        most: largest number of calls.
        sources: the tools' schemas, checked.
    """
    schemas: dict[str, dict[str, Any]] = {}
    for tool in allowed:
        name, schema = tool["function"]["name"], parameters_of(tool)
        schemas[name] = {k: v for k, v in schema.items() if k not in ("$schema", "$id")}
    if parser is None:
        return None
    try:
        form = parser.forced_structural_tag(schemas, most=most) or _delimited_calls(
            parser, schemas, most
        )
    except UnsupportedFeature:
        return None
    if form is None or len(json.dumps(form, ensure_ascii=False)) > MAX_FORM:
        return None
    tag = {"type": "structural_tag", "format": form}
    return ToolPlan(
        choice,
        StructuredOutputsParams(structural_tag=tag),
        partial(parser, tools),
        parser.needs_special_tokens,
        includes_reasoning=parser.structural_tags_include_reasoning,
        sources=sources,
    )


def _delimited_calls(
    parser: type[ToolCallParser], schemas: Mapping[str, Mapping[str, Any]], most: int
) -> structural_tags.StructuralTag | None:
    """The form of forced calls of a parser that only says what stands around arguments."""
    calls = []
    for name, schema in schemas.items():
        delimiters = parser.call_delimiters(name)
        if delimiters is None:
            return None
        calls.append(
            structural_tags.tag(
                delimiters.before, structural_tags.json_schema(schema), delimiters.after
            )
        )
    return structural_tags.answer(structural_tags.up_to(structural_tags.either(*calls), most))


def check_tools(tools: Sequence[Tool], paths: Sequence[str] = ()) -> None:
    """Raises RequestError, naming the tool, unless all are well-formed functions of different names.

    Args:
        paths: where each tool's schema is in the client's request; (): as in OpenAI's chats.
    """
    check_size("tools", list(tools), depth=MAX_SCHEMA_DEPTH)
    paths = paths or [schema_path(index) for index in range(len(tools))]
    for index, tool in enumerate(tools):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            where = paths[index].removesuffix(".function.parameters")
            raise RequestError(
                f"{where}: must be {{'type': 'function', 'function': {{'name': ...}}}}",
                param=where,
            )
        check_name(_name_path(paths[index]), function.get("name"))
        _check_parameters(paths[index], function.get("parameters"))
    check_distinct(tools, paths)


def check_name(field: str, name: object) -> str:
    """The name of a tool, by one rule on every wire: a name that the parsers can read.

    Args:
        field: place of the name in the client's request.

    Raises:
        RequestError: it breaks the rule; names the place.
    """
    if not isinstance(name, str) or not is_name(name):
        shown = f" = {name[:64]!r}" if isinstance(name, str) else ""
        raise RequestError(
            f"{field}{shown}: must be a string of 1 to {MAX_NAME} printable characters, without "
            f"spaces and without any of {NOT_IN_NAMES}",
            param=field,
        )
    return name


def check_distinct(tools: Sequence[Tool], paths: Sequence[str]) -> None:
    """Refuse two tools of one name: nobody could tell which of them a call is for.

    Args:
        tools: well-formed functions.
        paths: where each tool's schema is in the client's request.

    Raises:
        RequestError: names both places.
    """
    places: dict[str, str] = {}
    for path, tool in zip(paths, tools):
        name, where = tool["function"]["name"], _name_path(path)
        if name in places:
            raise RequestError(
                f"{places[name]} and {where} are both {name[:64]!r}: each tool must have a unique name",
                param=where,
            )
        places[name] = where


def _name_path(path: str) -> str:
    """Place of a tool's name, by the place of its schema; of a server's tool, the server's place."""
    tool, dot, _ = path.rpartition(".")
    return f"{tool}.name" if dot else path


def _check_parameters(field: str, schema: object) -> None:
    """Raises RequestError unless it is None or a schema of objects, as a call's arguments are."""
    if schema is False:
        raise RequestError(
            f"{field} = false: must be a JSON schema of an object: no arguments satisfy false, so the tool "
            "could never be called; leave the tool out",
            param=field,
        )
    if not isinstance(schema, (dict, bool, type(None))):
        raise RequestError(f"{field}: must be a JSON schema", param=field)
    kind = schema.get("type", "object") if isinstance(schema, dict) else "object"
    if kind is not None and kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise RequestError(
            f"{field}.type = {kind!r:.100}: must be 'object', because the arguments of a call are an object",
            param=f"{field}.type",
        )


def function_tool(
    name: str, description: object, parameters: object, strict: object = None
) -> dict[str, Any]:
    """A tool in the chat's form. Templates write it as it stands, so whichever protocol it came by, its
    members are in one order: name, description, parameters, strict. None: not given.
    """
    given = {"description": description, "parameters": parameters, "strict": strict}
    known = {key: value for key, value in given.items() if value is not None}
    return {"type": "function", "function": {"name": name, **known}}


def parameters_of(tool: Tool) -> dict[str, Any]:
    """The JSON schema of a call's arguments, which are always an object.

    Args:
        tool: as :func:`check_tools` takes it.
    """
    schema = tool["function"].get("parameters")
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if isinstance(schema, bool):
        return {"type": "object"}
    if schema.keys() & {"type", "$ref", "anyOf", "oneOf", "allOf"}:
        return dict(schema)
    return {"type": "object", **schema}


def calls_schema(tools: Sequence[Tool], *, most: int = MAX_FORCED_CALLS) -> dict[str, Any]:
    """The schema of a list of calls, ``[{"name": ..., "parameters": {...}}, ...]``.

    Each tool's definitions move to the root under names of their own, and references follow.

    Args:
        most: calls allowed.
    """
    definitions: dict[str, Any] = {}
    calls = []
    for index, tool in enumerate(tools):
        parameters = parameters_of(tool)
        where = "#/items" + (f"/anyOf/{index}" if len(tools) > 1 else "") + "/properties/parameters"
        move = partial(_moved, index=index, home=where)
        definitions |= _taken_definitions(parameters, index, move)
        calls.append(_call_schema(tool["function"]["name"], _rewritten(parameters, move)))
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "maxItems": most,
        "items": {"anyOf": calls} if len(calls) > 1 else calls[0],
    }
    if definitions:
        schema["$defs"] = definitions
    return schema


def _call_schema(name: str, parameters: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"type": "string", "enum": [name]}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _taken_definitions(
    parameters: dict[str, Any], index: int, move: Callable[[str], str]
) -> dict[str, Any]:
    """Takes the definitions out of a tool's schema, and what names the schema itself."""
    parameters.pop("$schema", None)
    parameters.pop("$id", None)
    taken: dict[str, Any] = {}
    for keyword, kind in DEFINITIONS.items():
        found = parameters.pop(keyword, None)
        if isinstance(found, dict):
            for name, definition in found.items():
                taken[f"{kind}{index}_{name}"] = _rewritten(definition, move)
    return taken


def _moved(reference: str, *, index: int, home: str) -> str:
    """A reference of one tool's schema, after the move. Others' (``http://...``) stay."""
    for keyword, kind in DEFINITIONS.items():
        if reference.startswith(f"#/{keyword}/"):
            return f"#/$defs/{kind}{index}_" + reference[len(keyword) + 3 :]
    if reference == "#" or reference.startswith("#/"):
        return home + reference[1:]
    return reference


def _rewritten(schema: Any, move: Callable[[str], str]) -> Any:
    """A copy of a schema with its references rewritten. The depth is bounded by the request's."""
    if isinstance(schema, list):
        return [_rewritten(item, move) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword == "$ref" and isinstance(value, str):
            result[keyword] = move(value)
        elif keyword in LITERAL_VALUES:
            result[keyword] = value
        elif keyword in NAMED_SCHEMAS and isinstance(value, dict):
            result[keyword] = {name: _rewritten(below, move) for name, below in value.items()}
        else:
            result[keyword] = _rewritten(value, move)
    return result


def _auto(
    tools: Sequence[Tool], chosen: type[ToolCallParser] | None, parallel: bool, paths: Sequence[str]
) -> ToolPlan:
    if chosen is None:
        raise UnsupportedFeature(
            "tools: this server does not parse tool calls; start it with "
            "--enable-auto-tool-choice --tool-call-parser NAME, or send tool_choice 'none' or "
            f"{structural_tags.FORCING}",
            param="tools",
        )
    strict = [tool for tool in tools if tool["function"].get("strict") is True]
    sources = _sources(tools, strict, paths) if strict else NO_SOURCES
    delimiters = _delimiters_of_tools(tools, chosen)
    return ToolPlan(
        "auto",
        _strict_constraint(tools, chosen, delimiters, paths) if strict else None,
        partial(chosen, tools),
        chosen.needs_special_tokens,
        delimiters,
        parallel,
        includes_reasoning=chosen.structural_tags_include_reasoning,
        sources=sources,
    )


def _delimiters_of_tools(
    tools: Sequence[Tool], chosen: type[ToolCallParser]
) -> list[dict[str, Any]]:
    """Begin, schema of the arguments and end of each tool's calls; [] if the format has no such.

    Only ``strict`` tools are held to their own schemas.
    """
    delimiters = []
    for tool in tools:
        function = tool["function"]
        around = chosen.call_delimiters(function["name"])
        if around is None:
            return []
        schema = parameters_of(tool) if function.get("strict") is True else {"type": "object"}
        delimiters.append({"begin": around.before, "schema": schema, "end": around.after})
    return delimiters


def _strict_constraint(
    tools: Sequence[Tool],
    chosen: type[ToolCallParser],
    delimiters: Sequence[Mapping[str, Any]],
    paths: Sequence[str],
) -> StructuredOutputsParams:
    """Free text, in which calls of ``strict`` tools have arguments by their schemas.

    Raises:
        UnsupportedFeature: the parser's format cannot be held to them.
    """
    schemas: dict[str, Mapping[str, Any] | None] = {}
    path_of: dict[str, str] = {}
    for path, tool in zip(paths, tools):
        function = tool["function"]
        strict = function.get("strict") is True
        schemas[function["name"]] = parameters_of(tool) if strict else None
        path_of[function["name"]] = path
    try:
        form = chosen.strict_structural_tag(schemas)
    except structural_tags.NotStrict as error:
        where = place(path_of[error.tool], error.pointer)
        raise UnsupportedFeature(f"{where}: {error}", param="tools") from None
    if form is not None:
        return StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": form})
    if not delimiters:
        raise UnsupportedFeature(
            f"tools: 'strict' cannot be enforced by this server's tool-call parser "
            f"({chosen.__name__}), whose format does not distinguish calls from text; send strict false, "
            f"or {structural_tags.FORCING}",
            param="tools",
        )
    found = [chosen.call_delimiters(tool["function"]["name"]) for tool in tools]
    triggers = sorted({around.trigger for around in found if around is not None})
    return StructuredOutputsParams(
        structural_tag={
            "type": "structural_tag",
            "structures": list(delimiters),
            "triggers": triggers,
        }
    )


def form_or_calls(schema: dict[str, Any] | bool, plan: ToolPlan) -> StructuredOutputsParams:
    """An answer by a JSON schema, or calls of tools instead of it.

    Args:
        plan: of free calls, with delimiters.
    """
    tags = [
        {
            "type": "tag",
            "begin": around["begin"],
            "content": {"type": "json_schema", "json_schema": around["schema"]},
            "end": around["end"],
        }
        for around in plan.delimiters
    ]
    calls = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": not plan.parallel,
    }
    answer = {"type": "json_schema", "json_schema": schema}
    form = {"type": "or", "elements": [answer, calls]}
    return StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": form})


def _named(choice: Any) -> str:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or choice.get("type") != "function":
        raise RequestError(
            f"tool_choice = {shown(choice)}: must be 'none', 'auto', 'required' or "
            "{'type': 'function', 'function': {'name': ...}}",
            param="tool_choice",
        )
    return name


def shown(choice: Any) -> str:
    """A ``tool_choice`` as messages quote it: JSON, of which so much as a line holds."""
    text = json.dumps(choice, ensure_ascii=True)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."
