"""One engine over the processes of torchrun, each of which has a rank of it and gets all outputs.

    torchrun --nproc-per-node 2 examples/torchrun.py --tensor-parallel-size 2
    torchrun --nproc-per-node 4 examples/torchrun.py -tp 2 -pp 2

Every process runs this script: it must make the same calls with the same prompts.
"""

import argparse
import os

from headrace import LLM, SamplingParams

PROMPTS = ["Hello, my name is", "What is 3 plus 4?", "The capital of France is"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="(default: the demo model)")
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=2)
    parser.add_argument("--pipeline-parallel-size", "-pp", type=int, default=1)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=16, seed=args.seed)
    with LLM(
        model=args.model,
        tensor_parallel_size=args.tensor_parallel_size,
        pipeline_parallel_size=args.pipeline_parallel_size,
        max_model_len=args.max_model_len,
        seed=args.seed,
        distributed_executor_backend="external_launcher",
    ) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    if os.environ["RANK"] == "0":  # the others have the same outputs
        for output in outputs:
            print(f"{output.prompt!r} -> {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
