"""Sequences to be aligned -> checked core requests; see
:meth:`headrace_core.engine.EngineClient.align`."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from headrace_core.errors import PromptTooLong, RequestError, UnsupportedFeature
from headrace_core.pooling import PoolingParams
from headrace_core.request import CoreRequest, Prompt
from headrace_core.served_model import ServedModel
from headrace_core.speech.model import ALIGN_TASK
from headrace_engine.input_processing.pooling import NO_SAMPLING, check_priority
from headrace_engine.input_processing.prepared import PreparedRequest
from headrace_engine.input_processing.prompts import PromptReader


class AlignmentInputProcessor:
    """Takes in sequences for one model. Thread-safe.

    Args:
        model: facts and limits, as they are when a request comes.
        prompts: reads prompts.
        clock: wall-clock seconds.
    """

    def __init__(
        self,
        model: Callable[[], ServedModel],
        prompts: PromptReader,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._model = model
        self._prompts = prompts
        self._clock = clock
        self._serial = itertools.count()  # next() is atomic

    def prepare(self, prompt: Prompt, request_id: str, *, priority: int = 0) -> PreparedRequest:
        """Take in one sequence with its media.

        Raises:
            UnsupportedFeature: the model does not tell which part of its media a token comes from.
            RequestError: naming the field.
            PromptTooLong: the sequence exceeds the context.
        """
        arrival_time, model = self._clock(), self._model()
        if ALIGN_TASK not in model.tasks:
            raise UnsupportedFeature(
                f"{model.name}: does not tell when words are said (task {ALIGN_TASK!r}): its "
                "checkpoint names no heads that align",
                param="model",
            )
        check_priority(priority, model)
        tokens = self._prompts.read(prompt, None)
        if not tokens.media:
            raise RequestError("multi_modal_data: must be given", param="multi_modal_data")
        if not tokens.ids:
            raise RequestError("prompt: must hold at least one token", param="prompt")
        if len(tokens.ids) > model.max_model_len:
            raise PromptTooLong(model.max_model_len, len(tokens.ids))
        params = PoolingParams(task=ALIGN_TASK, skip_reading_prefix_cache=True)
        core = CoreRequest(
            request_id=f"{request_id}#a{next(self._serial):x}",
            prompt_token_ids=tokens.ids,
            params=NO_SAMPLING,
            stop_token_ids=frozenset(),
            max_tokens=1,
            arrival_time=arrival_time,
            priority=priority,
            pooling=params,
            media=list(tokens.media),
            num_encoder_tokens=tokens.num_encoder_tokens,
        )
        return PreparedRequest(
            request_id=request_id,
            prompt=tokens.text,
            prompt_token_ids=tokens.ids,
            params=NO_SAMPLING,
            core_requests=[core],
            arrival_time=arrival_time,
            pooling=params,
        )
