"""``headrace bench throughput``: many requests, offline, at once."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.bench import datasets, results
from headrace.bench import offline_common as offline
from headrace.bench.datasets import SampleRequest
from headrace.engine_args import EngineArgs
from headrace.logs import configure
from headrace_core.errors import ConfigError, MissingDependency
from headrace_core.sampling.params import RequestOutputKind

if TYPE_CHECKING:
    from headrace.arguments import Parser
    from headrace_core.output import RequestOutput

EPILOG = """\
Outputs have full length (end tokens are ignored). Without a file, prompts are random token ids, shorter than
the default where the model's context is.

Try:
  headrace bench throughput --num-prompts 50 --input-len 64 --output-len 32      # the demo model
  headrace bench throughput /path/to/model --num-prompts 64 --input-len 272 --output-len 136 \\
    --random-range-ratio 0.88                                                    # mixed lengths
  headrace bench throughput /path/to/model --num-prompts 32 --prefix-len 1024 --input-len 64 --output-len 32
  headrace bench throughput /path/to/model --backend hf --num-prompts 8          # transformers, to compare"""


class GeneratedCounts(NamedTuple):
    """Tokens of a finished run."""

    num_input: int
    num_output: int


Runner = Callable[[Namespace, list[SampleRequest]], tuple[float, GeneratedCounts]]


def main(argv: Sequence[str]) -> int:
    args = make_parser().parse_args(argv)
    configure("WARNING")
    _settle(args)
    if args.output_json:
        results.check_output(args.output_json, "output_json")
    samples = _samples(args)
    seconds, counts = RUNNERS[args.backend](args, samples)
    report = _report(args, len(samples), seconds, counts)
    print(_shown(report))
    if args.output_json:
        results.write_json(args.output_json, report)
        results.say(f"results: {args.output_json}")
    return 0


def make_parser() -> Parser:
    """The parser of ``headrace bench throughput``."""
    parser = offline.parser("throughput", "Give the engine many requests at once, offline.", EPILOG)
    parser.add_argument("--backend", choices=("headrace", "vllm", "headrace-chat", "hf"), default="headrace",
                        help="headrace (vllm is the same word), headrace-chat: prompts as chats; hf: "
                        "transformers (default: headrace)")  # fmt: skip
    parser.add_argument("--input-len", type=int, help="short for --random-input-len")
    parser.add_argument(
        "--output-len", type=int, help="of every output, whatever the dataset's value is"
    )
    parser.add_argument("--prefix-len", type=int, help="short for --random-prefix-len")
    parser.add_argument("--n", type=int, default=1, help="outputs of each prompt (default: 1)")
    parser.add_argument("--async-engine", action="store_true", help="through AsyncLLM, all at once")
    parser.add_argument(
        "--hf-max-batch-size", type=int, default=8, help="hf: prompts of a batch (default: 8)"
    )
    parser.add_argument(
        "--disable-detokenize", action="store_true", help="make no text of the outputs"
    )
    parser.add_argument("--output-json", metavar="FILE", help="write the figures here")
    parser.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    datasets.add_arguments(parser)
    # None: not stated; _fit_lengths chooses.
    parser.set_defaults(random_input_len=None, random_output_len=None)
    return EngineArgs.add_cli_args(parser)


def _settle(args: Namespace) -> None:
    """Resolve the short flags, refuse what does not go together."""
    for short, name in (("input_len", "random_input_len"), ("prefix_len", "random_prefix_len")):
        value = getattr(args, short)
        if value is not None:
            if args.dataset_name != "random":
                flag = "--" + short.replace("_", "-")
                raise ConfigError(f"{flag}: only for --dataset-name random", field=short)
            setattr(args, name, value)
    for name, least in (("n", 1), ("output_len", 1), ("hf_max_batch_size", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} {value}: must be at least {least}", field=name)
    if args.output_len is not None and args.dataset_name == "random":
        args.random_output_len = args.output_len
    _fit_lengths(args)
    if args.async_engine and args.backend in ("hf", "headrace-chat"):
        raise ConfigError(
            f"--async-engine: not with --backend {args.backend}", field="async_engine"
        )


def _fit_lengths(args: Namespace) -> None:
    """Choose the random lengths that were not stated: the usual ones, or those that a short context holds."""
    if args.random_output_len is None:
        args.random_output_len = datasets.default_length("random-output-len")
    if args.random_input_len is None:
        longest = math.ceil(args.random_output_len * (1 + args.random_range_ratio))
        room = math.floor(
            (_context(args) - args.random_prefix_len - longest) / (1 + args.random_range_ratio)
        )
        usual = datasets.default_length("random-input-len")
        args.random_input_len = max(1, min(usual, room))


def _context(args: Namespace) -> int:
    """Tokens that the model's context holds, as far as is known before it is loaded."""
    known = [args.max_model_len, _model_config(args).get("max_position_embeddings")]
    return min((size for size in known if isinstance(size, int) and size > 0), default=sys.maxsize)


def _samples(args: Namespace) -> list[SampleRequest]:
    from headrace import demo

    text = args.backend == "headrace-chat" or args.dataset_name in ("sharegpt", "sonnet", "custom")
    name = args.tokenizer or args.model or str(demo.path())
    tokenizer = (
        datasets.read_tokenizer(name, offline=args.offline) if text or args.tokenizer else None
    )
    plan = datasets.DatasetOptions(
        args.num_prompts or 1000, args.seed, tokenizer, not args.disable_shuffle, not args.no_oversample,
        offline.high_id(_model_config(args).get("vocab_size") or datasets.HIGH_ID),
    )  # fmt: skip
    samples = datasets.load(args, plan)
    if args.output_len is not None:
        samples = [sample._replace(num_output_tokens=args.output_len) for sample in samples]
    return samples


def _model_config(args: Namespace) -> dict[str, Any]:
    """``config.json`` of the language model; {} where the model is not a folder."""
    import json
    from pathlib import Path

    from headrace import demo

    path = Path(args.model or demo.path()) / "config.json"
    if not path.is_file():
        return {}
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return {**(config.get("text_config") or {}), **config}


def _with_llm(args: Namespace, samples: list[SampleRequest]) -> tuple[float, GeneratedCounts]:
    with offline.engine(offline.engine_settings(args)) as llm:
        prompts = [offline.prompt_of(sample) for sample in samples]
        params = _params(args, samples)
        bar = not args.disable_tqdm
        start = time.perf_counter()
        if args.backend == "headrace-chat":
            chats = [[{"role": "user", "content": sample.prompt}] for sample in samples]
            outputs = llm.chat(chats, params, use_tqdm=bar)
        else:
            outputs = llm.generate(prompts, params, use_tqdm=bar)
        return time.perf_counter() - start, _counts(outputs)


def _with_async(args: Namespace, samples: list[SampleRequest]) -> tuple[float, GeneratedCounts]:
    from headrace.async_llm import AsyncLLM

    engine = AsyncLLM(EngineArgs(**offline.engine_settings(args)))
    params = _params(args, samples)
    for each in params:
        each.output_kind = RequestOutputKind.FINAL_ONLY

    async def run(bar: results.Bar) -> tuple[float, list[RequestOutput]]:
        async def one(index: int) -> RequestOutput:
            last = None
            async for output in engine.generate(
                offline.prompt_of(samples[index]), params[index], f"bench-{index}"
            ):
                last = output
            bar.update(1)
            assert last is not None
            return last

        start = time.perf_counter()
        outputs = await asyncio.gather(*map(one, range(len(samples))))
        seconds = time.perf_counter() - start
        await engine.shutdown()
        return seconds, outputs

    with results.progress(
        len(samples), "requests", "request", enabled=not args.disable_tqdm
    ) as bar:
        seconds, outputs = asyncio.run(run(bar))
    return seconds, _counts(outputs)


def _with_headrace(args: Namespace, samples: list[SampleRequest]) -> tuple[float, GeneratedCounts]:
    return _with_async(args, samples) if args.async_engine else _with_llm(args, samples)


def _with_transformers(
    args: Namespace, samples: list[SampleRequest]
) -> tuple[float, GeneratedCounts]:
    """transformers' own generate: batches of left-padded prompts, each as long as its longest output."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise MissingDependency(
            error.name or "transformers",
            needed_for="--backend hf",
            install="pip install transformers",
        ) from error
    from headrace import demo

    name = args.model or str(demo.path())
    dtype = "auto" if args.dtype == "auto" else getattr(torch, args.dtype)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    model.eval()
    rows = [_ids(sample, args, name) for sample in samples]
    size, num_output = args.hf_max_batch_size, 0
    with results.progress(
        len(samples), "requests", "request", enabled=not args.disable_tqdm
    ) as bar:
        start = time.perf_counter()
        for first in range(0, len(rows), size):
            batch = rows[first : first + size]
            length = max(sample.num_output_tokens for sample in samples[first : first + size])
            width = max(map(len, batch))
            ids = torch.tensor([[0] * (width - len(row)) + row for row in batch])
            mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch])
            with torch.inference_mode():
                model.generate(ids, attention_mask=mask, do_sample=args.n > 1, num_return_sequences=args.n,
                               max_new_tokens=length, min_new_tokens=length, pad_token_id=0)  # fmt: skip
            # Only what was asked for counts: the padding up to the longest output is no one's token.
            num_output += args.n * sum(
                sample.num_output_tokens for sample in samples[first : first + size]
            )
            bar.update(len(batch))
        seconds = time.perf_counter() - start
    return seconds, GeneratedCounts(sum(map(len, rows)), num_output)


def _ids(sample: SampleRequest, args: Namespace, name: str) -> list[int]:
    if not isinstance(sample.prompt, str):
        return sample.prompt
    return datasets.read_tokenizer(args.tokenizer or name).encode(sample.prompt)


def _params(args: Namespace, samples: Sequence[SampleRequest]) -> list[Any]:
    text = not args.disable_detokenize
    return [offline.full_length(s.num_output_tokens, detokenize=text, n=args.n) for s in samples]


def _counts(outputs: Sequence[RequestOutput]) -> GeneratedCounts:
    return GeneratedCounts(
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(len(completion.token_ids) for output in outputs for completion in output.outputs),
    )


RUNNERS: Mapping[str, Runner] = {
    "headrace": _with_headrace,
    "vllm": _with_headrace,
    "headrace-chat": _with_llm,
    "hf": _with_transformers,
}


def _report(
    args: Namespace, num_requests: int, seconds: float, counts: GeneratedCounts
) -> dict[str, Any]:
    total = counts.num_input + counts.num_output
    return {
        "model": args.model,
        "backend": args.backend,
        "elapsed_time": seconds,
        "num_requests": num_requests,
        "total_num_tokens": total,
        "total_input_tokens": counts.num_input,
        "total_output_tokens": counts.num_output,
        "requests_per_second": num_requests / seconds,
        "tokens_per_second": total / seconds,
        "output_tokens_per_second": counts.num_output / seconds,
        **offline.machine(),
    }


def _shown(report: Mapping[str, Any]) -> str:
    return results.table(
        "Throughput",
        [
            ("Model", str(report["model"] or "demo")),
            ("Requests", str(report["num_requests"])),
            ("Input tokens", str(report["total_input_tokens"])),
            ("Output tokens", str(report["total_output_tokens"])),
            ("Duration, s", f"{report['elapsed_time']:.2f}"),
            ("Requests/s", f"{report['requests_per_second']:.2f}"),
            ("Total tokens/s", f"{report['tokens_per_second']:.2f}"),
            ("Output tokens/s", f"{report['output_tokens_per_second']:.2f}"),
        ],
    )
