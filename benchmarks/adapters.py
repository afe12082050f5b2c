"""Tokens a second with low-rank adapters beside none: ``python benchmarks/adapters.py --help``.

A batch of requests decodes with the base model alone, with one adapter, and with several of them mixed; the
adapters are random and change every linear layer.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from headrace import LLM, LoRARequest, SamplingParams

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(folder: Path, model: Path, rank: int, seed: int) -> None:
    """A random adapter in PEFT's layout."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118
                if re.search(rf"\.({'|'.join(TARGETS)})\.weight$", name):
                    rows, columns = stored.get_slice(name).get_shape()
                    module = f"base_model.model.{name.removesuffix('.weight')}"
                    for part, shape in (("A", (rank, columns)), ("B", (rows, rank))):
                        made = torch.randn(shape, generator=generator) * 0.01
                        tensors[f"{module}.lora_{part}.weight"] = made.bfloat16()
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(TARGETS)}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder of the checkpoint")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        requests = []
        for number in range(1, args.adapters + 1):
            path = Path(folder) / str(number)
            write_adapter(path, args.model, args.rank, number)
            requests.append(LoRARequest(str(number), number, str(path)))
        settings = {"enable_lora": True, "max_loras": args.adapters, "max_lora_rank": args.rank}
        params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
        prompts = [[100 + i, *range(200, 232)] for i in range(args.batch)]
        rates: dict[str, list[float]] = {}
        with LLM(str(args.model), max_model_len=1024, **settings) as llm:
            mixed = [requests[i % len(requests)] for i in range(args.batch)]
            for _ in range(args.rounds + 1):  # the first is not counted: adapters are read
                for name, loras in (
                    ("base", None), ("one adapter", requests[0]),
                    (f"{args.adapters} adapters", mixed),
                ):  # fmt: skip
                    start = time.perf_counter()
                    llm.generate(prompts, params, lora_request=loras, use_tqdm=False)
                    seconds = time.perf_counter() - start
                    rates.setdefault(name, []).append(args.batch * args.tokens / seconds)
    base = statistics.median(rates["base"][1:])
    for name, values in rates.items():
        rate = statistics.median(values[1:])
        print(f"{name}: {rate:.1f} tokens/s, {rate / base:.2f} x")


if __name__ == "__main__":
    main()
