"""Several engines over the processes of torchrun, each with its share of the prompts.

    torchrun --nproc-per-node 2 examples/torchrun_data_parallel.py --data-parallel-size 2

Neighbouring processes share an engine: tensor_parallel_size of them. Which prompts an engine gets is the
script's affair; all processes of one engine must give it the same ones.
"""

import argparse
import os

from headrace import LLM, SamplingParams

PROMPTS = [f"{number}: what is {number} plus 4?" for number in range(8)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="(default: the demo model)")
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    parser.add_argument("--data-parallel-size", "-dp", type=int, default=2)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rank = int(os.environ["RANK"])
    engine, tensor_rank = divmod(rank, args.tensor_parallel_size)
    prompts = PROMPTS[engine :: args.data_parallel_size]
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=16, seed=args.seed)
    with LLM(
        model=args.model,
        tensor_parallel_size=args.tensor_parallel_size,
        data_parallel_size=args.data_parallel_size,
        max_model_len=args.max_model_len,
        seed=args.seed,
        distributed_executor_backend="external_launcher",
    ) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    if tensor_rank == 0:
        lines = [f"engine {engine}: {o.prompt!r} -> {o.outputs[0].text!r}\n" for o in outputs]
        print("".join(lines), end="", flush=True)


if __name__ == "__main__":
    main()
