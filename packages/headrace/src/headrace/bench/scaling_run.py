"""The process that ``headrace bench scaling`` starts for each number of threads.

``scaling_run SETTINGS WORK``, both JSON. Loads the engine, times steps, prints :class:`EngineTimes` as JSON.
Each number has a process of its own: threads of torch stay on the cores that they were started on.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from headrace.llm import LLM
    from headrace_core.output import RequestMetrics, RequestOutput

REPEATS = 2


class ScalingWork(NamedTuple):
    """What is timed."""

    batches: tuple[int, ...]
    """Requests at once."""
    input_len: int
    """Tokens of their prompts."""
    output_len: int
    prompt_len: int
    """Of the prompt that is timed alone."""


class DecodeTimes(NamedTuple):
    """Of a step in which each request gets a token. Seconds."""

    step: float
    forward: float
    """The model's pass in it."""

    @property
    def python(self) -> float:
        return max(0.0, self.step - self.forward)


class EngineTimes(NamedTuple):
    """An engine's, with one number of threads."""

    decode: Mapping[int, DecodeTimes]
    """By the number of requests."""
    prefill: float
    """Seconds from the start of a prompt to its first token."""

    def facts(self) -> dict[str, Any]:
        """Plain data."""
        decode = {str(batch): times._asdict() for batch, times in self.decode.items()}
        return {"decode": decode, "prefill": self.prefill}

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> EngineTimes:
        decode = {int(batch): DecodeTimes(**times) for batch, times in facts["decode"].items()}
        return cls(decode, facts["prefill"])


def main(settings: str, work: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is not the answer
    from headrace.llm import LLM

    fields = json.loads(work)
    fields["batches"] = tuple(fields["batches"])
    with LLM(**json.loads(settings)) as llm:
        times = time_engine(llm, ScalingWork(**fields))
    print(json.dumps(times.facts()), file=answers)


def time_engine(llm: LLM, work: ScalingWork) -> EngineTimes:
    """Time an engine whose settings have ``collect_detailed_traces`` for the model, and no prefix caching."""
    seeds = iter(range(1, sys.maxsize))
    decode = {}
    for batch in work.batches:
        rounds = [
            _generated(llm, batch, work.input_len, work.output_len, next(seeds))
            for _ in range(REPEATS)
        ]
        decode[batch] = min(map(decode_times, rounds), key=lambda times: times.step)
    tries = [_generated(llm, 1, work.prompt_len, 1, next(seeds)) for _ in range(REPEATS)]
    return EngineTimes(decode, min(each[0].first_token_ts - each[0].scheduled_ts for each in tries))


def decode_times(requests: Sequence[RequestMetrics]) -> DecodeTimes:
    """Times of a step, from requests that ran at once.

    What is not the model's pass is taken to be as long in the step of the prompts as in the others.
    """
    last = max(requests, key=lambda each: each.first_token_ts)  # from here on all decode
    steps = last.num_generation_tokens - 1
    step = (last.last_token_ts - last.first_token_ts) / steps
    assert last.step_times is not None
    assert last.step_times.forward is not None
    other = last.last_token_ts - last.scheduled_ts - last.step_times.forward
    python = min(step, max(0.0, other / (steps + 1)))
    return DecodeTimes(step, step - python)


def _generated(
    llm: LLM, batch: int, input_len: int, output_len: int, seed: int
) -> list[RequestMetrics]:
    """What requests with new prompts came to."""
    from headrace.bench import offline_common as offline

    below = offline.high_id(llm.model_info.vocab_size)
    samples = offline.random_prompts(batch, input_len, seed, below)
    params = offline.full_length(output_len, detokenize=False)
    outputs = llm.generate([offline.prompt_of(each) for each in samples], params, use_tqdm=False)
    return list(_metrics(outputs))


def _metrics(outputs: Iterable[RequestOutput]) -> Iterable[RequestMetrics]:
    for output in outputs:
        assert output.metrics is not None
        yield output.metrics


if __name__ == "__main__":
    main(*sys.argv[1:3])
