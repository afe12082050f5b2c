"""The one place where templates are compiled and rendered: an immutable jinja2 sandbox.

The conventions are those that checkpoints' templates are written for (Hugging Face's): blocks are
trimmed, ``break`` and ``continue`` work, ``tojson`` does not escape, ``raise_exception`` and
``strftime_now`` exist, ``{% generation %}`` marks text without changing it.

The sandbox keeps templates from reaching Python. Against templates that are merely endless or huge
it has caps on output and on what operators may build; the hard limit is a killable process
(:mod:`headrace_engine.input_processing.chat.render_worker`).
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

MAX_BUILT = 4 * 2**20
"""Longest string or list that an operator in a template may make."""
MAX_EXPONENT = 64
COMPILED_TEMPLATES = 32
"""Compiled templates that are kept."""
GENERATION_BEGIN = "_generation_begin"
GENERATION_END = "_generation_end"


class TemplateRefused(jinja2.TemplateError):
    """The template itself refused the conversation (``raise_exception``)."""


class TemplateTooLarge(jinja2.TemplateError):
    """The template made a value that is larger than its cap."""


class OutputTooLong(TemplateTooLarge):
    """The template's output is longer than its cap."""


class _Generation(jinja2.ext.Extension):
    """``{% generation %}``: training marks the assistant's text with it. Rendering writes nothing for it,
    unless the variables :data:`GENERATION_BEGIN` and :data:`GENERATION_END` are set: these, then."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (
            jinja2.nodes.Output([jinja2.nodes.Name(name, "load")], lineno=line)
            for name in (GENERATION_BEGIN, GENERATION_END)
        )
        return [begin, *body, end]


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Operators that can multiply their input's size are looked at first."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        if operator == "*":
            _check_built(_length(left) * _number(right), _length(right) * _number(left))
        elif operator == "+":
            _check_built(_length(left) + _length(right))
        elif operator == "**" and _number(right) > MAX_EXPONENT:
            raise TemplateTooLarge(f"exponent {right!r} is above {MAX_EXPONENT}")
        elif operator == "%" and isinstance(left, str):
            raise TemplateTooLarge("'%' formatting is not available in templates; use '~'")
        return super().call_binop(context, operator, left, right)


def _check_built(*lengths: float) -> None:
    if max(lengths) > MAX_BUILT:
        raise TemplateTooLarge(f"a value would be longer than {MAX_BUILT}")


def _length(value: object) -> int:
    return len(value) if isinstance(value, (str, bytes, list, tuple)) else 0


def _number(value: object) -> float:
    return value if isinstance(value, (int, float)) else 0


def _raise_exception(message: str) -> None:
    raise TemplateRefused(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@functools.cache
def environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The sandbox, with the filters and globals that templates may use."""
    made = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = _strftime_now
    return made


@functools.lru_cache(COMPILED_TEMPLATES)
def compile_template(source: str) -> jinja2.Template:
    """A template's compiled form; the latest are kept.

    Raises:
        jinja2.TemplateSyntaxError: it is no template.
    """
    return environment().from_string(source)


def render_template(source: str, variables: Mapping[str, Any], max_chars: int) -> str:
    """Render, and stop when the output gets longer than ``max_chars``.

    Raises:
        OutputTooLong, TemplateTooLarge, TemplateRefused, jinja2.TemplateError, or what an expression raised.
    """
    pieces, size = [], 0
    for piece in compile_template(source).generate(**variables):
        size += len(piece)
        if size > max_chars:
            raise OutputTooLong(f"the output is longer than {max_chars} characters")
        pieces.append(piece)
    return "".join(pieces)
