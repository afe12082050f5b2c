"""The engine step by step, for callers that drive it themselves: :class:`LLMEngine`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from headrace.assembly import front_end, starting
from headrace.assembly.engines import check_fixed_size
from headrace.assembly.missing_packages import missing
from headrace.assembly.templates import PYTHON
from headrace.engine_args import EngineArgs
from headrace.metrics import Metric, OfflineMetrics, disabled
from headrace.offline.arguments import as_adapter, need
from headrace.offline.controls import EngineControls
from headrace.offline.model_facts import ModelFacts
from headrace.offline.own_names import own_names
from headrace.offline.pooling import as_tensor
from headrace_core.errors import EngineError, RequestError
from headrace_core.lora import LoRARequest
from headrace_core.output import PoolingOutput, PoolingRequestOutput, RequestOutput
from headrace_core.pooling import PoolingParams
from headrace_core.request import Prompt
from headrace_core.sampling.params import SamplingParams

if TYPE_CHECKING:
    from headrace.assembly import FrontEnd
    from headrace.tokenizer import ModelTokenizer
    from headrace_engine.offline import OfflineEngine


@own_names
class LLMEngine(EngineControls):
    """Add requests, call :meth:`step` until nothing is unfinished.

    Leaving a ``with`` block, :meth:`shutdown` or dropping the object frees model and cache.
    """

    def __init__(self, args: EngineArgs) -> None:
        self._metrics: OfflineMetrics | ImportError | None = None
        with starting() as timeline:
            with timeline.phase("read settings"):
                config = args.create_engine_config()
                check_fixed_size(config)
            front = front_end(config, PYTHON, timeline)
            with timeline.phase("import offline engine"):
                from headrace_engine.offline import OfflineEngine

            if front.config.observability.log_stats:
                self._metrics = _offline_metrics(front)
            observer = self._metrics if isinstance(self._metrics, OfflineMetrics) else None
            self._engine = OfflineEngine(front.client, front.input_processor, observer)
        self.front: FrontEnd = front
        """The parts that the engine was made of."""
        self._tokenizer: ModelTokenizer | None = None
        self._lock = threading.Lock()

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> LLMEngine:
        """Build model, cache and scheduler."""
        return cls(args)

    @property
    def engine(self) -> OfflineEngine:
        """The synchronous engine underneath, of the package headrace-engine."""
        return self._engine

    @property
    def model_config(self) -> ModelFacts:
        """Facts about the model: ``model``, ``max_model_len``, ``dtype``, ``hf_config``, ..."""
        return ModelFacts(self.engine.model, self.front.info, self.front.config)

    def get_supported_tasks(self) -> tuple[str, ...]:
        """The tasks that the model has, such as ``generate`` or ``embed``."""
        return self.engine.model.tasks

    def get_tokenizer(self) -> ModelTokenizer:
        """The model's tokenizer, with the interface of transformers' tokenizers; one object for all
        calls.

        Raises:
            RuntimeError: none was loaded (``skip_tokenizer_init``).
        """
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = model_tokenizer(self.front)
            return self._tokenizer

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> None:
        """Queue a request.

        Args:
            params: of pooling, with their ``task``, for a model that pools.
            lora_request: the low-rank adapter that it is computed with. Needs ``enable_lora=True``.

        Raises:
            RequestError: the prompt or a parameter is wrong, or the id is in use.
        """
        if not isinstance(request_id, str):
            raise RequestError(
                f"request_id = {request_id!r:.100}: must be text", param="request_id"
            )
        if not isinstance(params, SamplingParams | PoolingParams):
            raise RequestError(
                f"params = {params!r:.100}: must be SamplingParams, or PoolingParams for a model that "
                "pools",
                param="params",
            )
        self.engine.add_request(
            request_id, prompt, params, priority=priority, lora_request=as_adapter(lora_request)
        )

    def step(self) -> list[RequestOutput | PoolingRequestOutput[PoolingOutput]]:
        """Wait for the next outputs; [] if nothing is unfinished.

        Pooling requests have one output, whose ``outputs.data`` is a float32 tensor.
        """
        outputs = self.engine.step()
        for output in outputs:
            if isinstance(output, PoolingRequestOutput):
                output.outputs.data = as_tensor(output.outputs.data)
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Return True while any request waits or runs."""
        return bool(self.engine.has_unfinished_requests())

    def get_num_unfinished_requests(self) -> int:
        """Number of requests of which :meth:`step` will return more."""
        return self.engine.num_unfinished

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests; unknown ids are ignored.

        Raises:
            RequestError: an id is not text; nothing is aborted.
        """
        self.engine.abort_request(request_ids)

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Read an adapter and check it; False: it was known. Requests with it do so, too.

        Raises:
            UnsupportedFeature: the engine takes no adapters (``enable_lora=True``).
            RequestError: its id has another path, or it cannot be used; says why.
        """
        return self.engine.add_lora(need("lora_request", lora_request, LoRARequest))

    def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter; requests under way with it go on. False: the id is unknown."""
        return self.engine.remove_lora(need("lora_id", lora_id, int))

    def list_loras(self) -> set[int]:
        """Ids of the adapters that are known."""
        return {one.lora_int_id for one in self.engine.list_loras()}

    def get_metrics(self) -> list[Metric]:
        """A snapshot of all metrics, under the names of a server's ``/metrics``.

        Returns:
            Objects of :mod:`headrace.metrics`: :class:`~headrace.metrics.Counter`,
            :class:`~headrace.metrics.Gauge`, :class:`~headrace.metrics.Histogram`.

        Raises:
            RequestError: the engine collects no statistics (``log_stats=False``, the default of
                :class:`headrace.LLM`).
            MissingDependency: headrace-server, which defines the metrics, is not installed.
            EngineDead: the engine stopped.
        """
        if self._metrics is None:
            raise disabled()
        if isinstance(self._metrics, ImportError):
            raise missing(self._metrics)
        return self._metrics.snapshot(self.engine.stats(drain=True))

    def shutdown(self) -> None:
        """Stop and free everything. Idempotent.

        Raises:
            EngineError: called by a function that runs inside the engine (:meth:`collective_rpc`).
        """
        self.engine.shutdown()
        self._close_speech()

    def _close_speech(self) -> None:
        if self.front.speech is not None:
            self.front.speech.close()

    def __enter__(self) -> LLMEngine:
        return self

    def __exit__(self, *_: Any) -> None:
        self.shutdown()

    def __del__(self) -> None:
        # Interpreter shutdown may have taken away what closing needs; a failed start has no engine.
        with contextlib.suppress(Exception):
            try:
                self.shutdown()
            except EngineError:  # collected in the engine's own thread, which ends by itself
                self.front.input_processor.close()
                self._close_speech()


def model_tokenizer(front: FrontEnd) -> ModelTokenizer:
    """The tokenizer of a front end, for scripts.

    Raises:
        RuntimeError: none was loaded.
    """
    from headrace.tokenizer import ModelTokenizer  # its thirteen modules are of no use to a start

    if front.input_processor.tokenizer is None:
        raise RuntimeError("no tokenizer was loaded (skip_tokenizer_init)")
    allowed = front.config.model.allow_control_tokens_in_messages
    return ModelTokenizer(front.input_processor, allow_control_tokens=allowed)


def _offline_metrics(front: FrontEnd) -> OfflineMetrics | ImportError:
    try:
        return OfflineMetrics(front.input_processor.model)
    except ImportError as error:  # told to whoever asks for metrics
        return error
