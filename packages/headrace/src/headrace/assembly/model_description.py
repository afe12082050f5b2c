"""Description of a served model for people: one block of a log, or JSON.

The same facts stand in the log at start and in what ``headrace inspect`` prints, so that nobody needs to
guess whether a model was recognised, and as what.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from headrace_core.served_model import ServedModel

MOST_SHOWN = 64
"""Entries of a list in a line."""
LONGEST_SHOWN = 240
"""Characters of a text in a line (a template, say)."""


def facts(
    model: ServedModel, *, routes: Sequence[str] = (), interfaces: Sequence[str] = ()
) -> dict[str, Any]:
    """Everything that is said of a model; plain data.

    Args:
        model: as an engine would serve it.
        routes: that a server has for it, if there is one.
        interfaces: names of what its class implements, if that was looked at.
    """
    found: dict[str, Any] = {
        "model": model.root,
        "architecture": model.architecture,
        "class": model.class_path,
        "source": model.source,
        "runner": model.runner,
        "convert": model.convert,
        "supported_tasks": sorted(model.tasks),
        "routes": sorted(routes),
        "interfaces": sorted(interfaces),
        "modalities": sorted(model.modalities),
        "max_model_len": model.max_model_len,
        "dtype": model.dtype,
    }
    if model.pooling is not None:
        found["pooling"] = dataclasses.asdict(model.pooling)
    found["unmet"] = {task: list(reasons) for task, reasons in model.unmet.items()}
    return found


def describe(
    model: ServedModel, *, routes: Sequence[str] = (), interfaces: Sequence[str] = ()
) -> str:
    """:func:`facts` as lines; what is empty is left out. What is unmet comes last, a line for each reason."""
    found = facts(model, routes=routes, interfaces=interfaces)
    unmet = found.pop("unmet")
    shown = {title: _text(value) for title, value in found.items()}
    width = max(map(len, shown))
    lines = [f"{title:<{width}}  {text}" for title, text in shown.items() if text]
    for task, reasons in unmet.items():
        lines.append(f"no {task}:")
        lines += [f"- {reason}" for reason in reasons]
    return "\n".join(lines)


def _text(value: Any) -> str:
    """One line for a fact; a long value is JSON."""
    if isinstance(value, dict):
        said = {name: each for name, each in value.items() if each is False or each}
        return ", ".join(
            f"{name} = ({_text(each)})" if isinstance(each, dict) else f"{name} = {_text(each)}"
            for name, each in said.items()
        )
    if isinstance(value, (list, tuple)):
        shown = ", ".join(map(_text, value[:MOST_SHOWN]))
        return shown if len(value) <= MOST_SHOWN else f"{shown}, ... ({len(value)})"
    text = str(value)
    shortened = text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."
    return repr(shortened) if "\n" in shortened else shortened
