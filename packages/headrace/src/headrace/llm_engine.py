"""The engine step by step, for callers that drive it themselves: :class:`LLMEngine`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.assembly import front_end, starting
from headrace.engine_args import EngineArgs
from headrace.pooling import as_tensor
from headrace_core.errors import RequestError
from headrace_core.output import PoolingOutput, PoolingRequestOutput, RequestOutput
from headrace_core.pooling import PoolingParams
from headrace_core.request import Prompt
from headrace_core.sampling import SamplingParams


class LLMEngine:
    """Add requests, call :meth:`step` until nothing is unfinished."""

    def __init__(self, args: EngineArgs) -> None:
        with starting() as timeline:
            front = front_end(args.create_engine_config(), None, timeline)
            from headrace_engine.offline import OfflineEngine

            self._engine = OfflineEngine(front.client, front.intake)
        self._speech = front.speech

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> LLMEngine:
        """Build model, cache and scheduler."""
        return cls(args)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        *,
        priority: int = 0,
    ) -> None:
        """Queue a request.

        Args:
            params: of pooling, with their ``task``, for a model that pools.

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
        self._engine.add_request(request_id, prompt, params, priority=priority)

    def step(self) -> list[RequestOutput | PoolingRequestOutput[PoolingOutput]]:
        """Wait for the next outputs; [] if nothing is unfinished.

        Pooling requests have one output, whose ``outputs.data`` is a float32 tensor.
        """
        outputs = self._engine.step()
        for output in outputs:
            if isinstance(output, PoolingRequestOutput):
                output.outputs.data = as_tensor(output.outputs.data)
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._engine.has_unfinished_requests())

    def abort_request(self, request_ids: str | Sequence[str]) -> None:
        """End requests; unknown ids are ignored."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        self._engine.abort_request(ids)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget cached blocks; False if some are in use and running requests may not be reset."""
        return bool(self._engine.reset_prefix_cache(reset_running_requests))

    def shutdown(self) -> None:
        """Stop and free everything. Idempotent."""
        self._engine.shutdown()
        if self._speech is not None:
            self._speech.close()

    def __enter__(self) -> LLMEngine:
        return self

    def __exit__(self, *_: Any) -> None:
        self.shutdown()
