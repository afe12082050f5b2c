"""Names of the offline API that scripts use, on the demo model."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, AsyncLLM, EngineArgs, LLMEngine, LoRARequest, SamplingParams
from headrace.metrics import Counter, Gauge, Histogram, Vector
from headrace.sampling_params import RequestOutputKind, StructuredOutputsParams
from headrace_core.errors import EngineDead, GenerateError, RequestError, UnsupportedFeature

SMALL = {"max_model_len": 512, "max_num_seqs": 16, "num_threads": 1}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
CHAT = [{"role": "user", "content": "What is 2 + 3?"}]
LIMIT = 60.0
"""Seconds after which a hang is one."""


@pytest.fixture(scope="module")
def llm():
    with LLM(**SMALL) as llm:
        yield llm


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def found(metrics: list[Any]) -> dict[str, Any]:
    """Metrics by name; those of one name by their further label too."""
    by_name = {}
    for metric in metrics:
        more = [v for k, v in metric.labels.items() if k not in ("model_name", "engine")]
        by_name[":".join([metric.name.removeprefix("headrace:"), *more])] = metric
    return by_name


def test_metrics_count_what_was_generated():
    prompts = ["Hello there", "Say one", "Count to three, please", "Why?"]
    with LLM(**SMALL, disable_log_stats=False) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        metrics = llm.get_metrics()
        of = found(metrics)
        lengths = [len(output.prompt_token_ids) for output in outputs]
        assert of["prompt_tokens"].value == sum(lengths)
        assert of["generation_tokens"].value == 24
        assert of["request_success:length"].value == 4
        assert of["request_success:abort"].value == 0
        for name in ("request_prompt_tokens", "e2e_request_latency_seconds",
                     "time_to_first_token_seconds", "request_generation_tokens"):  # fmt: skip
            histogram = of[name]
            assert isinstance(histogram, Histogram)
            assert histogram.count == histogram.buckets["+Inf"] == 4
        assert of["request_prompt_tokens"].sum == sum(lengths)
        assert of["request_generation_tokens"].buckets["5.0"] == 0
        assert of["request_generation_tokens"].buckets["10.0"] == 4
        assert isinstance(of["num_requests_running"], Gauge)
        assert of["num_requests_running"].value == 0
        assert isinstance(of["prompt_tokens"], Counter)
        assert all(metric.name.startswith("headrace:") for metric in metrics)
        assert all(metric.labels["engine"] == "0" for metric in metrics)
        assert not [metric for metric in metrics if isinstance(metric, Vector)]
        llm.chat(CHAT, GREEDY, use_tqdm=False)
        assert of["request_success:length"].value == 4, "a snapshot"
        assert found(llm.get_metrics())["request_success:length"].value == 5


def test_metrics_are_those_of_a_server():
    from headrace_server.observability.metrics import Metrics

    with LLM(**SMALL, disable_log_stats=False) as llm:
        registry = Metrics("headrace:", llm.engine.model).registry
        served = {family.name for family in registry.collect() if family.samples}
        assert served < {metric.name for metric in llm.get_metrics()}


def test_metrics_need_statistics(llm):
    for make in (llm.get_metrics, llm.llm_engine.get_metrics):
        with pytest.raises(RequestError, match=r"disable_log_stats=False"):
            make()
    with pytest.raises(TypeError, match="disable_log_stats"):
        LLM(**SMALL, disable_log_stats=False, log_stats=False)
    with pytest.raises(TypeError, match="disable_log_stats = 'no'"):
        LLM(**SMALL, disable_log_stats="no")


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_metrics_of_the_step_loop(kind):
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, n=1, output_kind=kind)
    with LLMEngine.from_engine_args(EngineArgs(**SMALL)) as engine:
        for name in ("one", "two", "three"):
            engine.add_request(name, "Hello", params)
        assert engine.get_num_unfinished_requests() == 3
        engine.abort_request("three")
        while engine.has_unfinished_requests():
            engine.step()
        of = found(engine.get_metrics())
    assert of["request_success:length"].value == 2
    assert of["request_success:abort"].value == 1
    assert of["request_generation_tokens"].buckets["5.0"] == 3
    assert of["request_params_max_tokens"].count == 3


def test_the_engine_of_an_llm_is_the_same_engine(llm):
    engine = llm.llm_engine
    assert isinstance(engine, LLMEngine)
    assert engine is llm.llm_engine
    engine.add_request("mine", "Hello", GREEDY)
    [other] = llm.generate("Hello", GREEDY, use_tqdm=False)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[-1].request_id == "mine"
    assert outputs[-1].outputs[0].token_ids == other.outputs[0].token_ids
    assert engine.get_tokenizer().encode("Hello") == llm.get_tokenizer().encode("Hello")
    assert engine.model_config.max_model_len == 512
    assert engine.get_supported_tasks() == llm.get_supported_tasks() == ("generate",)
    with pytest.raises(UnsupportedFeature, match="enable_lora=True"):
        engine.add_request("r", "Hello", GREEDY, lora_request=LoRARequest("a", 1, "/a"))


def test_an_engine_outlives_its_llm_and_is_freed_with_it():
    before = {thread.name for thread in threading.enumerate()}
    engine = LLM(**SMALL).llm_engine
    gc.collect()
    engine.add_request("mine", "Hello", GREEDY)
    while engine.has_unfinished_requests():
        outputs = engine.step()
    assert outputs[-1].finished
    del engine
    gc.collect()
    assert {thread.name for thread in threading.enumerate()} <= before | {"tqdm"}
    llm = LLM(**SMALL)
    engine = llm.llm_engine
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        _ = llm.llm_engine
    with pytest.raises(EngineDead, match="shut down"):
        engine.add_request("mine", "Hello", GREEDY)


def test_facts_of_the_model(llm):
    import torch

    facts = llm.model_config
    config = json.loads((Path(facts.path) / "config.json").read_text())
    assert (facts.max_model_len, facts.dtype) == (512, torch.bfloat16) or (
        facts.max_model_len, facts.dtype) == (512, torch.float32)  # fmt: skip
    assert facts.get_vocab_size() == llm.engine.model.vocab_size
    assert facts.get_hidden_size() == config["hidden_size"] == facts.hf_config.hidden_size
    assert facts.hf_config.architectures == config["architectures"]
    assert facts.hf_text_config.num_hidden_layers == config["num_hidden_layers"]
    assert facts.hf_config.to_dict()["model_type"] == facts.hf_config.model_type
    assert facts.architecture == config["architectures"][0]
    assert facts.runner_type == "generate"
    assert not facts.is_encoder_decoder
    assert not facts.is_multimodal_model
    assert facts.model
    assert facts.served_model_name == llm.engine.model.name
    assert facts.get_num_layers() == config["num_hidden_layers"]
    with pytest.raises(AttributeError, match="'no_such_key'"):
        _ = facts.hf_config.no_such_key
    with pytest.raises(AttributeError):
        facts.max_model_len = 3
    assert "max_model_len=512" in repr(facts)


def test_workers_are_called_by_name_and_with_functions(llm):
    [report] = llm.collective_rpc("report")
    assert report["rank"] == 0
    assert llm.collective_rpc(lambda worker: worker.rank) == [0]

    def told(worker, first, *, second):
        return type(worker).__name__, first, second, threading.current_thread().name

    [(name, first, second, thread)] = llm.collective_rpc(
        told, timeout=LIMIT, args=(1,), kwargs={"second": 2}
    )
    assert (first, second) == (1, 2)
    assert "Worker" in name
    assert thread == "headrace-worker"
    [kind] = llm.collective_rpc(lambda worker: type(worker.get_model()))
    assert [kind] == llm.apply_model(type)
    assert llm.collective_rpc(lambda worker: worker.device.type) == ["cpu"]
    assert llm.llm_engine.collective_rpc("report")[0]["rank"] == 0

    def broken(worker):
        raise ArithmeticError("as told")

    with pytest.raises(ArithmeticError, match="as told"):
        llm.collective_rpc(broken)
    hold = threading.Event()
    with pytest.raises(TimeoutError):
        llm.collective_rpc(lambda worker: hold.wait(LIMIT), timeout=0.01)
    hold.set()
    assert llm.generate("Hello", GREEDY, use_tqdm=False)[0].finished


def test_arguments_of_worker_methods_have_names(llm):
    with pytest.raises(RequestError, match=r"args: update_config"):
        llm.collective_rpc("update_config")
    with pytest.raises(RequestError, match=r"kwargs: update_config.*'other'"):
        llm.collective_rpc("update_config", kwargs={"changes": {}, "other": 1})
    with pytest.raises(RequestError, match=r"kwargs: report"):
        llm.collective_rpc("report", kwargs={"a": 1})
    with pytest.raises(RequestError, match="load_config"):
        llm.collective_rpc("update_config", kwargs={"changes": {"nothing": {}}})
    for method in ("close", "no_such"):
        with pytest.raises(RequestError, match=f"method = '{method}'"):
            llm.collective_rpc(method, kwargs={"a": 1})
    for method in (3, None):
        with pytest.raises(RequestError, match=f"method = {method}: must be"):
            llm.collective_rpc(method)


@pytest.mark.req("SEC-01")
def test_functions_do_not_cross_to_an_engine_s_process():
    with LLM(**SMALL, engine_process=True) as llm:
        assert llm.collective_rpc("report")[0]["rank"] == 0
        for call in (llm.collective_rpc, llm.apply_model):
            with pytest.raises(UnsupportedFeature, match=r"engine_process=False"):
                call(lambda worker: 1)
        assert llm.get_tokenizer().decode(llm.get_tokenizer().encode("Hello")).endswith("Hello")
        assert llm.model_config.max_model_len == 512


def test_the_async_engine_has_the_same_names():
    async def run() -> None:
        engine = AsyncLLM.from_engine_args(EngineArgs(**SMALL))
        try:
            assert await engine.get_supported_tasks() == ("generate",)
            assert engine.model_config.max_model_len == 512
            assert await engine.collective_rpc(lambda worker: worker.rank) == [0]
            tokenizer = await engine.get_tokenizer()
            assert tokenizer.decode(tokenizer("Hello").input_ids).endswith("Hello")
        finally:
            await engine.shutdown()

    asyncio.run(run())


def test_enqueued_prompts_come_back_in_order(llm):
    first = llm.enqueue(["Hello there", "Say one"], [greedy(20), greedy(2)])
    second = llm.enqueue("Count", greedy(4), use_tqdm=False)
    assert len({*first, *second}) == 3
    between = llm.generate("Hello there", greedy(20), use_tqdm=False)
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == [*first, *second]
    assert [output.prompt for output in outputs] == ["Hello there", "Say one", "Count"]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [20, 2, 4]
    assert outputs[0].outputs[0].token_ids == between[0].outputs[0].token_ids
    assert llm.wait_for_completion(use_tqdm=False) == []
    assert llm.enqueue([], GREEDY) == []


def test_a_refused_enqueue_leaves_nothing_running(llm):
    kept = llm.enqueue(["a"], greedy(3), use_tqdm=False)
    with pytest.raises(RequestError):
        llm.enqueue(["fine", [999_999]], greedy(30), use_tqdm=False)
    with pytest.raises(RequestError, match="sampling_params: 3 given for 2 prompts"):
        llm.enqueue(["a", "b"], [GREEDY] * 3)
    with pytest.raises(RequestError, match=r"lora_request = .*must be a LoRARequest"):
        llm.enqueue("a", lora_request=object())
    assert [o.request_id for o in llm.wait_for_completion(use_tqdm=False)] == kept
    stats = llm.engine.stats()
    assert (stats.num_requests_running, stats.num_requests_waiting) == (0, 0)
    assert stats.num_free_blocks == stats.num_blocks


def test_threads_enqueue_and_wait_at_once(llm):
    """Each output is handed to exactly one of those that wait."""
    ready = threading.Barrier(6)
    ids: list[list[str]] = []
    outputs: list[Any] = []
    errors: list[BaseException] = []

    def enqueue(count: int) -> None:
        try:
            ready.wait(LIMIT)
            ids.append(llm.enqueue([f"Say {count}"] * 3, greedy(2 + count), use_tqdm=False))
            outputs.extend(llm.wait_for_completion(use_tqdm=False))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=enqueue, args=(i,), daemon=True) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert not errors
    assert sorted(o.request_id for o in outputs) == sorted(one for some in ids for one in some)
    for output in outputs:
        assert len(output.outputs[0].token_ids) == 2 + int(output.prompt.split()[1])


def test_progress_of_what_was_enqueued(llm):
    seen: list[Any] = []

    class Bar:
        def __init__(self, **kwargs: Any) -> None:
            seen.append((kwargs["desc"], kwargs["total"]))

        def update(self, count: int) -> None:
            seen.append(count)

        def set_postfix_str(self, text: str, refresh: bool = True) -> None: ...
        def close(self) -> None:
            seen.append("closed")

    llm.enqueue(["a", "b"], GREEDY, use_tqdm=Bar)
    assert seen == [("Adding requests", 2), 1, 1, "closed"]
    seen.clear()
    llm.enqueue("c", GREEDY, use_tqdm=False)
    llm.wait_for_completion(use_tqdm=Bar)
    assert seen == [("Processed prompts", 3), 1, 1, 1, "closed"]


def test_closing_ends_those_who_wait_for_completion():
    llm = LLM(**SMALL)
    llm.enqueue(["a"] * 40, greedy(400), use_tqdm=False)
    raised: list[BaseException] = []
    begun = threading.Event()

    class Bar:
        def __init__(self, **kwargs: Any) -> None:
            begun.set()

        def update(self, count: int) -> None: ...
        def set_postfix_str(self, text: str, refresh: bool = True) -> None: ...
        def close(self) -> None: ...

    def wait() -> None:
        try:
            llm.wait_for_completion(use_tqdm=Bar)
        except EngineDead as error:
            raised.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert begun.wait(LIMIT)
    llm.close()
    thread.join(LIMIT)
    assert len(raised) == 1


def test_why_a_request_failed_is_in_its_output(llm):
    first = llm.generate("Hello", GREEDY, use_tqdm=False)[0].outputs[0]
    assert first.error is None
    nothing = SamplingParams(
        max_tokens=9, min_tokens=9, structured_outputs=StructuredOutputsParams(regex="a{3}")
    )
    fine, failed = llm.generate(["Hello", "Hello"], [GREEDY, nothing], use_tqdm=False)
    assert fine.outputs[0].error is None
    [completion] = failed.outputs
    assert completion.finish_reason == "error"
    assert "token" in completion.error
    llm.llm_engine.add_request("r", "Hello", nothing)
    while llm.llm_engine.has_unfinished_requests():
        outputs = llm.llm_engine.step()
    assert outputs[-1].outputs[0].error is not None
    assert issubclass(GenerateError, Exception)


def test_the_tokenizer_is_transformers_on_the_same_checkpoint(llm):
    from transformers import AutoTokenizer

    ours, theirs = llm.get_tokenizer(), AutoTokenizer.from_pretrained(llm.model_config.path)
    assert ours is llm.get_tokenizer()
    for text in ("Hello there", "", "  a b\n", "<|im_start|>user 你好 😀"):
        assert dict(ours(text)) == dict(theirs(text))
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    for given in ({}, {"add_generation_prompt": True, "enable_thinking": True}):
        assert dict(ours.apply_chat_template(CHAT, **given)) == dict(
            theirs.apply_chat_template(CHAT, **given)
        )
    [prompt] = llm.preprocess_chat([CHAT])
    chat = ours.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert prompt["prompt_token_ids"] == chat
    assert ours.all_special_ids == theirs.all_special_ids
    assert (ours.vocab_size, len(ours)) == (theirs.vocab_size, len(theirs))


def test_without_a_tokenizer():
    with LLM(**SMALL, skip_tokenizer_init=True) as llm:
        for engine in (llm, llm.llm_engine):
            with pytest.raises(RuntimeError, match="skip_tokenizer_init"):
                engine.get_tokenizer()
        ids = llm.enqueue([[5, 6]], GREEDY, use_tqdm=False)
        assert [o.request_id for o in llm.wait_for_completion(use_tqdm=False)] == ids


def test_aborting_takes_ids_and_lists_of_them():
    wrong = [None, 3, ["one", None]]
    with LLMEngine.from_engine_args(EngineArgs(**SMALL)) as engine:
        for given in wrong:
            with pytest.raises(RequestError, match=r"^request_ids.*: must be text, or a list of"):
                engine.abort_request(given)
        engine.abort_request("unknown")
        engine.abort_request(["unknown", "other"])

    async def run() -> None:
        engine = AsyncLLM.from_engine_args(EngineArgs(**SMALL))
        try:
            for given in wrong:
                with pytest.raises(
                    RequestError, match=r"^request_id\b.*: must be text, or a list of"
                ):
                    await engine.abort(given)
            await engine.abort("unknown")
            await engine.abort(["unknown", "other"])
        finally:
            await engine.shutdown()

    asyncio.run(run())
