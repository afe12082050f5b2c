"""A core without a model, for tests: the real scheduler and cache manager over a scripted worker.

The vocabulary is Unicode (id = code point) plus an end token, so ids and texts say the same. The
next token is a function of all tokens before it. A request's ``extra_args`` can make the worker
misbehave; see :class:`FakeWorker`.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # children do without
    import pytest

from headrace_core.engine import EngineClient, EngineStats
from headrace_core.executor import Executor, MemoryProfile
from headrace_core.kv import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from headrace_core.sampling.params import SamplingParams
from headrace_core.served_model import ServedModel
from headrace_core.step import (
    NewRequest,
    RequestStepResult,
    ScheduledStep,
    StepResult,
    TokenLogprobs,
)
from headrace_engine.config import EngineConfig, SchedulerConfig
from headrace_engine.core import EngineCore
from headrace_engine.kv.manager import PagedKVCacheManager
from headrace_engine.scheduler.scheduler import Scheduler
from headrace_engine.startup import StartupTimeline
from headrace_engine.step_timer import StepTimer
from headrace_testing.fakes.engine import fake_served_model
from headrace_testing.waiting import until

EOS = 0x110000
VOCAB = 0x110001
BLOCK_SIZE = 4
PATIENCE = 60.0
"""Seconds after which a test gives up waiting; nothing waits that long unless it is broken."""
STEPS = "HEADRACE_TEST_STEPS"
"""Environment variable: the pipe that lets a child's steps through."""


class CharTokenizer:
    """Characters as tokens; EOS is special."""

    vocab_size = VOCAB
    bos_token_id = None
    eos_token_id = EOS
    special_token_ids = frozenset({EOS})
    chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    special_tokens: dict[str, str] = {"eos_token": "</s>"}  # noqa: RUF012

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) for c in text]

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        skip = self.special_token_ids if skip_special_tokens else ()
        return "".join(self.token_string(i) for i in token_ids if i not in skip)

    def token_string(self, token_id: int) -> str:
        return "</s>" if token_id == EOS else chr(token_id)


def next_token(token_ids: Sequence[int], params: SamplingParams) -> int:
    """A letter that depends on all tokens so far; now and then the end token."""
    state = params.seed or 0
    for token_id in token_ids:
        state = (state * 31 + token_id + 7) % 1_000_003
    if state % 61 == 0 and not params.ignore_eos:
        return EOS
    return ord("a") + state % 26


def expected_tokens(prompt: str, params: SamplingParams, limit: int = 10_000) -> list[int]:
    """What the fake core generates for one completion without stop strings."""
    tokens = [ord(c) for c in prompt]
    out: list[int] = []
    while len(out) < min(limit, params.max_tokens or limit):
        token = next_token(tokens + out, params)
        out.append(token)
        if len(out) >= params.min_tokens and token in params.all_stop_token_ids((EOS,)):
            break
    return out


class _Held:
    def __init__(self, request: NewRequest) -> None:
        self.tokens = list(request.token_ids)
        self.num_computed = request.num_computed_tokens
        self.num_prompt = request.num_prompt_tokens
        self.params = request.request.params
        self.failed = False

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt


class Steps:
    """A gate that lets steps through."""

    def release(self, count: float = 1) -> None:
        """Let so many more through."""
        raise NotImplementedError

    async def go_on_until(self, condition: Callable[[], Awaitable[object] | object]) -> None:
        """Steps are made, one at a time, until it is so."""

        def found() -> Awaitable[object] | object:
            self.release()
            return condition()

        await until(found)

    async def go_on_until_running(self, engine: EngineClient, count: int) -> None:
        """Steps are made until exactly so many requests run."""

        async def found() -> bool:
            return (await engine.stats()).num_requests_running == count

        await self.go_on_until(found)


class Turnstile(Steps):
    """Holds a worker's steps: lets as many through as it is told to, or all once it is open."""

    def __init__(self, count: float = 0) -> None:
        self._changed = threading.Condition()
        self._left = count

    def pass_one(self) -> None:
        """The worker's side: wait to be let through."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._left > 0, PATIENCE), "nobody opened it"
            self._left -= 1

    def release(self, count: float = 1) -> None:
        with self._changed:
            self._left += count
            self._changed.notify_all()

    def open(self) -> None:
        """Let all through from now on."""
        self.release(math.inf)

    def hold(self) -> None:
        """Let none through from now on."""
        with self._changed:
            self._left = 0


class PipedTurnstile(Turnstile):
    """The gate of a worker in another process: a byte in a pipe lets a step through, ``*`` opens it."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._pipe = os.open(path, os.O_RDWR)

    def pass_one(self) -> None:
        if not self._left:
            self._left = math.inf if os.read(self._pipe, 1) == b"*" else 0


class ChildSteps(Steps):
    """The test's end of it: the steps of a child whose story is ``held``."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = folder / "steps"
        os.mkfifo(path)
        monkeypatch.setenv(STEPS, str(path))
        self._pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)

    def release(self, count: float = 1) -> None:
        os.write(self._pipe, b"." * int(count))

    def open(self) -> None:
        """Let all steps through from now on."""
        os.write(self._pipe, b"*")

    def close(self) -> None:
        os.close(self._pipe)


class FakeWorker:
    """Generates :func:`next_token`.

    ``extra_args`` of a request: ``fail_at`` (its own error at that many tokens), ``raise_at`` (the
    step raises), ``die_at`` (the executor dies), ``exit_at`` (the process ends).

    A step takes no time, but ends when the ``turnstile`` lets it through. It is said to have taken
    ``step_seconds``: while a later step of its kind runs, the loop expects that and hears commands.
    """

    def __init__(self, step_seconds: float = 0.0, turnstile: Turnstile | None = None) -> None:
        self.step_seconds = step_seconds
        self.turnstile = turnstile
        self.held: dict[str, _Held] = {}
        self.calls: list[str] = []
        self.batch_sizes: list[int] = []

    def load(self) -> None:
        self.calls.append("load")

    def kv_specs(self) -> dict[str, FullAttentionSpec]:
        self.calls.append("kv_specs")
        return {"layers.0": FullAttentionSpec(16, 1, 4, "float32")}

    def profile(self) -> MemoryProfile:
        self.calls.append("profile")
        return MemoryProfile(weights=1000, activations=1000, available=1 << 24)

    def allocate_cache(self, config: KVCacheConfig) -> None:
        self.calls.append("allocate_cache")

    def warm_up(self) -> None:
        self.calls.append("warm_up")

    def when_launching(self, call: Callable[[], None]) -> None:
        self.calls.append("when_launching")

    def report(self) -> dict[str, Any]:
        self.calls.append("report")
        return {"rank": 0}

    def apply_model(self, function: Callable[[Any], Any]) -> Any:
        self.calls.append("apply_model")
        return function(self)

    def start_profile(self) -> None:
        self.calls.append("start_profile")

    def stop_profile(self) -> None:
        self.calls.append("stop_profile")

    def update_config(self, changes: object) -> None:
        self.calls.append("update_config")

    def reload_weights(self) -> None:
        self.calls.append("reload_weights")

    def give_back_memory(self, keep: bool = False) -> None:
        self.calls.append("give_back_memory, keeping" if keep else "give_back_memory")

    def read_weights(self, changed: bool) -> None:
        self.calls.append("read_weights, changed" if changed else "read_weights")

    def restore_cache(self) -> None:
        self.calls.append("restore_cache")

    def adopt_beside(self) -> None:
        self.calls.append("adopt_beside")

    def drop_beside(self) -> None:
        self.calls.append("drop_beside")

    def close(self) -> None:
        self.calls.append("close")

    def execute(self, step: ScheduledStep) -> StepResult:
        if self.turnstile is not None:
            self.turnstile.pass_one()
        for request_id in step.gone_request_ids:
            self.held.pop(request_id, None)
        for request in step.new_requests:
            self.held[request.request_id] = _Held(request)
        self.batch_sizes.append(len(step.num_scheduled_tokens))
        results = {i: self._run(i, n) for i, n in step.num_scheduled_tokens.items()}
        return StepResult(step.step_id, results, forward_seconds=self.step_seconds)

    def _run(self, request_id: str, num_tokens: int) -> RequestStepResult:
        held = self.held[request_id]
        if held.failed:  # in a step that was scheduled before the failure was known
            return RequestStepResult(error="failed before")
        before, held.num_computed = held.num_computed, held.num_computed + num_tokens
        assert held.num_computed <= len(held.tokens), "computed a token that is not known"
        self._misbehave(held)
        args = held.params.extra_args or {}
        if held.num_generated >= args.get("fail_at", 1 << 30):
            held.failed = True
            return RequestStepResult(error="failed as told")
        result = RequestStepResult()
        if held.params.prompt_logprobs is not None:
            positions = range(before + 1, min(held.num_computed + 1, held.num_prompt))
            result.prompt_logprobs = [_logprobs(held.tokens[p], 1) for p in positions]
        if held.num_computed == len(held.tokens):
            token = next_token(held.tokens, held.params)
            held.tokens.append(token)
            result.token_ids = [token]
            if held.params.logprobs is not None:
                result.logprobs = [_logprobs(token, held.params.logprobs)]
        return result

    def _misbehave(self, held: _Held) -> None:
        args: dict[str, Any] = held.params.extra_args or {}
        if held.num_generated == args.get("raise_at", -1):
            raise ValueError("raised as told")
        if held.num_generated == args.get("die_at", -1):
            raise SystemError("died as told")
        if held.num_generated == args.get("exit_at", -1):
            os._exit(3)


def _logprobs(token: int, count: int) -> TokenLogprobs:
    """The token at rank 1, the letters after it at the ranks behind."""
    ids = [token, *(ord("A") + i for i in range(max(0, count - 1)))]
    return TokenLogprobs(ids, [-0.25 - i for i in range(len(ids))], list(range(1, len(ids) + 1)))


class FakeExecutor(Executor):
    """Runs a FakeWorker in a thread, one step after the other."""

    def __init__(self, worker: FakeWorker) -> None:
        super().__init__(lambda: worker)
        self.worker = worker
        self._pool = ThreadPoolExecutor(1)
        self._failure: BaseException | None = None
        self.is_shut_down = False
        self.beside: list[tuple[tuple[Any, ...], Future[list[Any]]]] = []
        """Calls beside steps, and where their results go."""

    def start(self) -> None:
        pass

    def call_beside(self, method: str, *args: Any) -> Future[list[Any]]:
        self.beside.append(((method, *args), Future()))
        return self.beside[-1][1]

    def call(self, method: str | Callable[..., Any], *args: Any) -> list[Any]:
        if isinstance(method, str):
            return [self._pool.submit(getattr(self.worker, method), *args).result(PATIENCE)]
        return [self._pool.submit(method, self.worker, *args).result(PATIENCE)]

    def submit(self, step: ScheduledStep) -> Future[StepResult]:
        return self._pool.submit(self._execute, step)

    def _execute(self, step: ScheduledStep) -> StepResult:
        try:
            return self.worker.execute(step)
        except SystemError as error:
            self._failure = error
            raise

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    def shutdown(self) -> None:
        self.is_shut_down = True
        self._pool.shutdown(wait=True, cancel_futures=True)


def served_model(**changes: Any) -> ServedModel:
    values: dict[str, Any] = {
        "vocab_size": VOCAB, "eos_token_ids": (EOS,), "max_model_len": 512, **changes
    }  # fmt: skip
    return fake_served_model(**values)


def make_core(
    *,
    overlapped: bool = True,
    num_blocks: int = 400,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 256,
    step_seconds: float = 0.0,
    turnstile: Turnstile | None = None,
    max_model_len: int = 512,
    policy: Any = "fcfs",
    log_stats_interval: float = 0.0,
    step_timer: StepTimer | None = None,
    sleep_mode: bool = False,
) -> EngineCore:
    """A core whose cache holds ``num_blocks`` blocks of four tokens."""
    spec = FullAttentionSpec(BLOCK_SIZE, 1, 1, "float32")
    kv = PagedKVCacheManager(
        KVCacheConfig((num_blocks,), (KVCacheGroup(("layer",), spec),)), True, max_model_len
    )
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        policy=policy,
        async_scheduling=overlapped,
    )
    scheduler = Scheduler(config, kv, max_model_len=max_model_len, async_scheduling=overlapped)
    return EngineCore(
        scheduler,
        FakeExecutor(FakeWorker(step_seconds, turnstile)),
        overlapped=overlapped,
        log_stats_interval=log_stats_interval,
        memory_plan="a plan",
        block_size=BLOCK_SIZE,
        step_timer=step_timer,
        sleep_mode=sleep_mode,
    )


def core_factory(config: EngineConfig, timeline: StartupTimeline) -> EngineCore:
    """For a core in another process; ``load.load_format`` of the configuration picks a story."""
    story = config.load.load_format
    if story == "capacity":
        from headrace_core.errors import CapacityError

        raise CapacityError("the longest request needs 7 GiB of 3 GiB")
    if story == "crash":
        os._exit(9)
    if story == "bug":
        raise KeyError("a bug")
    with timeline.phase("load model"):
        pass
    held = story == "held"
    return make_core(
        overlapped=config.scheduler.async_scheduling is not False,
        turnstile=PipedTurnstile(os.environ[STEPS]) if held else None,
        step_seconds=PATIENCE if held else 0.0,
    )


async def until_stats(engine: EngineClient, condition: Callable[[EngineStats], object]) -> None:
    """Until the engine's statistics are such."""

    async def found() -> object:
        return condition(await engine.stats())

    await until(found)
