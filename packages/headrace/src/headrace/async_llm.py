"""The streaming engine inside your own asyncio program: :class:`AsyncLLM`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any

from headrace.assembly import front_end, start_engine, starting
from headrace.assembly.templates import PYTHON
from headrace.engine_args import EngineArgs
from headrace.llm_engine import model_tokenizer
from headrace.offline.arguments import (
    WAKING_TIMEOUT,
    as_adapter,
    as_seconds,
    as_tags,
    as_timeout,
    as_worker_call,
    check_chat_options,
    need,
)
from headrace.offline.model_facts import ModelFacts
from headrace.offline.new_weights import Weights, update
from headrace.offline.pooling import (
    as_tensor,
    chosen_task,
    completed,
    for_all,
    score_inputs,
    tokenizing,
)
from headrace.offline.swapping import SWAP_TIMEOUT, WeightsProbe, probe_prompts, swap_options
from headrace_core.engine import Encode, EngineStats
from headrace_core.lora import LoRARequest
from headrace_core.output import BeamSearchOutput, PoolingRequestOutput, ScoringRequestOutput
from headrace_core.pooling import PoolingParams
from headrace_core.pooling.scoring import ScoreInput
from headrace_core.request import Prompt
from headrace_core.sampling.params import BeamSearchParams, SamplingParams
from headrace_core.served_model import ServedModel

if TYPE_CHECKING:
    from headrace.tokenizer import ModelTokenizer
    from headrace_engine.output_processing.stream import EngineOutputs


class AsyncLLM:
    """Serves many concurrent requests; each is an async iterator of outputs.

    Make it with :meth:`from_engine_args`; it starts the engine and waits until it is ready. All
    methods belong to one asyncio event loop.
    """

    def __init__(self, args: EngineArgs) -> None:
        with starting() as timeline:
            self._front = front_end(args.create_engine_config(), PYTHON, timeline)
            self.engine = start_engine(self._front)
        self._tokenizer: ModelTokenizer | None = None

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> AsyncLLM:
        """Build model, cache and scheduler."""
        return cls(args)

    @property
    def model(self) -> ServedModel:
        """Facts about the model, as the engine serves it."""
        return self.engine.model

    @property
    def model_config(self) -> ModelFacts:
        """Facts about the model: ``model``, ``max_model_len``, ``dtype``, ``hf_config``, ..."""
        return ModelFacts(self.engine.model, self._front.info, self._front.config)

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> EngineOutputs:
        """Run one request: an async iterator of outputs; closing it aborts the request.

        Args:
            lora_request: the low-rank adapter that it is computed with. Needs ``enable_lora=True``.

        Raises:
            RequestError: an argument is of the wrong kind; on first iteration: the prompt or a
                parameter is wrong.
            QueueFull, EngineDead: it cannot be taken.
        """
        need("sampling_params", sampling_params, SamplingParams)
        need("request_id", request_id, str)
        return self.engine.generate(
            prompt,
            sampling_params,
            request_id,
            priority=priority,
            lora_request=as_adapter(lora_request),
        )

    async def beam_search(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        request_id: str,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> BeamSearchOutput:
        """Find the likeliest continuations; see :meth:`headrace_core.engine.EngineClient.beam_search`."""
        need("params", params, BeamSearchParams)
        need("request_id", request_id, str)
        return await self.engine.beam_search(
            prompt, params, request_id, priority=priority, lora_request=as_adapter(lora_request)
        )

    async def encode(
        self,
        prompt: Any,
        pooling_params: PoolingParams | None,
        request_id: str,
        *,
        pooling_task: str | None = None,
        priority: int = 0,
        truncate_prompt_tokens: int | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | None = None,
    ) -> PoolingRequestOutput[Any]:
        """Pool one prompt; cancelling the call aborts the request.

        Args:
            prompt: as :meth:`generate`; for the task ``plugin`` whatever the IO processor reads.
            pooling_task: one of :data:`headrace_core.pooling.POOLING_TASKS`; None: the parameters' own.
            truncate_prompt_tokens, tokenization_kwargs: as :meth:`headrace.LLM.embed`.
            lora_request: as :meth:`generate`.

        Returns:
            ``outputs.data`` is a float32 tensor; of the task ``plugin`` ``outputs`` are the IO
            processor's.

        Raises:
            UnsupportedFeature: the model does not have the task.
            RequestError, QueueFull, GenerateError, EngineDead: as :meth:`generate`.
        """
        need("request_id", request_id, str)
        keep, special = tokenizing(tokenization_kwargs, truncate_prompt_tokens)
        pooling_params = for_all(completed(pooling_params, truncate_prompt_tokens=keep))
        task = chosen_task(pooling_params, pooling_task)
        if task == "plugin":
            processor = self.engine.io_processor
            parsed = processor.parse_request(prompt) if processor is not None else prompt
            made = await self.engine.answer_plugin(
                parsed,
                pooling_params,
                request_id,
                priority=priority,
                add_special_tokens=special,
                encode=self._encode_with(as_adapter(lora_request)),
            )
            return PoolingRequestOutput(request_id, made, [])
        output = await self.engine.encode(
            prompt,
            pooling_params or PoolingParams(),
            request_id,
            task=task,
            priority=priority,
            add_special_tokens=special,
            lora_request=as_adapter(lora_request),
        )
        output.outputs.data = as_tensor(output.outputs.data)
        return output

    def _encode_with(self, lora_request: LoRARequest | None) -> Encode | None:
        """Pools the prompts of a plug-in with an adapter; None: with the base model."""
        if lora_request is None:
            return None
        return partial(self.engine.encode, lora_request=lora_request)

    async def score(
        self,
        data_1: ScoreInput | Sequence[ScoreInput],
        data_2: ScoreInput | Sequence[ScoreInput],
        request_id: str,
        *,
        pooling_params: PoolingParams | None = None,
        chat_template: str | None = None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> list[ScoringRequestOutput]:
        """Scores of pairs of texts; see :meth:`headrace.LLM.score`."""
        need("request_id", request_id, str)
        check_chat_options(chat_template=chat_template)
        return await self.engine.score(
            score_inputs(data_1, "data_1"),
            score_inputs(data_2, "data_2"),
            for_all(completed(pooling_params)) or PoolingParams(),
            request_id,
            priority=priority,
            lora_request=as_adapter(lora_request),
            chat_template=chat_template,
        )

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Read an adapter and check it; see :meth:`headrace.LLMEngine.add_lora`."""
        return await self.engine.add_lora(need("lora_request", lora_request, LoRARequest))

    async def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter; see :meth:`headrace.LLMEngine.remove_lora`."""
        return await self.engine.remove_lora(need("lora_id", lora_id, int))

    async def list_loras(self) -> set[int]:
        """Ids of the adapters that are known."""
        return {one.lora_int_id for one in await self.engine.list_loras()}

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests; unknown ids are ignored.

        Raises:
            RequestError: an id is not text; nothing is aborted.
        """
        from headrace_engine.request_ids import as_request_ids

        await self.engine.abort(as_request_ids(request_id, "request_id"))

    @property
    def is_running(self) -> bool:
        return self.engine.dead_error is None

    @property
    def errored(self) -> bool:
        return self.engine.dead_error is not None

    @property
    def dead_error(self) -> BaseException | None:
        """Why the engine stopped, or None."""
        return self.engine.dead_error

    async def get_tokenizer(self) -> ModelTokenizer:
        """The model's tokenizer, with the interface of transformers' tokenizers; one object for all
        calls.

        Raises:
            RuntimeError: none was loaded (``skip_tokenizer_init``).
        """
        if self._tokenizer is None:
            self._tokenizer = model_tokenizer(self._front)
        return self._tokenizer

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """The tasks that the model has, such as ``generate`` or ``embed``."""
        return self.engine.model.tasks

    def get_default_sampling_params(self) -> SamplingParams:
        """Sampling defaults of the model's generation config, else the neutral values."""
        return SamplingParams(**self.model.default_sampling_params)

    async def check_health(self) -> None:
        """Raises: EngineDead if the engine stopped or is stuck."""
        await self.engine.check_health()

    async def stats(self) -> EngineStats:
        """Counters and gauges."""
        return await self.engine.stats()

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget cached blocks; False if some are in use."""
        return await self.engine.reset_prefix_cache(reset_running_requests)

    async def pause_generation(
        self, *, wait_for_inflight_requests: bool = False, clear_cache: bool = True
    ) -> None:
        """Start no further request until :meth:`resume_generation`; new ones wait. Returns when
        nothing runs any more.

        Args:
            wait_for_inflight_requests: let them finish; False aborts them.
            clear_cache: then forget all cached blocks.
        """
        await self.engine.pause_generation(
            wait_for_inflight_requests=wait_for_inflight_requests, clear_cache=clear_cache
        )

    async def resume_generation(self) -> None:
        """Start what waited."""
        await self.engine.resume_generation()

    async def is_paused(self) -> bool:
        return await self.engine.is_paused()

    async def start_profile(self) -> None:
        """Record the coming steps (``profiler_config``)."""
        await self.engine.start_profile()

    async def stop_profile(self) -> None:
        """Write what was recorded."""
        await self.engine.stop_profile()

    async def sleep(self, level: int = 1) -> None:
        """Give the memory of weights and cache back; see :meth:`headrace.LLM.sleep`. What runs must have
        ended: see :meth:`pause_generation`, which also makes new requests wait instead of being
        refused."""
        await self.engine.collective_rpc("sleep", args=[level], timeout=WAKING_TIMEOUT)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take memory again, for all parts or those named; see :meth:`headrace.LLM.wake_up`."""
        await self.engine.collective_rpc("wake_up", args=[as_tags(tags)], timeout=WAKING_TIMEOUT)

    async def is_sleeping(self) -> bool:
        """True until every part is awake."""
        return bool((await self.engine.collective_rpc("is_sleeping"))[0])

    async def weights_version(self) -> str:
        """Version of the weights that compute now; ``0`` until somebody names others."""
        return str((await self.engine.collective_rpc("weights_version"))[0])

    async def set_weights_version(self, version: str) -> None:
        """Name the weights, after they were changed; see :meth:`headrace.LLM.set_weights_version`."""
        await self.engine.collective_rpc("set_weights_version", args=[version])

    async def swap_weights(
        self,
        path: str | PathLike[str],
        *,
        weights_version: str | None = None,
        drain_timeout: float | None = None,
        probe: Sequence[WeightsProbe | tuple[str | Sequence[int], Sequence[int]]] | None = None,
        max_perplexity: float | None = None,
    ) -> dict[str, Any]:
        """Serve with another checkpoint of the same model; see :meth:`headrace.LLM.swap_weights`."""
        given = () if probe is None else probe
        tokens = [(await self.engine.tokenize(p)).token_ids for p in probe_prompts(given)]
        options = swap_options(
            path, given, tokens, weights_version=weights_version, drain_timeout=drain_timeout,
            max_perplexity=max_perplexity,
        )  # fmt: skip
        found = await self.engine.collective_rpc(
            "swap_weights", args=[options], timeout=SWAP_TIMEOUT
        )
        return dict(found[0])

    async def update_weights(
        self,
        weights: Weights | None = None,
        *,
        finish: bool = True,
        mode: str | None = None,
        version: str | None = None,
        target: str = "model",
    ) -> dict[str, Any]:
        """Give the model new weights, or a part of them; see :meth:`headrace.LLM.update_weights`.

        Args:
            mode: with requests that run, when the update finishes: None: they are an error. ``keep``: they go
                on with the new weights. ``wait``: they end first, with the old ones. ``abort``: they end now,
                with finish reason ``abort``. New requests wait meanwhile, and go on afterwards unless
                generation was paused before.

        Raises:
            RequestError, UnsupportedFeature: as there.
        """
        options: dict[str, Any] = {"finish": finish, "version": version, "target": target}
        return await update(self.engine, weights, mode=mode, **options)

    async def cancel_weight_update(self) -> None:
        """Forget the parts of an update that has not finished; the model stays as it is."""
        await self.engine.collective_rpc("update_weights", args=[{"cancel": True}])

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker: results by rank; see :meth:`LLMEngine.collective_rpc`."""
        method, args = as_worker_call(method, args, kwargs)
        timeout = as_timeout(timeout)
        if callable(method):
            return await self.engine.run_on_workers(method, args=args, timeout=timeout)
        return await self.engine.collective_rpc(method, args=args, timeout=timeout)

    async def scale_elastic_ep(self, new_size: int, drain_timeout: float = 300.0) -> int:
        """Have so many data-parallel engines, while requests run: new ones start and join, or those with the
        highest numbers take no new requests and leave. Needs ``data_parallel_size`` above 1 or
        ``enable_elastic_ep``.

        Args:
            drain_timeout: seconds that requests have to end in engines that leave; then they end with an
                error.

        Returns:
            Number of requests that were ended so.

        Raises:
            RequestError: an argument is wrong, the engine cannot be scaled so, or there is no room.
            GenerateError: engines are being scaled or replaced now, or a new one did not start; as many
                engines serve as before.
        """
        return await self.engine.scale_elastic_ep(
            need("new_size", new_size, int), as_seconds("drain_timeout", drain_timeout)
        )

    async def shutdown(self, drain_timeout: float = 0.0) -> None:
        """Stop and free everything. Idempotent."""
        await self.engine.shutdown(drain_timeout)


AsyncLLMEngine = AsyncLLM
"""The same class under its older name."""

__all__ = ["AsyncLLM", "AsyncLLMEngine"]
