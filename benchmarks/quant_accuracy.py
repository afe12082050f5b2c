"""What quantization does to a model's answers: perplexity of the demo model, error of logits.

    python benchmarks/quant_accuracy.py                         # the demo model
    python benchmarks/quant_accuracy.py --model DIR --random    # logits of a random-weight model
    python benchmarks/quant_accuracy.py --methods none --caches auto,fp8,fp8+scales,int8+scales
    ... [--methods none,int8,int4] [--json FILE]

Perplexity is over fresh dialogues of the demo model's own data generator, from the part of its
words that training holds out, teacher-forced, of the assistant's tokens. Logit error is that of
the quantized model against the same checkpoint in float32: root mean square of the difference over
that of the logits, mean Kullback-Leibler divergence of the next-token distributions in
nats, and how often the likeliest token is the same one. Weights are the packed linear
layers, with the head. Caches are values of kv_cache_dtype, with "+scales" those of
calculate_kv_scales; activations those of quantization_activations.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from itertools import islice, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

METHODS = (
    "none", "int8", "int8_weight_only", "fp8", "q8_0", "q6_k", "q5_k", "q4_k", "q4_0", "int4", "int4_g32",
    "nf4", "fp4", "mxfp4",
)  # fmt: skip
CACHES = (
    "auto", "fp8", "fp8+scales", "fp8_e5m2", "fp8_e5m2+scales", "int8+scales", "int8_per_token_head",
    "int4_per_token_head",
)  # fmt: skip
SEED = 20261121
CHUNK = 512


class Text(NamedTuple):
    ids: list[int]
    counted: list[bool]
    """Tokens that perplexity is of."""


def main() -> None:
    arguments = _parser().parse_args()
    texts = _random_tokens(arguments) if arguments.random else _dialogues(arguments.sequences)
    expected = _logits(arguments.model, "none", texts, dtype="float32")[0]
    rows = []
    chosen = (arguments.methods, arguments.caches, arguments.activations)
    for method, cache, form in product(*(each.split(",") for each in chosen)):
        actual, facts = _logits(
            arguments.model, method, texts, dtype=arguments.dtype, cache=cache, activations=form
        )
        compared = _compared(actual, expected, texts)
        rows.append({"method": method, "cache": cache, "activations": form, **facts, **compared})
        print(json.dumps(rows[-1]), flush=True)
    print(_table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", help="folder of a checkpoint; default: the demo model")
    parser.add_argument("--random", action="store_true", help="random tokens instead of dialogues")
    parser.add_argument("--sequences", type=int, default=400, help="dialogues")
    parser.add_argument("--tokens", type=int, default=256, help="random tokens")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--caches", default="auto", help=",".join(CACHES))
    parser.add_argument("--activations", default="auto", help="auto,float,int8")
    parser.add_argument("--json", type=Path)
    return parser


def _dialogues(count: int) -> list[Text]:
    from demo_model.mixture import dialogues
    from demo_model.text import Encoder
    from demo_model.words import Draw
    from tokenizers import Tokenizer

    from headrace_demo import model_path

    encode = Encoder(Tokenizer.from_file(str(model_path() / "tokenizer.json")))
    drawn = islice(dialogues(Draw(SEED, held_out=True)), count)
    texts = [Text(*encode(dialogue)) for dialogue in drawn]
    return [text for text in texts if len(text.ids) <= CHUNK]


def _random_tokens(arguments: argparse.Namespace) -> list[Text]:
    config = json.loads((Path(arguments.model) / "config.json").read_text())
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(0, config["vocab_size"], (arguments.tokens,), generator=generator)
    return [Text(ids.tolist(), [True] * len(ids))]


def _logits(
    model: str | None,
    method: str,
    texts: Sequence[Text],
    *,
    dtype: str,
    cache: str = "auto",
    activations: str = "auto",
) -> tuple[list[Tensor], dict[str, Any]]:
    """Of every sequence [T, V] in float32, and what loading cost."""
    from headrace.assembly import build_model, choose_ops, cpu_threads, resolve_engine
    from headrace.engine_args import EngineArgs
    from headrace_engine.startup import StartupTimeline
    from headrace_testing.model.decoders import PagedDriver

    kind, _, measured = cache.partition("+")
    args = EngineArgs(
        model=model,
        dtype=dtype,
        quantization=None if method == "none" else method,
        quantization_activations=activations,
        kv_cache_dtype=kind,
        calculate_kv_scales=bool(measured),
    )
    resolved, timeline = resolve_engine(args.create_engine_config()), StartupTimeline()
    start = time.perf_counter()
    built = build_model(resolved, choose_ops(resolved, timeline, cpu_threads(resolved)), timeline)
    seconds = time.perf_counter() - start
    driver = PagedDriver(built, num_blocks=1 + _num_blocks(resolved))
    if measured:
        _measure_scales(resolved, driver)
    out = []
    for index, text in enumerate(texts):
        driver.free = list(range(_num_blocks(resolved), 0, -1))
        out.append(driver.step({str(index): text.ids}).clone())
    packed = _packed_bytes(built)
    del built, driver
    gc.collect()
    return out, {"load_s": round(seconds, 1), "weights_mib": round(packed / 2**20, 1)}


def _num_blocks(resolved: Any) -> int:
    return 1 + -(-CHUNK // resolved.config.cache.block_size)


def _measure_scales(resolved: Any, driver: Any) -> None:
    """What the engine does at start, on the driver's cache."""
    from headrace.assembly import kv_scale_constants
    from headrace_core.kv import KVCacheConfig
    from headrace_engine.execution.kv_scales import measure_kv_scales, measuring_batch
    from headrace_engine.kv.grouping import plan_groups

    groups = plan_groups({name: layer.kv_spec for name, layer in driver.layers.items()})
    prompt = measuring_batch(
        KVCacheConfig((1 + len(groups) * _num_blocks(resolved),), groups),
        vocab_size=resolved.info.vocab_size,
        max_model_len=resolved.info.max_model_len,
        device=torch.device("cpu"),
    )
    batch = driver.batch({"measured": prompt.batch.input_ids.tolist()})
    constants = kv_scale_constants(resolved.config.cache, os.environ)
    measure_kv_scales(driver.layers, constants, lambda: driver.model.forward(batch))


def _packed_bytes(model: Any) -> int:
    """Of all linear layers, the head among them: what a decode step reads of a model's weights."""
    from headrace_core.ops import PackedLinear
    from headrace_models.layers.base import walk

    states = (
        getattr(layer, "state", None) or getattr(layer, "packed", None) for _, layer in walk(model)
    )
    packed = {id(state): state for state in states if isinstance(state, PackedLinear)}
    return sum(state.num_bytes for state in packed.values())


def _compared(
    actual: Sequence[Tensor], expected: Sequence[Tensor], texts: Sequence[Text]
) -> dict[str, float]:
    nats = divergence = squares = whole = same = 0.0
    tokens = rows = 0
    for a, e, text in zip(actual, expected, texts, strict=True):
        ours, theirs = a.log_softmax(-1), e.log_softmax(-1)
        said = ours[:-1].gather(1, torch.tensor(text.ids[1:])[:, None])[:, 0]
        counted = torch.tensor(text.counted[1:])
        nats -= float(said[counted].sum())
        tokens += int(counted.sum())
        divergence += float((theirs.exp() * (theirs - ours)).sum())
        squares += float((a - e).square().sum())
        whole += float(e.square().sum())
        same += float((a.argmax(-1) == e.argmax(-1)).sum())
        rows += len(text.ids)
    return {
        "perplexity": round(float(torch.tensor(nats / tokens).exp()), 4),
        "logit_error": round((squares / whole) ** 0.5, 5),
        "divergence": round(divergence / rows, 6),
        "same_first": round(same / rows, 4),
        "tokens": tokens,
    }


def _table(rows: Sequence[dict[str, Any]]) -> str:
    keys = list(rows[0])
    lines = ["| " + " | ".join(keys) + " |", "|" + "---|" * len(keys)]
    lines += ["| " + " | ".join(str(row[key]) for key in keys) + " |" for row in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
