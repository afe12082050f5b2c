"""``headrace complete``: text goes on, without a chat template."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from headrace import demo
from headrace.batch.prompts import check_text
from headrace.cli.terminal import (
    TerminalModel,
    connect_model,
    note,
    piped_lines,
    sampling_options,
    show,
    terminal_parser,
)
from headrace.logs import configure


def main(argv: Sequence[str]) -> int:
    parser = terminal_parser(
        "complete",
        "Complete text: with the demo model, a checkpoint, or (with --url) a server.",
        "End with Ctrl-D. You can also pipe in texts, one a line.",
    )
    args = parser.parse_args(argv)
    configure("WARNING")
    options = sampling_options(args)
    if args.quick is not None:
        check_text("--quick", args.quick)
    model = connect_model(args)
    try:
        if model.name == demo.NAME:
            note(f"[{demo.DEMOS['text'].skills} It answers each text; other models continue it.]")
        for prompt in piped_lines() if args.quick is None else (args.quick,):
            show(_complete(model, prompt, options))
    finally:
        model.close()
    return 0


def _complete(model: TerminalModel, prompt: str, options: dict[str, Any]) -> Iterator[str]:
    """The demo model has seen nothing but conversations: anything else it only repeats."""
    if model.name == demo.NAME:
        return model.chat([{"role": "user", "content": prompt}], **options)
    return model.complete(prompt, **options)
