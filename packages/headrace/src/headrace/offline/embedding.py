"""Vectors, classes and scores: ``LLM.embed``, ``classify``, ``reward``, ``score``, ``encode``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.offline.arguments import as_adapter, as_adapters, as_prompts, check_chat_options
from headrace.offline.engine import EngineMixin
from headrace.offline.pooling import (
    OfflinePooling,
    chosen_task,
    completed,
    for_all,
    score_inputs,
    tokenizing,
)
from headrace.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
)
from headrace_core.lora import LoRARequest
from headrace_core.output import (
    PoolingOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from headrace_core.pooling import PoolingParams
from headrace_core.pooling.scoring import ScoreInput
from headrace_core.request import Prompt

Adapters = LoRARequest | Sequence[LoRARequest | None] | None
"""The adapter of all prompts, or one for each; None: the base model alone."""


class PoolingMixin(EngineMixin):
    """Pools prompts and scores pairs of texts."""

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Adapters = None,
        truncate_prompt_tokens: int | None = None,
        prompt_name: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """One vector for each prompt.

        Args:
            prompts: as :meth:`generate`.
            pooling_params: None: the model's defaults; one for all; or one per prompt.
            use_tqdm, lora_request: as :meth:`generate`.
            truncate_prompt_tokens: keep so many tokens of each prompt, its end; -1: as many as the
                model takes.
            prompt_name: put this prompt of the checkpoint's before each text (Sentence Transformers'
                ``prompts``, listed by ``model_info.pooling``); None: its default one, if it has any.
            tokenization_kwargs: ``add_special_tokens`` and ``truncate_prompt_tokens``, which win.

        Returns:
            One output per prompt, in order; ``outputs.embedding`` is a list of numbers.

        Raises:
            UnsupportedFeature: the model does not embed; says what would help.
            RequestError: a prompt or parameter is wrong; nothing is left running.
            GenerateError: a prompt failed.
        """
        keep, special = tokenizing(tokenization_kwargs, truncate_prompt_tokens)
        params = completed(pooling_params, truncate_prompt_tokens=keep, prompt_name=prompt_name)
        pooling = self._pooling("LLM.embed", "embed")
        every = as_prompts(prompts)
        adapters = as_adapters(lora_request, len(every))
        return pooling.embed(every, params, use_tqdm, special, adapters)

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Adapters = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Probabilities of the model's labels for each prompt; arguments and errors as
        :meth:`embed`.

        Returns:
            One output per prompt, in order; ``outputs.probs`` is a list of numbers.
        """
        keep, special = tokenizing(tokenization_kwargs, None)
        params = completed(pooling_params, truncate_prompt_tokens=keep)
        pooling = self._pooling("LLM.classify", "classify")
        every = as_prompts(prompts)
        adapters = as_adapters(lora_request, len(every))
        return pooling.classify(every, params, use_tqdm, special, adapters)

    def reward(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Adapters = None,
        truncate_prompt_tokens: int | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Rewards of each prompt's tokens (task ``token_classify``); arguments and errors as
        :meth:`embed`.

        Returns:
            One output per prompt, in order; ``outputs.data`` is a tensor [tokens, labels].
        """
        keep, special = tokenizing(tokenization_kwargs, truncate_prompt_tokens)
        params = completed(pooling_params, truncate_prompt_tokens=keep)
        pooling = self._pooling("LLM.reward", "token_classify")
        every = as_prompts(prompts)
        adapters = as_adapters(lora_request, len(every))
        return pooling.encode(every, params, "token_classify", use_tqdm, special, adapters)

    def score(
        self,
        data_1: ScoreInput | Sequence[ScoreInput],
        data_2: ScoreInput | Sequence[ScoreInput],
        /,
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | None = None,
        truncate_prompt_tokens: int | None = None,
        chat_template: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ScoringRequestOutput]:
        """Score how well the texts of each pair fit.

        Args:
            data_1, data_2: one text each, one and many, or equally many.
            chat_template: makes the prompt of a pair, for models that read both texts in one; gets
                two ``messages``, of the roles ``query`` and ``document``. Models that embed each text
                by itself refuse it.
            tokenization_kwargs: as :meth:`embed`; special tokens can be left out only where each text
                is embedded, or a template makes the prompt.
            lora_request: the adapter that all pairs are computed with.
            pooling_params, use_tqdm, truncate_prompt_tokens: as :meth:`embed`.

        Returns:
            One output per pair, in order; ``outputs.score`` is a number.

        Raises: as :meth:`embed`.
        """
        keep, special = tokenizing(tokenization_kwargs, truncate_prompt_tokens)
        params = completed(pooling_params, truncate_prompt_tokens=keep)
        check_chat_options(chat_template=chat_template)
        pooling = self._pooling("LLM.score", None)
        return pooling.score(
            score_inputs(data_1, "data_1"),
            score_inputs(data_2, "data_2"),
            for_all(params),
            chat_template,
            use_tqdm,
            special,
            as_adapter(lora_request),
        )

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt] | Any,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Adapters = None,
        truncate_prompt_tokens: int | None = None,
        pooling_task: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        prompt_name: str | None = None,
    ) -> list[PoolingRequestOutput[Any]]:
        """Pool prompts for any task of the model.

        Args:
            prompts: as :meth:`generate`; for the task ``plugin`` whatever the IO processor reads.
            pooling_task: one of :data:`headrace_core.pooling.POOLING_TASKS`.
            lora_request: as :meth:`embed`; one for all with the task ``plugin``.
            pooling_params, use_tqdm, truncate_prompt_tokens, prompt_name, tokenization_kwargs: as
                :meth:`embed`.

        Returns:
            One output per prompt, in order; ``outputs.data`` is a float32 tensor, [size] or, for tasks
            on tokens, [tokens, size]. Of the task ``plugin`` one output, whose ``outputs`` are the IO
            processor's.

        Raises: as :meth:`embed`.
        """
        keep, special = tokenizing(tokenization_kwargs, truncate_prompt_tokens)
        self._pooling("LLM.encode", None)
        params = completed(pooling_params, truncate_prompt_tokens=keep, prompt_name=prompt_name)
        task = chosen_task(params, pooling_task)
        if task == "plugin":
            pooling = self._pooling("LLM.encode", None)
            adapter = as_adapter(lora_request)
            return pooling.plugin(prompts, for_all(params), use_tqdm, special, adapter)
        pooling = self._pooling("LLM.encode", task)
        every = as_prompts(prompts)
        adapters = as_adapters(lora_request, len(every))
        return pooling.encode(every, params, task, use_tqdm, special, adapters)

    def _pooling(self, call: str, task: str | None) -> OfflinePooling:
        """The pooling half of the engine.

        Raises:
            UnsupportedFeature: the model generates, or does not have the task.
        """
        from headrace_engine.input_processing.pooling import check_pools, check_task

        model = self.engine.model
        if task is None:
            check_pools(model, call=call)
        else:
            check_task(model, task, call=call)
        return OfflinePooling(self.engine, self.llm_engine.front.io_processor)
