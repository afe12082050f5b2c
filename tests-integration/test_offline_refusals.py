"""``LLM`` where a script goes wrong: functions that exit or call their engine, and a closed object."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from headrace import LLM, AsyncLLM, EngineArgs, SamplingParams
from headrace.sampling_params import BeamSearchParams
from headrace_core.errors import EngineError, RequestError

SMALL = {"max_model_len": 512, "max_num_seqs": 16, "num_threads": 1}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
QUIET: dict[str, Any] = {"use_tqdm": False}
CHAT = [{"role": "user", "content": "What is 2 + 3?"}]
LIMIT = 60.0
"""Seconds after which a hang is one."""


@pytest.fixture(scope="module")
def llm():
    with LLM(**SMALL) as llm:
        yield llm


def leave(_: object) -> None:
    sys.exit(3)


def interrupt(_: object) -> None:
    raise KeyboardInterrupt


def test_a_function_that_exits_fails_alone(llm):
    first = llm.generate("Hello", GREEDY, **QUIET)[0].outputs[0].text
    queued = llm.enqueue("Hello", GREEDY, **QUIET)
    for function, exit_ in ((leave, r"SystemExit\(3\)"), (interrupt, "KeyboardInterrupt")):
        with pytest.raises(
            EngineError, match=f"collective_rpc: {function.__name__} raised {exit_}"
        ):
            llm.collective_rpc(function, timeout=LIMIT)
        with pytest.raises(EngineError, match=f"apply_model: {function.__name__} raised {exit_}"):
            llm.apply_model(function)
    assert llm.generate("Hello", GREEDY, **QUIET)[0].outputs[0].text == first
    assert [output.request_id for output in llm.wait_for_completion(**QUIET)] == queued


def test_a_function_that_uses_its_llm_is_refused(llm):
    queued = llm.enqueue("Hello", GREEDY, **QUIET)
    engine = llm.llm_engine
    engine.add_request("mine", "Hello", GREEDY)
    calls: list[Callable[[], Any]] = [
        lambda: llm.generate("Hello", GREEDY, **QUIET),
        lambda: llm.chat(CHAT, GREEDY, **QUIET),
        lambda: llm.enqueue("Hello", GREEDY, **QUIET),
        lambda: llm.wait_for_completion(**QUIET),
        lambda: llm.beam_search("Hello", BeamSearchParams(2, 3)),
        lambda: llm.collective_rpc("report"),
        lambda: llm.collective_rpc(lambda worker: 1),
        lambda: llm.apply_model(type),
        llm.reset_prefix_cache,
        llm.start_profile,
        llm.close,
        engine.step,
        engine.shutdown,
        lambda: engine.add_request("other", "Hello", GREEDY),
    ]
    for call in calls:
        with pytest.raises(EngineError, match=r"^apply_model: .* called the engine that runs it"):
            llm.apply_model(lambda model, call=call: call())
    assert llm.apply_model(lambda model: llm.get_tokenizer().eos_token_id) == [
        llm.get_tokenizer().eos_token_id
    ]
    while engine.has_unfinished_requests():
        [output] = engine.step()
    assert output.finished
    assert [output.request_id for output in llm.wait_for_completion(**QUIET)] == queued


def test_the_async_engine_outlives_a_function_that_exits():
    import asyncio

    async def run() -> None:
        engine = AsyncLLM.from_engine_args(EngineArgs(**SMALL))
        try:
            with pytest.raises(EngineError, match=r"leave raised SystemExit\(3\)"):
                await engine.collective_rpc(leave, timeout=LIMIT)
            with pytest.raises(RequestError, match="method = 3: must be"):
                await engine.collective_rpc(3, kwargs={"a": 1})
            assert await engine.collective_rpc(
                lambda w, a, b: (a, b), args=(1,), kwargs={"b": 2}
            ) == [(1, 2)]
            async for output in engine.generate("Hello", GREEDY, "r"):
                last = output
            assert last.finished
        finally:
            await engine.shutdown()

    asyncio.run(run())


def test_a_worker_s_method_that_exits_fails_alone(llm):
    def spoil(worker: Any) -> None:
        worker.report = lambda: sys.exit("as told")

    def mend(worker: Any) -> None:
        del worker.report

    llm.collective_rpc(spoil)
    with pytest.raises(EngineError, match=r"collective_rpc: report raised SystemExit\('as told'\)"):
        llm.collective_rpc("report", timeout=LIMIT)
    assert llm.generate("Hello", GREEDY, **QUIET)[0].finished
    llm.collective_rpc(mend)
    assert llm.collective_rpc("report")[0]["rank"] == 0


def test_every_call_of_a_closed_llm_says_so():
    llm = LLM(**SMALL, disable_log_stats=False)
    llm.enqueue("Hello", GREEDY, **QUIET)
    tokenizer = llm.get_tokenizer()
    llm.close()
    llm.close()
    samples = ([0.0] * 16, 16000)
    calls: dict[str, Callable[[], Any]] = {
        "generate": lambda: llm.generate("a", **QUIET),
        "chat": lambda: llm.chat(CHAT, **QUIET),
        "preprocess_chat": lambda: llm.preprocess_chat(CHAT),
        "enqueue": lambda: llm.enqueue("a", **QUIET),
        "wait_for_completion": lambda: llm.wait_for_completion(**QUIET),
        "beam_search": lambda: llm.beam_search("a", BeamSearchParams(2, 3)),
        "embed": lambda: llm.embed("a", **QUIET),
        "classify": lambda: llm.classify("a", **QUIET),
        "reward": lambda: llm.reward("a", **QUIET),
        "score": lambda: llm.score("a", "b", **QUIET),
        "encode": lambda: llm.encode("a", pooling_task="embed", **QUIET),
        "transcribe": lambda: llm.transcribe(samples, **QUIET),
        "translate": lambda: llm.translate(samples, **QUIET),
        "align": lambda: llm.align("a"),
        "word_times": lambda: llm.word_times([], []),
        "get_tokenizer": llm.get_tokenizer,
        "get_supported_tasks": llm.get_supported_tasks,
        "get_metrics": llm.get_metrics,
        "get_default_sampling_params": llm.get_default_sampling_params,
        "reset_prefix_cache": llm.reset_prefix_cache,
        "sleep": llm.sleep,
        "wake_up": llm.wake_up,
        "is_sleeping": llm.is_sleeping,
        "weights_version": lambda: llm.weights_version,
        "set_weights_version": lambda: llm.set_weights_version("2"),
        "swap_weights": lambda: llm.swap_weights("elsewhere"),
        "update_weights": lambda: llm.update_weights([]),
        "cancel_weight_update": llm.cancel_weight_update,
        "start_profile": llm.start_profile,
        "stop_profile": llm.stop_profile,
        "collective_rpc": lambda: llm.collective_rpc("report"),
        "apply_model": lambda: llm.apply_model(type),
        "llm_engine": lambda: llm.llm_engine,
        "engine": lambda: llm.engine,
        "model_config": lambda: llm.model_config,
        "__enter__": lambda: llm.__enter__(),
    }
    public = {name for name in dir(type(llm)) if not name.startswith("_")}
    assert public - {"close"} == set(calls) - {"__enter__"}
    silent = []
    for name, call in calls.items():
        try:
            call()
        except RuntimeError as error:
            if "this LLM was closed" in str(error):
                continue
        silent.append(name)
    assert silent == []
    assert tokenizer.decode(tokenizer.encode("Hello")).endswith("Hello"), "it needs no engine"
    assert tokenizer.apply_chat_template(CHAT, tokenize=False)
