"""Measurement of what fewer bits cost: two models read one text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.assembly.plugged import read_tokenizer
from headrace.assembly.resolved import resolve_engine
from headrace.engine_args import EngineArgs
from headrace_core.errors import ConfigError, EngineError
from headrace_core.sampling.params import SamplingParams

if TYPE_CHECKING:
    from headrace.llm import LLM
    from headrace_core.output import PositionLogprobs

WINDOW = 256
"""Tokens of the text that are read together; each window begins anew."""
LIKELIEST = 128
"""Tokens of each position whose probabilities are compared one by one; all others count as one."""


class Quality(NamedTuple):
    """How a model reads a text."""

    tokens: int
    """Positions that count."""
    perplexity: float
    divergence: float
    """Kullback-Leibler divergence from the original's next-token distributions in nats, mean over the
    positions: of the :data:`LIKELIEST` tokens of both and of all others together, so it is a lower bound."""
    same_likeliest: float
    """Share of the positions where both find the same token likeliest."""


def text_ids(args: EngineArgs, text: str, most_tokens: int) -> list[int]:
    """The text's first tokens, by the model's tokenizer; the model is not loaded.

    Raises:
        ConfigError: there are fewer than two, or the model has no tokenizer.
    """
    tokenizer = read_tokenizer(resolve_engine(args.create_engine_config()))
    if tokenizer is None:
        raise ConfigError("--text: the model has no tokenizer to read it with")
    ids = list(tokenizer.encode(text))[:most_tokens]
    if len(ids) < 2:
        raise ConfigError(f"--text: has {len(ids)} tokens: must have at least 2")
    return ids


def compare_quality(
    original: EngineArgs, quantized: EngineArgs, ids: Sequence[int]
) -> list[Quality]:
    """The quality of the original and of the quantized model.

    One model after the other is loaded, with its settings but for the length of the context; the text is
    read in windows of :data:`WINDOW` tokens.

    Args:
        ids: of the text.

    Raises:
        HeadraceError: a model cannot be loaded, or cannot read the text.
    """
    before, after = (_read(args, ids) for args in (original, quantized))
    return [_quality(before, before), _quality(before, after)]


def _read(args: EngineArgs, ids: Sequence[int]) -> list[PositionLogprobs]:
    from headrace.llm import LLM

    settings: dict[str, Any] = {
        **args.settings, "max_model_len": WINDOW + 1, "max_logprobs": LIKELIEST,
        "logprobs_mode": "raw_logprobs",
    }  # fmt: skip
    with LLM(**settings) as llm:
        return list(_positions(llm, ids))


def _positions(llm: LLM, ids: Sequence[int]) -> Iterator[PositionLogprobs]:
    params = SamplingParams(
        max_tokens=1, prompt_logprobs=LIKELIEST, temperature=0.0, detokenize=False
    )
    windows = [list(ids[start : start + WINDOW]) for start in range(0, len(ids), WINDOW)]
    prompts: list[Any] = [{"prompt_token_ids": window} for window in windows if len(window) > 1]
    for output in llm.generate(prompts, params):
        if output.prompt_logprobs is None:
            raise EngineError(f"the model could not read the text: {output.outputs[0].error}")
        for position in output.prompt_logprobs:
            if position is not None:
                yield position


def _quality(before: Sequence[PositionLogprobs], after: Sequence[PositionLogprobs]) -> Quality:
    nats = divergence = 0.0
    same = 0
    for p, q in zip(before, after, strict=True):
        token = next(iter(q))
        nats -= q[token].logprob
        divergence += _divergence(p, q)
        same += _likeliest(p) == _likeliest(q)
    count = len(after)
    return Quality(count, math.exp(nats / count), divergence / count, same / count)


def _likeliest(position: PositionLogprobs) -> int:
    return max(position, key=lambda token: position[token].logprob)


def _divergence(p: PositionLogprobs, q: PositionLogprobs) -> float:
    total = p_rest = q_rest = 0.0
    for token in p.keys() & q.keys():
        ours, theirs = p[token].logprob, q[token].logprob
        share = math.exp(ours)
        total += share * (ours - theirs)
        p_rest, q_rest = p_rest + share, q_rest + math.exp(theirs)
    p_rest, q_rest = max(1e-12, 1 - p_rest), max(1e-12, 1 - q_rest)
    return max(0.0, total + p_rest * math.log(p_rest / q_rest))
