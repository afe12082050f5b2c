"""A request between input processing and output processing."""

from __future__ import annotations

from dataclasses import dataclass

from headrace_core.lora import LoRARequest
from headrace_core.pooling import PoolingParams
from headrace_core.request import CoreRequest
from headrace_core.sampling.params import SamplingParams


@dataclass(slots=True)
class PreparedRequest:
    """A request as taken in: checked, tokenised, split into its completions."""

    request_id: str
    """The caller's."""
    prompt: str | None
    """The prompt's text (a rendered chat, for instance) if it is known."""
    prompt_token_ids: list[int]
    params: SamplingParams
    """The caller's, copied."""
    core_requests: list[CoreRequest]
    """One per completion, with ids of the engine's own."""
    arrival_time: float
    """``time.time()``."""
    pooling: PoolingParams | None = None
    """Parameters of a pooling request, verified; ``params`` mean nothing then."""
    call: str = ""
    """The call that a pooling request is part of, by the caller's name for it."""
    lora_request: LoRARequest | None = None
    """The adapter that it is computed with."""

    def assign(
        self, owner: str, lora_request: LoRARequest | None, engine: int | None = None
    ) -> PreparedRequest:
        """Say whose request it is, which adapter computes it, and in which engine; returns it."""
        self.lora_request = lora_request
        for core in self.core_requests:
            core.owner, core.lora_request = owner, lora_request
            core.data_parallel_rank = engine
        return self

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of all completions."""
        return len(self.prompt_token_ids) * len(self.core_requests)
