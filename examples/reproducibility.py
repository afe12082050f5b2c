"""Print the same texts in every run, whatever else is in the batch.

    python examples/reproducibility.py --model /path/to/model

On a CPU with headrace's kernels nothing has to be switched on: a request with a seed (the engine's, if it
brings none) has the same tokens alone and among others. On a GPU set ``HEADRACE_BATCH_INVARIANT=1``. Every
engine setting may be given.

headrace seeds no generator but its own. Whoever wants repeatable numbers of Python's ``random`` beside it
seeds that, as the last lines do.
"""

from __future__ import annotations

import random

from headrace import LLM, EngineArgs, SamplingParams
from headrace.arguments import Parser

PROMPTS = ["Hello, my name is", "Once upon a time", "What is 2 + 3?", "The sun is"]


def main() -> None:
    parser = EngineArgs.add_cli_args(Parser(description=__doc__))
    settings = EngineArgs.from_cli_args(parser.parse_args()).settings
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=16)
    with LLM(**settings) as llm:
        together = [output.outputs[0].text for output in llm.generate(PROMPTS, params)]
        for prompt, text in zip(PROMPTS, together, strict=True):
            print(f"{prompt!r} -> {text!r}")
        seeded = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=16, seed=7)
        alone = llm.generate(PROMPTS[0], seeded)[0].outputs[0].text
        among = llm.generate(PROMPTS, seeded)[0].outputs[0].text
        print(f"the first prompt, alone and among the others: {alone == among}")
    random.seed(settings.get("seed", 0))
    print(f"a number: {random.random()}")


if __name__ == "__main__":
    main()
