"""One process computes prompts, another one answers them and fetches the prompts' blocks from the first.

    python examples/disaggregated_prefill.py --model ./my-model

The first engine generates one token for each prompt, says where its blocks are, and lives on until it is
told to end. The second one computes only what does not fill a block, and generates. Both are on this
machine here; docs/kv-transfer.md says what is needed between machines.
"""

from __future__ import annotations

import argparse
import multiprocessing
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from typing import Any

from headrace import LLM, SamplingParams

PATIENCE = 600.0
"""Seconds that one process waits for the other."""
PLACES = ("harbour", "valley", "old town")
Settings = dict[str, Any]


def prompts(repeat: int) -> list[str]:
    """Long enough to be worth fetching, and different from their beginning on."""
    return [f"The {place} is quiet today. " * repeat + "Tonight" for place in PLACES]


def prefill(settings: Settings, asked: list[str], address: Queue[Any], ends: Event) -> None:
    """Compute the prompts, say where their blocks are, and keep them until the end."""
    config = {"kv_connector": "p2p", "kv_role": "kv_producer", "kv_port": 0}
    promise = {"kv_transfer_params": {"do_remote_decode": True}}
    params = SamplingParams(temperature=0, max_tokens=1, extra_args=promise)
    with LLM(**settings, kv_transfer_config=config) as llm:
        outputs = llm.generate(asked, params, use_tqdm=False)
        address.put([output.kv_transfer_params for output in outputs])
        ends.wait(PATIENCE)


def decode(
    settings: Settings, asked: list[str], addresses: list[Any], max_tokens: int, answers: Queue[Any]
) -> None:
    """Answer the prompts, with the blocks of the other engine."""
    config = {"kv_connector": "p2p", "kv_role": "kv_consumer"}
    params = [
        SamplingParams(
            temperature=0, max_tokens=max_tokens, extra_args={"kv_transfer_params": address}
        )
        for address in addresses
    ]
    with LLM(**settings, kv_transfer_config=config) as llm:
        outputs = llm.generate(asked, params, use_tqdm=False)
        answers.put([
            (o.outputs[0].text, len(o.prompt_token_ids or ()), o.num_cached_tokens or 0)
            for o in outputs
        ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="(default: the demo model)")
    parser.add_argument("--max-model-len", type=int, default=2000, help="(default: 2000)")
    parser.add_argument(
        "--repeat", type=int, default=20, help="sentences of a prompt (default: 20)"
    )
    parser.add_argument("--max-tokens", type=int, default=16, help="of an answer (default: 16)")
    parser.add_argument("--kv-cache-memory-bytes", type=int, default=1 << 30)
    args = parser.parse_args()
    settings = {
        "model": args.model,
        "max_model_len": args.max_model_len,
        "kv_cache_memory_bytes": args.kv_cache_memory_bytes,
    }
    asked = prompts(args.repeat)
    context = multiprocessing.get_context("spawn")
    address, answers, ends = context.Queue(), context.Queue(), context.Event()
    first = context.Process(target=prefill, args=(settings, asked, address, ends))
    first.start()
    try:
        addresses = taken(address, first)
        second = context.Process(
            target=decode, args=(settings, asked, addresses, args.max_tokens, answers)
        )
        second.start()
        found = taken(answers, second)
        second.join()
    finally:
        ends.set()
        first.join()
    for prompt, (text, length, fetched) in zip(asked, found, strict=True):
        print(f"...{prompt[-12:]!r} ({fetched} of {length} tokens fetched) -> {text!r}")


def taken(queue: Queue[Any], process: Any) -> Any:
    """What a process puts into its queue.

    Raises:
        SystemExit: it ended before.
    """
    for _ in range(int(PATIENCE)):
        try:
            return queue.get(timeout=1.0)
        except Exception as error:  # queue.Empty, whose module is not the queue's
            if process.exitcode is not None and queue.empty():
                raise SystemExit(f"a process ended with status {process.exitcode}") from error
    raise SystemExit(f"a process has not answered in {PATIENCE:.0f} seconds")


if __name__ == "__main__":
    main()
