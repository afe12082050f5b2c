"""Write a checkpoint as sharded state: for each rank the tensors that its model holds.

    python examples/save_sharded_state.py --model ./my-model --output ./my-model-tp2 --ranks 2
    python examples/load_sharded_state.py --model ./my-model-tp2

Every engine setting may be given; dtype matters, as tensors are written in it.
"""

from __future__ import annotations

from headrace import EngineArgs
from headrace.arguments import Parser
from headrace.sharded_state import save_sharded_state


def main() -> None:
    parser = EngineArgs.add_cli_args(Parser(description=__doc__))
    parser.add_argument("--output", "-o", required=True, help="folder; made if need be")
    parser.add_argument("--ranks", type=int, default=1, help="tensor-parallel size to write for")
    parser.add_argument("--file-pattern", help="file names, with {rank} and {part} in them")
    parser.add_argument(
        "--max-file-size", type=int, default=5 << 30, help="bytes of one file's tensors"
    )
    args = parser.parse_args()
    files = save_sharded_state(
        EngineArgs.from_cli_args(args).create_engine_config(),
        args.output,
        tensor_parallel_size=args.ranks,
        file_pattern=args.file_pattern,
        max_file_size=args.max_file_size,
    )
    for file in files:
        print(file)


if __name__ == "__main__":
    main()
