"""A prompt to be pooled, and what its requests come to.

A prompt is one request, or, if it is longer than the model takes and may be cut, one for each window.
Windows are embedded without being normalised; the whole is their mean, weighted with their numbers of
tokens, those that are left out not counted, and normalised if that was asked for. Sums are taken in the
order of the windows, so it does not matter in which order they are ready.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from headrace_core.errors import RequestError
from headrace_core.lora import LoRARequest
from headrace_core.output import PoolingOutput, all_versions
from headrace_core.pooling import PoolingParams
from headrace_engine.input_processing.pooling import (
    PooledPrompt,
    PoolingInputProcessor,
    PoolingPrompt,
)
from headrace_engine.output_processing.pooled import PooledOutput

if TYPE_CHECKING:
    from headrace_engine.pooling.vectors import WeightedMean

WINDOW_TOKENS = 4096
"""Tokens of one long text's windows that wait at a time: enough to fill steps, few enough that what
comes later need not wait for the whole text."""


class PoolingJob(NamedTuple):
    """One prompt to be pooled, as it was asked for."""

    prompt: PoolingPrompt
    params: PoolingParams
    task: str
    request_id: str
    priority: int = 0
    add_special_tokens: bool | None = None
    call: str = ""
    """See :meth:`PoolingInputProcessor.read`."""
    side: str = ""
    """The side of a pair that the prompt is, for errors; empty: it is none, or both."""
    lora_request: LoRARequest | None = None


def read_job(input_processor: PoolingInputProcessor, job: PoolingJob) -> PooledPrompt:
    """See :meth:`PoolingInputProcessor.read`; errors name the side in place of the prompt."""
    try:
        return input_processor.read(
            job.prompt,
            job.params,
            job.request_id,
            task=job.task,
            priority=job.priority,
            add_special_tokens=job.add_special_tokens,
            call=job.call,
        )
    except RequestError as error:
        if job.side and error.param == "prompt":
            told = str(error)
            error.param = job.side
            error.args = (
                job.side + told[6:] if told.startswith(("prompt:", "prompt =")) else told,
            )
        raise


def windows_at_once(prompt: PooledPrompt) -> int:
    """Requests of one prompt that may be under way together."""
    return max(2, WINDOW_TOKENS // prompt.window) if prompt.window else 1


class WindowResults:
    """Collects the results of one prompt's requests.

    Args:
        prompt: whose.
    """

    def __init__(self, prompt: PooledPrompt) -> None:
        self._prompt = prompt
        self._missing = prompt.num_windows
        self._waiting: dict[int, PooledOutput] = {}
        self._next = 0
        self._mean: WeightedMean | None = None
        self._first: PooledOutput | None = None

    @property
    def complete(self) -> bool:
        """True once every result is there."""
        return not self._missing

    def add(self, index: int, output: PooledOutput) -> None:
        """The result of the ``index``-th request."""
        self._missing -= 1
        self._first = self._first or output
        if not self._prompt.window:
            return
        self._waiting[index] = output
        while self._next in self._waiting:
            self._take(self._next, self._waiting.pop(self._next))
            self._next += 1

    def output(self) -> PooledOutput:
        """The prompt's result, once it is complete."""
        output = self._first
        assert output is not None
        if not self._prompt.window:
            return output
        assert self._mean is not None
        normalize = self._prompt.params.normalize is not False
        output.request_id = self._prompt.request_id
        output.prompt_token_ids = self._prompt.token_ids
        output.outputs = PoolingOutput(self._mean.result(normalize=normalize))
        return output

    def _take(self, index: int, output: PooledOutput) -> None:
        if self._mean is None:
            from headrace_engine.pooling.vectors import WeightedMean

            self._mean = WeightedMean()
        weight = len(output.prompt_token_ids) - self._prompt.num_left_out(index)
        if weight:
            self._mean.add(output.outputs.data, weight)
        if self._first is not None and output is not self._first:
            first = self._first
            first.num_cached_tokens += output.num_cached_tokens
            first.weights_versions = all_versions((first.weights_versions, output.weights_versions))
