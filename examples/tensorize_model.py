"""Write a checkpoint in Tensorizer's format, for ``--load-format tensorizer``.

    pip install 'headrace-models[tensorizer]'
    python examples/tensorize_model.py --model ./my-model \\
        serialize --serialized-directory ./serialized --suffix v1
    headrace serve ./serialized/headrace/my-model/v1
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from headrace_core.config import LoadConfig
from headrace_models.checkpoint.source import fetch
from headrace_models.formats.tensorized import serialize
from headrace_models.loading.loader import choose_format


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder or hub name")
    command = parser.add_subparsers(dest="command", required=True).add_parser("serialize")
    command.add_argument("--serialized-directory", required=True)
    command.add_argument("--suffix", default="v1")
    command.add_argument(
        "--serialization-kwargs", type=json.loads, default={}, help="JSON, to the library"
    )
    args = parser.parse_args()
    source = fetch(args.model)
    folder = Path(args.serialized_directory) / "headrace" / Path(args.model).name / args.suffix
    weights = choose_format(source, LoadConfig())
    print(serialize(source, weights, folder, **args.serialization_kwargs))


if __name__ == "__main__":
    main()
