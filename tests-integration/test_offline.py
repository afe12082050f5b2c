"""The offline API with the demo model: ``LLM``, ``LLMEngine``, ``AsyncLLM`` and the terminal commands."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import subprocess
import sys
import threading

import pytest
from forks import run_command

from headrace import LLM, AsyncLLM, EngineArgs, LLMEngine, LoRARequest, SamplingParams
from headrace_core.errors import CapacityError, PromptTooLong, RequestError, UnsupportedFeature
from headrace_testing.waiting import until

GREEDY = SamplingParams(temperature=0, max_tokens=24)
SMALL = {"max_model_len": 512, "max_num_seqs": 16, "num_threads": 1}


@pytest.fixture(scope="module")
def llm():
    with LLM(**SMALL) as llm:
        yield llm


def _questions(count: int) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": f"What is {i} + {i + 3}?"}] for i in range(count)]


def test_many_prompts_come_back_in_order_and_equal_single_ones(llm):
    prompts = [f"Say {word}" for word in ("one", "two words", "three more words here")] * 12
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    for prompt, output in zip(prompts[:3], outputs[:3], strict=True):
        [single] = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert single.outputs[0].token_ids == output.outputs[0].token_ids


def test_a_cache_of_one_byte_holds_twice_the_tokens(llm, caplog):
    """And rounds: close to the full cache, equal to itself in any batch."""
    caplog.set_level("INFO")
    prompts = [f"Say {word}" for word in ("one", "two words", "three more words here")] * 3
    blocks = []
    for kind, measured in (("auto", False), ("fp8", False), ("fp8", True), ("int8", True)):
        with LLM(
            **SMALL, dtype="bfloat16", kv_cache_dtype=kind, calculate_kv_scales=measured,
            kv_cache_memory_bytes=8 << 20,
        ) as one:  # fmt: skip
            together = one.generate(prompts, GREEDY, use_tqdm=False)
            [alone] = one.generate(prompts[0], GREEDY, use_tqdm=False)
        assert together[0].outputs[0].token_ids == alone.outputs[0].token_ids
        assert all(output.outputs[0].text.strip() for output in together)
        [line] = [r.getMessage() for r in caplog.records if "blocks of" in r.getMessage()]
        blocks.append(int(re.search(r"(\d+) blocks of", line)[1]))
        caplog.clear()
    assert all(0 <= b - 2 * blocks[0] <= 2 for b in blocks[1:])  # rounding, and the null block


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux for memory")
def test_a_whole_cache_is_made_resident_before_the_first_request(caplog):
    whole = {"kv_cache_ahead_bytes": -1, "kv_cache_memory_bytes": 64 << 20}
    with caplog.at_level("INFO", logger="headrace_engine"), LLM(**SMALL | whole):
        pass
    assert any("cache made resident in" in record.getMessage() for record in caplog.records)


def test_every_form_of_a_prompt_gives_the_same(llm):
    ids = llm.get_tokenizer().encode("Hello there")
    forms = ["Hello there", ids, {"prompt": "Hello there"}, {"prompt_token_ids": ids}]
    outputs = llm.generate(forms, GREEDY, use_tqdm=False)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    [one] = llm.generate(ids, GREEDY, use_tqdm=False)
    assert one.outputs[0].token_ids == outputs[0].outputs[0].token_ids


def test_chat_equals_generate_on_the_rendered_template(llm):
    chats = _questions(3)
    rendered = llm.preprocess_chat(chats)
    by_chat = llm.chat(chats, GREEDY, use_tqdm=False)
    by_tokens = llm.generate(rendered, GREEDY, use_tqdm=False)
    assert [o.outputs[0].text for o in by_chat] == [o.outputs[0].text for o in by_tokens]
    [single] = llm.chat(chats[0], GREEDY, use_tqdm=False)
    assert single.outputs[0].text == by_chat[0].outputs[0].text


def test_the_demo_model_visibly_works(llm):
    params = SamplingParams(temperature=0, max_tokens=160)

    def ask(text: str, **options) -> str:
        messages = [{"role": "user", "content": text}]
        return llm.chat(messages, params, use_tqdm=False, **options)[0].outputs[0].text

    sums = [(2, 3), (12, 7), (5, 8), (7, 9), (14, 6), (20, 11)]
    right = sum(str(a + b) in ask(f"What is {a} + {b}?") for a, b in sums)
    assert right >= 5, "small sums"
    context = (
        "Context: The red box is in the kitchen. Tom has the key. Question: Where is the red box?"
    )
    assert "kitchen" in ask(context)
    thought = ask("What is 12 + 7?", chat_template_kwargs={"enable_thinking": True})
    assert "<think>" in thought
    assert "</think>" in thought
    weather = {
        "type": "function",
        "function": {
            "name": "get_weather", "description": "Get the weather of a city",
            "parameters": {
                "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
            },
        },
    }  # fmt: skip
    call = ask("What is the weather in Paris?", tools=[weather])
    body = call.split("<tool_call>")[1].split("</tool_call>")[0]
    assert json.loads(body) == {"name": "get_weather", "arguments": {"city": "Paris"}}
    talk = [{"role": "user", "content": "Hi, my name is Ada."}]
    talk.append(
        {"role": "assistant", "content": llm.chat(talk, params, use_tqdm=False)[0].outputs[0].text}
    )
    talk.append({"role": "user", "content": "What is my name?"})
    assert "Ada" in llm.chat(talk, params, use_tqdm=False)[0].outputs[0].text


def test_params_per_prompt_and_wrong_lengths(llm):
    outputs = llm.generate(
        ["a", "b"],
        [SamplingParams(max_tokens=1), SamplingParams(max_tokens=3, ignore_eos=True)],
        use_tqdm=False,
    )
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 3]
    with pytest.raises(RequestError, match="2 prompts"):
        llm.generate(["a", "b"], [SamplingParams()], use_tqdm=False)


def test_seeds_repeat_in_any_batch(llm):
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=12, n=2, ignore_eos=True)
    alone = llm.generate("Once upon", params, use_tqdm=False)[0]
    crowd = llm.generate(["x y z", "Once upon", "q"], params, use_tqdm=False)[1]
    assert [c.token_ids for c in alone.outputs] == [c.token_ids for c in crowd.outputs]
    assert alone.outputs[0].token_ids != alone.outputs[1].token_ids


def test_workers_that_give_no_answer_are_named(llm):
    released = threading.Event()

    def stuck(worker):
        assert released.wait(60)

    try:
        with pytest.raises(TimeoutError, match=r"^collective_rpc: .*stuck: no answer .* in 0.05 s"):
            llm.collective_rpc(stuck, timeout=0.05)
    finally:
        released.set()
    assert llm.collective_rpc("report")[0]["rank"] == 0


def test_bad_requests_leave_nothing_running(llm):
    with pytest.raises(PromptTooLong):
        llm.generate(["fine", "word " * 600], GREEDY, use_tqdm=False)
    with pytest.raises(RequestError, match="not a token id"):
        llm.generate([[999_999]], GREEDY, use_tqdm=False)
    with pytest.raises(RequestError, match="continue_final_message"):
        llm.chat(_questions(1), GREEDY, continue_final_message=True, use_tqdm=False)
    stats = llm.engine.stats()
    assert (stats.num_requests_running, stats.num_requests_waiting) == (0, 0)
    assert stats.num_free_blocks == stats.num_blocks


def test_progress_bars_can_be_replaced(llm):
    seen = []

    class Bar:
        def __init__(self, **kwargs):
            seen.append(kwargs["total"])

        def update(self, count):
            seen.append(count)

        def set_postfix_str(self, text, refresh=True):
            pass

        def close(self):
            seen.append("closed")

    llm.generate(["a", "b"], GREEDY, use_tqdm=Bar)
    assert seen == [2, 1, 1, "closed"]


def test_what_is_not_served_says_so(llm):
    for call in (llm.embed, llm.classify, llm.reward):
        with pytest.raises(UnsupportedFeature, match="--runner pooling"):
            call("x", use_tqdm=False)
    with pytest.raises(UnsupportedFeature, match="--runner pooling"):
        llm.score("x", "y", use_tqdm=False)
    with pytest.raises(ValueError, match="enable_lora=True"):
        llm.generate("x", lora_request=LoRARequest("a", 1, "/a"))
    with pytest.raises(RequestError, match=r"lora_request: 1 given for 2 prompts"):
        llm.generate(["x", "y"], lora_request=[LoRARequest("a", 1, "/a")])


def test_a_second_engine_after_the_first_and_no_thread_left():
    before = {thread.name for thread in threading.enumerate()}
    for _ in range(2):
        llm = LLM(**SMALL)
        llm.generate("a", GREEDY, use_tqdm=False)
        del llm
        gc.collect()
    assert {thread.name for thread in threading.enumerate()} <= before | {"tqdm"}
    with pytest.raises(TypeError, match="max_num_seqs"):
        LLM(max_num_seq=3)


@pytest.mark.req("REL-23")
def test_what_cannot_fit_is_refused_with_numbers():
    with pytest.raises(CapacityError, match="max_model_len"):
        LLM(max_model_len=512, kv_cache_memory_bytes=1 << 16)


def test_the_engine_step_by_step():
    with LLMEngine.from_engine_args(EngineArgs(**SMALL)) as engine:
        for i in range(4):
            engine.add_request(
                f"r{i}", "Hello", SamplingParams(temperature=0, max_tokens=5 + i, ignore_eos=True)
            )
        engine.abort_request("r3")
        finished = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    finished[output.request_id] = output.outputs[0]
        assert {k: len(v.token_ids) for k, v in finished.items() if k != "r3"} == {
            "r0": 5,
            "r1": 6,
            "r2": 7,
        }


def test_the_async_engine_streams_and_cancels():
    async def run() -> None:
        engine = AsyncLLM.from_engine_args(EngineArgs(**SMALL))
        try:
            params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
            outputs = engine.generate("Go on", params, "one")
            lengths = [len((await anext(outputs)).outputs[0].token_ids) for _ in range(5)]
            assert lengths == sorted(lengths)
            assert lengths[-1] >= 5
            await outputs.aclose()

            async def is_idle():
                return (await engine.stats()).num_requests_running == 0

            await until(is_idle)
            assert await engine.reset_prefix_cache()
            await engine.check_health()
        finally:
            await engine.shutdown()
        assert not engine.errored or engine.dead_error is not None

    asyncio.run(run())


def test_piped_chat_answers_each_line():
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "chat", "--temperature", "0", "--max-model-len", "512"],
        input="Hello\nWhat is 2 + 3?\n", capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip().splitlines()) == 2
    assert "5" in done.stdout.splitlines()[-1]


def test_generate_command_writes_json_lines(tmp_path):
    prompts, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "What is 4 + 4?"}\n{"prompt": "Hello"}\n')
    done = run_command(
        "generate", "--chat", "--input", str(prompts), "--output", str(answers), "--temperature", "0",
        "--max-tokens", "16", "--max-model-len", "512",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [line["prompt"] for line in lines] == ["What is 4 + 4?", "Hello"]
    assert "8" in lines[0]["outputs"][0]["text"]


@pytest.mark.parametrize("engine_process", [False, True], ids=["one-process", "engine-process"])
def test_minus_one_shortens_the_context_to_what_fits(engine_process):
    settings = {
        "max_model_len": -1,
        "num_gpu_blocks_override": 20,
        "engine_process": engine_process,
    }
    with LLM(**settings) as llm:
        assert llm.engine.model.max_model_len == 20 * 16
        with pytest.raises(PromptTooLong, match="320"):
            llm.generate([[5] * 400], GREEDY, use_tqdm=False)
        assert llm.generate([[5] * 300], GREEDY, use_tqdm=False)[0].finished
