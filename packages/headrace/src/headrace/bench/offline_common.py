"""Shared parts of ``bench latency`` and ``bench throughput``: the engine in this process, and its flags."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from headrace.arguments import Parser
from headrace.bench.datasets import HIGH_ID, DatasetOptions, SampleRequest
from headrace.engine_args import EngineArgs
from headrace_core.sampling.params import SamplingParams

if TYPE_CHECKING:
    from headrace.llm import LLM


def parser(name: str, description: str, epilog: str) -> Parser:
    """A parser with the model's positional, ``--config`` and, once its own flags are added, the engine's."""
    made = Parser(prog=f"headrace bench {name}", description=description, epilog=epilog)
    made.add_model()
    return made


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The engine's settings from a parsed command line."""
    return EngineArgs.from_cli_args(args).settings


@contextmanager
def engine(settings: Mapping[str, Any]) -> Iterator[LLM]:
    """An engine in this process; stopped at the end."""
    from headrace.llm import LLM

    with LLM(**settings) as llm:
        yield llm


def high_id(vocab_size: int) -> int:
    """Below it, ids are drawn at random."""
    return min(HIGH_ID, vocab_size)


def full_length(num_tokens: int, *, detokenize: bool, n: int = 1) -> SamplingParams:
    """Parameters for outputs of exactly that many tokens."""
    return SamplingParams(
        n=n, temperature=0.0 if n == 1 else 1.0, max_tokens=num_tokens, ignore_eos=True,
        detokenize=detokenize,
    )  # fmt: skip


def prompt_of(sample: SampleRequest) -> Any:
    """Prompt for ``LLM.generate``."""
    if isinstance(sample.prompt, str):
        return sample.prompt
    return {"prompt_token_ids": sample.prompt}


def random_prompts(count: int, length: int, seed: int, below: int) -> list[SampleRequest]:
    """Prompts of ``length`` random token ids."""
    from headrace.bench.datasets import drawn

    return drawn(DatasetOptions(count, seed, high_id=below), [(0, length, 1)] * count)


def machine() -> dict[str, Any]:
    """Facts besides the flags that a result depends on."""
    import platform

    from headrace import __version__

    return {
        "headrace": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "num_cpus": os.cpu_count(),
    }


def figures_of(seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """Percentile -> seconds."""
    from headrace.bench.metrics import percentile

    ordered = sorted(seconds)
    return {f"{percent:g}": percentile(ordered, percent) for percent in percentiles}
