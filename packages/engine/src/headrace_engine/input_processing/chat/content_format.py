"""Finds the form of messages' content that a template expects."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jinja2
from jinja2 import nodes

from headrace_engine.input_processing.chat.sandbox import COMPILED_TEMPLATES, environment


@functools.lru_cache(COMPILED_TEMPLATES)
def detect_content_format(source: str) -> str:
    """``openai`` if the template goes through the parts of a message's content, else ``string``.

    What counts: a ``for`` over ``<something>.content`` (or ``['content']``), over a variable that
    was set to it, or over a macro's parameter that is called with it.
    """
    try:
        tree = environment().parse(source)
    except jinja2.TemplateSyntaxError:
        return "string"  # rendering will say what is wrong
    names = _content_names(tree)
    loops = tree.find_all(nodes.For)
    return "openai" if any(_is_content(loop.iter, names) for loop in loops) else "string"


def _content_names(tree: nodes.Template) -> set[str]:
    """Variables and macro parameters that (somewhere) hold a message's content."""
    names: set[str] = set()
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    while True:
        known = len(names)
        for assign in tree.find_all(nodes.Assign):
            if isinstance(assign.target, nodes.Name) and _is_content(assign.node, names):
                names.add(assign.target.name)
        for call in tree.find_all(nodes.Call):
            macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
            names.update(_content_parameters(call, macro, names))
        if len(names) == known:
            return names


def _content_parameters(
    call: nodes.Call, macro: nodes.Macro | None, names: set[str]
) -> Iterator[str]:
    if macro is None:
        return
    for parameter, argument in zip(macro.args, call.args):
        if _is_content(argument, names):
            yield parameter.name
    for keyword in call.kwargs:
        if _is_content(keyword.value, names):
            yield keyword.key


def _is_content(node: nodes.Node | None, names: set[str]) -> bool:
    if isinstance(node, nodes.Filter):
        return _is_content(node.node, names)
    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return False
