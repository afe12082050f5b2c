"""``headrace complete``: text goes on, without a chat template."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.cli.chat import (
    connect_model,
    questions,
    sampling_options,
    show,
    terminal_parser,
)
from headrace.logs import configure


def main(words: Sequence[str]) -> int:
    parser = terminal_parser(
        "complete", "Complete text: with the demo model, a checkpoint, or (with --url) a server."
    )
    args = parser.parse_args(words)
    configure("WARNING")
    model = connect_model(args)
    try:
        for prompt in questions(args.quick):
            show(model.complete(prompt, **sampling_options(args)))
    finally:
        model.close()
    return 0
