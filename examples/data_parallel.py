"""Several engines in one script, each a process with its share of the prompts.

    python examples/data_parallel.py --model ./my-moe --dp-size 2

On several hosts each runs the script with its number, and gets its part of the shares:

    python examples/data_parallel.py --model ./my-moe --dp-size 4 --dp-num-nodes 2 --dp-node-rank 1

Engines need nothing of each other, so there is no address to agree upon. With --tensor-parallel-size an
engine is several processes itself; --enable-expert-parallel gives these whole experts. To serve, or if
requests come one by one, use --data-parallel-size of the server or of LLM: it chooses an engine for each.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from multiprocessing.process import BaseProcess
from typing import Any

from headrace import LLM, SamplingParams

SHOWN = 5
"""Outputs that a rank prints at most."""
SENTENCES = (
    "Hello, my name is",
    "The president of the country is",
    "The capital is",
    "The future is",
)


def prompts(count: int) -> list[str]:
    return [SENTENCES[number % len(SENTENCES)] for number in range(count)]


def share(rank: int, size: int, count: int) -> range:
    """Indices of a rank's prompts: neighbours, and one more for each of the first ranks if some are left."""
    each, left = divmod(count, size)
    first = rank * each + min(rank, left)
    return range(first, first + each + (rank < left))


def run(rank: int, local_rank: int, size: int, count: int, settings: dict[str, Any]) -> None:
    """One engine, and what it says to its share. Threads are divided among the ranks of this host."""
    os.environ |= {"DP_RANK": str(rank), "DP_LOCAL_RANK": str(local_rank), "DP_SIZE": str(size)}
    mine = share(rank, size, count)
    print(f"rank {rank}: prompts {mine.start} to {mine.stop - 1}, {len(mine)}", flush=True)
    if not mine:
        return
    asked = [prompts(count)[index] for index in mine]
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=(16, 20)[rank % 2], seed=0)
    with LLM(**settings) as llm:
        outputs = llm.generate(asked, params, use_tqdm=False)
    lines = [f"rank {rank}: {o.prompt!r} -> {o.outputs[0].text!r}\n" for o in outputs[:SHOWN]]
    print("".join(lines) + f"rank {rank}: {len(outputs)} answers", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="(default: the demo model)")
    parser.add_argument("--dp-size", type=int, default=2, help="engines on all hosts (default: 2)")
    parser.add_argument("--dp-num-nodes", type=int, default=1, help="hosts (default: 1)")
    parser.add_argument("--dp-node-rank", type=int, default=0, help="this host (default: 0)")
    parser.add_argument("--num-prompts", type=int, default=400, help="(default: 400)")
    parser.add_argument("--timeout", type=float, default=300, help="seconds (default: 300)")
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    parser.add_argument("--enable-expert-parallel", action="store_true")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--kv-cache-memory-bytes", type=int, default=1 << 30, help="of an engine")
    args = parser.parse_args()
    if args.dp_size % args.dp_num_nodes:
        parser.error(
            f"--dp-size {args.dp_size}: must be divisible by --dp-num-nodes {args.dp_num_nodes}"
        )
    if not 0 <= args.dp_node_rank < args.dp_num_nodes:
        parser.error(
            f"--dp-node-rank {args.dp_node_rank}: must be from 0 to {args.dp_num_nodes - 1}"
        )
    own = args.dp_size // args.dp_num_nodes
    settings = {
        "model": args.model,
        "tensor_parallel_size": args.tensor_parallel_size,
        "enable_expert_parallel": args.enable_expert_parallel,
        "max_model_len": args.max_model_len,
        "kv_cache_memory_bytes": args.kv_cache_memory_bytes,
        "num_threads": max(1, len(os.sched_getaffinity(0)) // own),
    }
    context = multiprocessing.get_context("spawn")
    ranks: list[BaseProcess] = []
    for local_rank in range(own):
        rank = args.dp_node_rank * own + local_rank
        words = (rank, local_rank, args.dp_size, args.num_prompts, settings)
        ranks.append(context.Process(target=run, args=words))
        ranks[-1].start()
    sys.exit(ended(ranks, args.timeout))


def ended(ranks: list[BaseProcess], timeout: float) -> int:
    """Exit status of all: 1 if some had to be killed, else that of one that failed, else 0."""
    deadline, status = time.monotonic() + timeout, 0
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.exitcode is None:
            print(f"process {process.pid} has not ended in {timeout:g} seconds: it is killed")
            process.kill()
            process.join()
            status = 1
        elif process.exitcode:
            status = status or process.exitcode
    return status


if __name__ == "__main__":
    main()
