"""Run one base model with several adapters in one batch.

    python examples/multilora_inference.py --model /path/to/base --adapter sql=/path/to/sql \
        --adapter chat=/path/to/chat --max-loras 2

Each prompt goes through the base model and through every adapter. With fewer slots (--max-loras) than
adapters, requests of the others wait for one. Every engine setting may be given; ``--quantization int8``
runs the adapters on a base model of rounded weights.
"""

from __future__ import annotations

from collections.abc import Iterator

from headrace import EngineArgs, LLMEngine, SamplingParams
from headrace.arguments import Parser
from headrace.lora.request import LoRARequest

PROMPTS = ["Hello", "What is 2 + 3?"]
Call = tuple[str, LoRARequest | None]


def calls(adapters: list[LoRARequest]) -> Iterator[Call]:
    """Every prompt with every adapter, and with none."""
    for prompt in PROMPTS:
        for adapter in (None, *adapters):
            yield prompt, adapter


def main() -> None:
    parser = EngineArgs.add_cli_args(Parser(description=__doc__))
    parser.add_argument("--adapter", metavar="NAME=PATH", action="append", default=[])
    args = parser.parse_args()
    for given in args.adapter:
        if not all(given.partition("=")):
            parser.error(f"--adapter {given!r}: must be NAME=PATH")
    args.enable_lora = True
    # An id of its own for each: it says what an adapter is.
    adapters = [
        LoRARequest(name, number, path)
        for number, (name, _, path) in enumerate((a.partition("=") for a in args.adapter), 1)
    ]
    params = SamplingParams(temperature=0, max_tokens=16)
    with LLMEngine.from_engine_args(EngineArgs.from_cli_args(args)) as engine:
        asked = dict(enumerate(calls(adapters)))
        for index, (prompt, adapter) in asked.items():
            engine.add_request(str(index), prompt, params, lora_request=adapter)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    _, adapter = asked[int(output.request_id)]
                    name = "the base model" if adapter is None else adapter.lora_name
                    print(f"{name}: {output.prompt!r} -> {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
