"""Generate with a model that was saved by ``save_sharded_state.py``.

python examples/load_sharded_state.py --model ./my-model-sharded
"""

from __future__ import annotations

from headrace import LLM, EngineArgs, SamplingParams
from headrace.arguments import Parser


def main() -> None:
    parser = EngineArgs.add_cli_args(Parser(description=__doc__))
    parser.set_defaults(load_format="sharded_state")
    parser.add_argument("--prompt", default="Hello, world!")
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--top-p", type=float, default=1.0)
    args = parser.parse_args()
    settings = EngineArgs.from_cli_args(args).settings
    params = SamplingParams(
        max_tokens=args.max_tokens, temperature=args.temperature, top_p=args.top_p
    )
    with LLM(**settings) as llm:
        [output] = llm.generate(args.prompt, params, use_tqdm=False)
        print("Format:", llm.engine_config.load.load_format)
        print("Tensor-parallel size:", llm.engine_config.parallel.tensor_parallel_size)
        print("Text:", output.outputs[0].text)


if __name__ == "__main__":
    main()
