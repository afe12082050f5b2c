"""What a server found a model to be, for people: one block of a log, or JSON.

The same facts stand in the log at start and in what ``headrace inspect`` prints, so that nobody needs to
guess whether a model was recognised, and as what.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from headrace_core.engine import ServedModel


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
    if isinstance(value, dict):
        return ", ".join(
            f"{k} = {_text(v)}" for k, v in value.items() if v not in (None, "", (), [])
        )
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return str(value)
