"""Two stages with a folder between them: one computes prompts, the other one answers them.

    python examples/disaggregated_prefill_files.py prefill --model ./my-model
    python examples/disaggregated_prefill_files.py decode --model ./my-model

The first stage leaves the blocks of the prompts in the folder and writes each prompt with its first token
to a file. The second one reads the file, loads the blocks and generates. The stages need not run at the same
time; they need the same model, dtype and kind of processor.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from headrace import LLM, SamplingParams

SENTENCES = ("Hello, my name is", "The capital of France is", "Your name is", "The future is")
BEGINNINGS = ("Hi ", "Hi ", "Hey ", "Hey ")


def main() -> None:
    args = arguments()
    (prefill if args.stage == "prefill" else decode)(args)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=("prefill", "decode"))
    parser.add_argument("--model", help="(default: the demo model)")
    parser.add_argument(
        "--storage", default="local_storage", help="folder (default: local_storage)"
    )
    parser.add_argument("--prompts", default="output.txt", help="file (default: output.txt)")
    parser.add_argument("--answers", help="file that decode writes its texts to, too")
    parser.add_argument("--repeat", type=int, default=100, help="words of a prompt (default: 100)")
    parser.add_argument("--max-tokens", type=int, default=10, help="of an answer (default: 10)")
    parser.add_argument("--connector", default="file", help="(default: file)")
    parser.add_argument("--connector-module", help="Python module that has the connector")
    parser.add_argument("--async-load", action="store_true", help="a setting of that connector")
    parser.add_argument("--load-failure-policy", choices=("recompute", "fail"), default="recompute")
    parser.add_argument("--kv-cache-memory-bytes", type=int, default=1 << 30)
    return parser.parse_args()


def engine(args: argparse.Namespace, **settings: Any) -> LLM:
    """An engine that shares the folder."""
    extra: dict[str, Any] = {"shared_storage_path": args.storage}
    if args.async_load:
        extra["async_load"] = True
    config = {
        "kv_connector": args.connector,
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
        "kv_load_failure_policy": args.load_failure_policy,
    }
    if args.connector_module:
        config["kv_connector_module_path"] = args.connector_module
    return LLM(
        args.model,
        kv_transfer_config=config,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
        enforce_eager=True,
        **settings,
    )


def prefill(args: argparse.Namespace) -> None:
    """Compute the prompts, and write each with its first token: a JSON text on a line."""
    asked = [
        beginning * args.repeat + sentence
        for beginning, sentence in zip(BEGINNINGS, SENTENCES, strict=True)
    ]
    with engine(args) as llm:
        outputs = llm.generate(asked, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    lines = [
        json.dumps(prompt + o.outputs[0].text) for prompt, o in zip(asked, outputs, strict=True)
    ]
    Path(args.prompts).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} prompts are in {args.prompts}, their blocks in {args.storage}")


def read(file: Path) -> list[str]:
    """Prompts that the first stage wrote."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def decode(args: argparse.Namespace) -> None:
    """Answer the prompts of the first stage, in steps of 64 tokens for 16 of them at most."""
    file = Path(args.prompts)
    if not file.is_file():
        sys.exit(f"{file}: there is no such file: run the stage 'prefill' first")
    asked = read(file)
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    with engine(args, max_num_batched_tokens=64, max_num_seqs=16) as llm:
        outputs = llm.generate(asked, params, use_tqdm=False)
    texts = []
    for prompt, output in zip(asked, outputs, strict=True):
        length, loaded = len(output.prompt_token_ids or ()), output.num_cached_tokens or 0
        text = f"{output.outputs[0].finish_reason}: {output.outputs[0].text!r}"
        print(f"...{prompt[-30:]!r} ({loaded} of {length} tokens loaded) -> {text}")
        texts.append(text)
    if args.answers:
        Path(args.answers).write_text("\n".join(texts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
