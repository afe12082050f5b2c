"""``headrace models``: the architectures that are served with a class of their own, and what each can do.

Made of the same table as the page of supported models: :mod:`headrace_models.catalogue`, and the entry
points of other distributions. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from headrace.arguments import Parser
from headrace_core import plugins

_TASKS = ("generate", "pool", "speech")
_TITLES = ("architecture", "known as", "media", "cache", "LoRA", "PP", "quantization", "source")


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="headrace models",
        description="List the architectures (of config.json) that headrace serves with its own class or "
        "an installed plug-in. media: what it takes beside text; cache: kinds of cache that the layers use "
        "(recurrent: a state of fixed size); LoRA: supports adapters; PP: supports pipeline stages; "
        "quantization: supports linear layers in fewer bits.",
        epilog="headrace serves other language models of the transformers library through that library "
        "(pip install 'headrace-models[transformers]', --model-impl transformers). "
        "`headrace inspect MODEL` shows how a checkpoint would be served.",
    )
    parser.add_argument(
        "text",
        nargs="?",
        default="",
        help="only architectures whose name or models contain this text",
    )
    parser.add_argument("--task", choices=_TASKS, help="only models for this task")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    args = parser.parse_args(argv)
    rows = [row for row in _rows() if _is_wanted(row, args.text.lower(), args.task)]
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    _print_table(rows)
    print(f"{len(rows)} architectures")
    return 0 if rows else 1


def _rows() -> Iterable[dict[str, Any]]:
    """By name, plain data."""
    plugins.run_general()
    yield from sorted((*_of_plugins(), *_of_wrappers()), key=lambda row: str(row["architecture"]))


def _of_wrappers() -> Iterable[dict[str, Any]]:
    """Models that also see or hear, some of which only text is served of."""
    from headrace_models.catalogue import ARCHITECTURES, CACHES
    from headrace_models.catalogue.multimodal import WRAPPERS

    for wrapper in WRAPPERS.values():
        held = {kind for text in wrapper.texts.values() for kind in ARCHITECTURES[text].caches}
        yield {
            "architecture": wrapper.name,
            "models": wrapper.models,
            "media": list(wrapper.media),
            "task": wrapper.task,
            "caches": [kind for kind in CACHES if kind in held],
            "lora": all(ARCHITECTURES[text].lora for text in wrapper.texts.values()),
            "pp": all(ARCHITECTURES[text].pp for text in wrapper.texts.values()),
            "quantization": False,
            "alias_of": "",
            "source": "native",
        }


def _of_plugins() -> Iterable[dict[str, Any]]:
    from headrace_models.catalogue import ARCHITECTURES

    for name, plugin in plugins.installed("headrace.models").items():
        row = ARCHITECTURES.get(name)
        if row is None or row.entry != plugin.target:
            yield {"architecture": name, "source": f"plugin:{plugin.distribution}"}
            continue
        yield {
            "architecture": name,
            "models": row.models,
            "media": ["audio"] if row.task == "speech" else [],
            "task": row.task,
            "caches": list(row.caches),
            "lora": row.lora,
            "pp": row.pp,
            "quantization": row.quantization,
            "alias_of": row.alias_of,
            "source": "native",
        }


def _is_wanted(row: dict[str, Any], text: str, task: str | None) -> bool:
    named = text in row["architecture"].lower() or text in row.get("models", "").lower()
    return named and task in (None, row.get("task"))


def _print_table(rows: Sequence[dict[str, Any]]) -> None:
    lines = [_TITLES, *map(_cells, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_TITLES))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    def said(name: str) -> str:
        return "?" if name not in row else "yes" if row[name] else "no"

    known = row.get("models", "")
    if row.get("alias_of"):
        known = f"{known} (as {row['alias_of']})"
    caches = "+".join(row.get("caches", "?"))
    media = "+".join(row["media"]) or "-" if "media" in row else "?"
    return (
        row["architecture"], known, media, caches, said("lora"), said("pp"), said("quantization"),
        row["source"],
    )  # fmt: skip
