"""Start with random weights, which takes no reading, and read those of the checkpoint later.

python examples/skip_loading_weights_in_engine_init.py --model ./my-model
"""

from __future__ import annotations

from headrace import LLM, EngineArgs, SamplingParams
from headrace.arguments import Parser

PROMPTS = ("Hello, my name is", "The capital of France is", "The sky is")


def show(llm: LLM, title: str, params: SamplingParams) -> None:
    print(title)
    for output in llm.generate(PROMPTS, params, use_tqdm=False):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r} {output.outputs[0].token_ids}")


def main() -> None:
    parser = EngineArgs.add_cli_args(Parser(description=__doc__))
    parser.set_defaults(load_format="dummy", enforce_eager=True)
    parser.add_argument("--max-tokens", type=int, default=16)
    args = parser.parse_args()
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    with LLM(**EngineArgs.from_cli_args(args).settings) as llm:
        show(llm, "Random weights:", params)
        llm.collective_rpc("update_config", args=[{"load_config": {"load_format": "auto"}}])
        llm.collective_rpc("reload_weights")
        show(llm, "The checkpoint's:", params)


if __name__ == "__main__":
    main()
