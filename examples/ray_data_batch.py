"""Answer each line of text files with Ray Data: one engine in each of some actors, rows in, rows out.

    pip install 'ray[data]' 'headrace[all]'
    python examples/ray_data_batch.py prompts.txt --output answers

A row keeps its columns and gets ``answer``. Ray starts the actors, sends them batches of rows and starts
others where one ends; with more hosts in the cluster, --concurrency engines run on them.
"""

from __future__ import annotations

import argparse
from typing import Any

import ray

from headrace import LLM, SamplingParams


class Answers:
    """The actor: an engine, and what it asks it about a batch of rows."""

    def __init__(self, settings: dict[str, Any], system: str, max_tokens: int) -> None:
        self._llm = LLM(**settings)
        self._system = system
        self._params = SamplingParams(temperature=0.3, max_tokens=max_tokens)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        chats = [
            [{"role": "system", "content": self._system}, {"role": "user", "content": str(text)}]
            for text in batch["text"]
        ]
        outputs = self._llm.chat(chats, self._params, use_tqdm=False)
        return {**batch, "answer": [output.outputs[0].text for output in outputs]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("input", help="text file, or folder of text files; a prompt on each line")
    parser.add_argument("--output", help="folder for Parquet files (default: ten rows are printed)")
    parser.add_argument("--model", help="(default: the demo model)")
    parser.add_argument("--concurrency", type=int, default=1, help="engines (default: 1)")
    parser.add_argument("--num-cpus", type=int, default=1, help="cores of each (default: 1)")
    parser.add_argument("--batch-size", type=int, default=64, help="rows (default: 64)")
    parser.add_argument("--max-tokens", type=int, default=250, help="of an answer (default: 250)")
    parser.add_argument("--kv-cache-memory-bytes", type=int, default=1 << 30)
    parser.add_argument("--system", default="You answer with haikus.")
    args = parser.parse_args()
    settings = {
        "model": args.model,
        "num_threads": args.num_cpus,
        "kv_cache_memory_bytes": args.kv_cache_memory_bytes,
    }
    answered = ray.data.read_text(args.input).map_batches(
        Answers,
        fn_constructor_args=(settings, args.system, args.max_tokens),
        batch_size=args.batch_size,
        num_cpus=args.num_cpus,
        compute=ray.data.ActorPoolStrategy(size=args.concurrency),
    )
    if args.output:
        answered.write_parquet(args.output)
    else:
        for row in answered.take(10):
            print(f"{row['text']!r} -> {row['answer']!r}")


if __name__ == "__main__":
    main()
