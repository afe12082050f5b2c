"""``headrace inspect``: what headrace makes of a model, and what is missing where it falls short."""

from __future__ import annotations

import json
from collections.abc import Sequence

from headrace.arguments import Parser
from headrace.engine_args import EngineArgs


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="headrace inspect",
        description="Show how a model would be served: its class, tasks, routes and interfaces, members "
        "missing from an interface that it nearly implements, and whether it fits into this "
        "machine's memory. Loads no weights.",
    )
    parser.add_model("folder, GGUF file or hub name")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    EngineArgs.add_cli_args(parser)
    args = parser.parse_args(argv)
    from headrace.assembly.inspection import inspect_model

    found = inspect_model(EngineArgs.from_cli_args(args).create_engine_config(), memory=True)
    print(json.dumps(found.facts(), indent=2, default=str) if args.json else found)
    return 0
