"""The pooling half of :class:`headrace.LLM`: embeddings, classes, scores, rows of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from headrace.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
)
from headrace.progress import prompt_bar
from headrace_core.arrays import PackedArray, own_value
from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_core.lora import LoRARequest
from headrace_core.output import (
    PoolingOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from headrace_core.pooling import POOLING_TASKS, PoolingParams
from headrace_core.pooling.io_processor import IOProcessor
from headrace_core.pooling.scoring import ScoreInput
from headrace_core.request import Prompt, modality_of
from headrace_engine.pooling.plugin_task import as_prompts as plugin_prompts
from headrace_engine.pooling.plugin_task import plugin_params

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_engine.offline import OfflineEngine

Progress = bool | Callable[..., Any]
Adapters = Sequence[LoRARequest | None] | None
"""One for each prompt; None: all with the base model."""
Params = PoolingParams | Sequence[PoolingParams] | None
OutputT = TypeVar("OutputT")

METHODS: Mapping[str, str] = {
    "embed": "LLM.embed",
    "classify": "LLM.classify",
    "score": "LLM.score",
    "token_classify": "LLM.reward",
}
"""Task -> the method for it."""


class OfflinePooling:
    """Calls of one offline engine.

    Args:
        engine: the engine.
        io_processor: of the task ``plugin``.
    """

    def __init__(self, engine: OfflineEngine, io_processor: IOProcessor | None) -> None:
        self._engine = engine
        self._io_processor = io_processor

    def embed(
        self,
        prompts: Sequence[Prompt],
        params: Params,
        use_tqdm: Progress,
        add_special_tokens: bool | None = None,
        lora_requests: Adapters = None,
    ) -> list[EmbeddingRequestOutput]:
        """One vector for each prompt."""
        pooled = self._pool(prompts, params, "embed", use_tqdm, add_special_tokens, lora_requests)
        return [_changed(output, EmbeddingOutput(_numbers(output))) for output in pooled]

    def classify(
        self,
        prompts: Sequence[Prompt],
        params: Params,
        use_tqdm: Progress,
        add_special_tokens: bool | None = None,
        lora_requests: Adapters = None,
    ) -> list[ClassificationRequestOutput]:
        """One row of probabilities for each prompt."""
        pooled = self._pool(
            prompts, params, "classify", use_tqdm, add_special_tokens, lora_requests
        )
        return [_changed(output, ClassificationOutput(_numbers(output))) for output in pooled]

    def encode(
        self,
        prompts: Sequence[Prompt],
        params: Params,
        task: str,
        use_tqdm: Progress,
        add_special_tokens: bool | None = None,
        lora_requests: Adapters = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Results as tensors."""
        pooled = self._pool(prompts, params, task, use_tqdm, add_special_tokens, lora_requests)
        return [
            _changed(output, PoolingOutput(as_tensor(output.outputs.data))) for output in pooled
        ]

    def score(
        self,
        data_1: Sequence[ScoreInput],
        data_2: Sequence[ScoreInput],
        params: PoolingParams | None,
        chat_template: str | None,
        use_tqdm: Progress,
        add_special_tokens: bool | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[ScoringRequestOutput]:
        """One score for each pair."""
        pooling = self._engine.model.pooling
        total = max(len(data_1), len(data_2))
        if pooling is not None and pooling.scoring != "cross":  # each text by itself, once
            total = len({repr(text) for text in (*data_1, *data_2)})
        with prompt_bar(total, use_tqdm) as on_output:
            return self._engine.score(
                data_1,
                data_2,
                params or PoolingParams(),
                chat_template=chat_template,
                add_special_tokens=add_special_tokens,
                lora_request=lora_request,
                on_output=on_output,
            )

    def plugin(
        self,
        data: Any,
        params: PoolingParams | None,
        use_tqdm: Progress,
        add_special_tokens: bool | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[PoolingRequestOutput[Any]]:
        """Result of the IO processor for data: a list of one."""
        processor = self._io_processor
        if processor is None:
            raise UnsupportedFeature(
                "encode(pooling_task='plugin'): the engine has no IO processor; it must be made with "
                "io_processor_plugin",
                param="task",
            )
        prompts = plugin_prompts(processor.pre_process(processor.parse_request(data)))
        chosen, task = plugin_params(processor, self._engine.model, params)
        with prompt_bar(len(prompts), use_tqdm) as on_output:
            pooled = self._engine.encode(
                prompts,
                chosen,
                task=task,
                add_special_tokens=add_special_tokens,
                lora_requests=None if lora_request is None else [lora_request] * len(prompts),
                on_output=on_output,
            )
        output = processor.post_process(pooled)
        ids = [token for one in pooled for token in one.prompt_token_ids]
        return [PoolingRequestOutput(pooled[0].request_id, output, ids)]

    def _pool(
        self,
        prompts: Sequence[Prompt],
        params: Params,
        task: str,
        use_tqdm: Progress,
        add_special_tokens: bool | None = None,
        lora_requests: Adapters = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        with prompt_bar(len(prompts), use_tqdm) as on_output:
            return self._engine.encode(
                prompts,
                PoolingParams() if params is None else params,
                task=task,
                add_special_tokens=add_special_tokens,
                lora_requests=lora_requests,
                on_output=on_output,
            )


def as_tensor(data: PackedArray) -> Tensor:
    """A float32 result as a tensor of its own."""
    import torch

    if not data.data:
        return torch.zeros(data.shape)
    return torch.frombuffer(bytearray(data.data), dtype=torch.float32).view(data.shape)


def completed(
    params: Params, *, truncate_prompt_tokens: int | None = None, prompt_name: str | None = None
) -> Params:
    """The parameters with those of the call's arguments that are given.

    Raises:
        RequestError: they are no :class:`PoolingParams`, nor a list of them, nor None.
    """
    _check_params(params)
    named = {"truncate_prompt_tokens": truncate_prompt_tokens, "prompt_name": prompt_name}
    given: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    if not given:
        return params
    if params is None or isinstance(params, PoolingParams):
        return replace(params.clone() if params else PoolingParams(), **given)
    return [replace(one.clone(), **given) for one in params]


def _check_params(params: object) -> None:
    if params is None or isinstance(params, PoolingParams):
        return
    if not isinstance(params, Sequence) or isinstance(params, str | bytes):
        raise RequestError(
            f"pooling_params = {params!r:.100}: must be a PoolingParams, a list with one for each "
            "prompt, or None",
            param="pooling_params",
        )
    for index, one in enumerate(params):
        if not isinstance(one, PoolingParams):
            raise RequestError(
                f"pooling_params[{index}] = {one!r:.100}: must be a PoolingParams",
                param="pooling_params",
            )


def for_all(params: Params) -> PoolingParams | None:
    """Parameters of a call that has no prompts of its own to give each its own.

    Raises:
        RequestError: there are several.
    """
    if params is None or isinstance(params, PoolingParams):
        return params
    raise RequestError(
        f"pooling_params: {len(params)} given; must be one PoolingParams for the whole call, or None",
        param="pooling_params",
    )


def chosen_task(params: Params, pooling_task: str | None) -> str:
    """Task of ``encode``, from its argument or from all of the parameters.

    Raises:
        RequestError: it does not say, or what it says is no task.
    """
    task = pooling_task
    if task is None and params is not None:
        every = [params] if isinstance(params, PoolingParams) else params
        said = {one.task for one in every}
        task = said.pop() if len(said) == 1 else None
    if task is None:
        methods = ", ".join(f"{method} ({task})" for task, method in METHODS.items())
        raise RequestError(
            f"pooling_task = None: must be one of {', '.join(POOLING_TASKS)}; or call the method for "
            f"it: {methods}",
            param="pooling_task",
        )
    if task not in POOLING_TASKS:
        raise RequestError(
            f"pooling_task = {task!r}: must be one of {', '.join(POOLING_TASKS)}",
            param="pooling_task",
            value=task,
        )
    return task


def tokenizing(
    options: Mapping[str, Any] | None, truncate_prompt_tokens: int | None
) -> tuple[int | None, bool | None]:
    """Tokenization of texts: the number of tokens to keep, and whether to add special ones.

    Args:
        options: ``tokenization_kwargs`` of a call, which win.
        truncate_prompt_tokens: its argument of that name.

    Raises:
        RequestError: an option is unknown, or its value wrong.
    """
    if options is not None and not isinstance(options, Mapping):
        raise _refused_tokenizing("", options, "a mapping of names to values")
    given = {"truncate_prompt_tokens": truncate_prompt_tokens, "add_special_tokens": None}
    given |= options or {}
    keep, special = given.pop("truncate_prompt_tokens"), given.pop("add_special_tokens")
    if given:
        raise RequestError(
            f"tokenization_kwargs: {sorted(map(str, given))} cannot be served; must be of "
            "add_special_tokens, truncate_prompt_tokens",
            param="tokenization_kwargs",
        )
    if special is not None and not isinstance(special, bool):
        raise _refused_tokenizing(".add_special_tokens", special, "True, False or None")
    return keep, special


def _refused_tokenizing(name: str, value: object, accepted: str) -> RequestError:
    return RequestError(
        f"tokenization_kwargs{name} = {value!r:.100}: must be {accepted}",
        param="tokenization_kwargs",
    )


def score_inputs(data: ScoreInput | Sequence[ScoreInput], name: str = "data") -> list[ScoreInput]:
    """One side of pairs as a list; each part of an object with parts is one input, if any is no text.

    Args:
        name: of the argument, for messages.

    Raises:
        RequestError: it is neither one nor several.
    """
    if isinstance(data, Mapping):
        parts = data.get("content")
        if not isinstance(parts, list | tuple) or not any(map(modality_of, parts)):
            return [data]
        return [{**data, "content": [part]} for part in parts]
    if isinstance(data, str):
        return [data]
    return listed(name, own_value(data))


def listed(name: str, given: Any) -> list[Any]:
    """Several prompts as a list; bytes are refused, though they are a sequence of integers.

    Raises:
        RequestError: there are not several.
    """
    if not isinstance(given, Iterable) or isinstance(given, bytes | bytearray | memoryview):
        raise RequestError(
            f"{name} = {given!r:.100}: must be text, token ids, a dictionary with 'prompt' or "
            "'prompt_token_ids', or a list of such",
            param=name,
        )
    return list(given)


def _numbers(output: PoolingRequestOutput[PoolingOutput]) -> list[float]:
    numbers: list[float] = output.outputs.data.tolist()
    return numbers


def _changed(
    output: PoolingRequestOutput[PoolingOutput], outputs: OutputT
) -> PoolingRequestOutput[OutputT]:
    """The same request with its result in another form."""
    return PoolingRequestOutput(
        output.request_id,
        outputs,
        output.prompt_token_ids,
        output.num_cached_tokens,
        output.finished,
        output.metrics,
        output.weights_versions,
    )
