"""The smallest world around a scheduler: a real KV manager and a worker that checks."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from headrace_core.lora import LoRARequest
from headrace_core.multimodal import MediaInput
from headrace_core.request import CoreRequest
from headrace_core.sampling.params import SamplingParams
from headrace_core.step import ScheduledStep
from headrace_engine.config import SchedulerConfig
from headrace_engine.kv.manager import PagedKVCacheManager
from headrace_engine.messages import CoreOutput
from headrace_engine.scheduler.adapter_slots import SlotPlanner
from headrace_engine.scheduler.scheduler import Scheduler
from headrace_testing.engine.kv_managers import cache_config
from headrace_testing.engine.schedulers import CheckingWorker, expected_tokens

sys.path.insert(0, str(Path(__file__).parent))

VOCAB_SIZE = 1000


class World:
    """Blocks of 2 tokens; steps of up to ``budget`` tokens; synchronous unless told."""

    def __init__(
        self,
        num_blocks: int = 100,
        *groups: str,
        budget: int = 100,
        max_num_seqs: int | None = None,
        max_model_len: int = 100,
        overlapped: bool = False,
        caching: bool = True,
        adapters: SlotPlanner | None = None,
        steps_beside: int = 1,
        **config: Any,
    ) -> None:
        cache = cache_config(num_blocks + 1, *groups, block_size=2)
        self.now = 0.0
        self.kv = PagedKVCacheManager(cache, caching, max_model_len, budget)
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_batched_tokens=budget,
                max_num_seqs=max_num_seqs or min(8, budget),
                **{"encoder_share": 0.0, **config},
            ),
            self.kv,
            max_model_len=max_model_len,
            async_scheduling=overlapped,
            clock=lambda: self.now,
            adapters=adapters,
            steps_beside=steps_beside,
        )
        self.worker = CheckingWorker(cache, VOCAB_SIZE)
        self.in_flight: deque[ScheduledStep] = deque()
        self.outputs: dict[str, list[CoreOutput]] = {}

    def add(
        self,
        request_id: str,
        prompt: list[int] | int,
        max_tokens: int = 4,
        *,
        stop: tuple[int, ...] = (),
        priority: int = 0,
        owner: str = "",
        items: Sequence[tuple[int, int]] = (),
        whole_spans: Sequence[tuple[int, ...]] = (),
        lora_request: LoRARequest | None = None,
        **params: Any,
    ) -> list[int]:
        """Queue a request (of so many tokens of its own); returns the output of a straight run.

        items: (first token, number) of media in the prompt.
        """
        if isinstance(prompt, int):
            prompt = [ord(request_id[-1]) * 100 + i for i in range(prompt)]
        names = [sha256(f"{request_id} {at}".encode()).hexdigest() for at, _ in items]
        media = [MediaInput("image", {}, name, n, at) for name, (at, n) in zip(names, items)]
        self.scheduler.add(
            CoreRequest(
                request_id=request_id,
                prompt_token_ids=prompt,
                params=SamplingParams(max_tokens=max_tokens, **params),
                stop_token_ids=frozenset(stop),
                max_tokens=max_tokens,
                arrival_time=float(self.scheduler._tracker._num_added),
                priority=priority,
                owner=owner,
                media=media,
                whole_spans=list(whole_spans),
                lora_request=lora_request,
            )
        )
        adapter = 0 if lora_request is None else lora_request.lora_int_id
        return expected_tokens(prompt, max_tokens, VOCAB_SIZE, media, adapter)

    def schedule(self) -> ScheduledStep:
        step = self.scheduler.schedule()
        assert step is not None
        self.in_flight.append(step)
        return step

    def land(self) -> list[CoreOutput]:
        """Execute the oldest step in flight and take its result."""
        step = self.in_flight.popleft()
        return self.keep(self.scheduler.update(step, self.worker.execute(step)))

    def step(self) -> dict[str, int]:
        """One synchronous step: what was scheduled."""
        step = self.schedule()
        self.land()
        return step.num_scheduled_tokens

    def run(self) -> list[dict[str, int]]:
        """Until nothing is left."""
        steps = []
        while self.scheduler.has_unfinished:
            steps.append(self.step())
            assert len(steps) < 500, "something starves"
        return steps

    def keep(self, outputs: list[CoreOutput]) -> list[CoreOutput]:
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).append(output)
        return outputs

    def tokens(self, request_id: str) -> list[int]:
        """All output of a request so far."""
        return [t for output in self.outputs.get(request_id, []) for t in output.new_token_ids]

    def finish_reason(self, request_id: str) -> str | None:
        return self.outputs[request_id][-1].finish_reason


@pytest.fixture
def make_world() -> Callable[..., World]:
    return World
