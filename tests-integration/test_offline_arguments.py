"""Arguments of ``LLM`` in scripts: numbers and arrays of other libraries work, wrong kinds are named."""

from __future__ import annotations

import asyncio
import copy
import inspect
import math

import numpy as np
import pytest
import torch

from headrace import LLM, AsyncLLM, EngineArgs, LLMEngine, PoolingParams, SamplingParams
from headrace.sampling_params import BeamSearchParams
from headrace_core.errors import RequestError

SMALL = {"max_model_len": 512, "max_num_seqs": 16, "num_threads": 1}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    with LLM(**SMALL) as llm:
        yield llm


def test_prompts_of_arrays(llm):
    ids = llm.get_tokenizer().encode("Hello there")
    array, tensor = np.array(ids), torch.tensor(ids)
    [expected] = llm.generate(ids, GREEDY, use_tqdm=False)
    single = [array, tensor, [np.int64(i) for i in ids], tuple(ids), array.astype(np.uint16)]
    for prompt in single:
        [output] = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        assert [type(i) for i in output.prompt_token_ids] == [int] * len(ids)
    several = [
        [array, tensor],
        np.stack([array, array]),
        torch.stack([tensor, tensor]),
        [{"prompt_token_ids": array}, {"prompt_token_ids": tensor}],
        np.array(["Hello there", "Hello there"]),
    ]
    for prompts in several:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == [expected.outputs[0].token_ids] * 2
    [beams] = llm.beam_search(array, BeamSearchParams(np.int64(2), np.int64(4)))
    assert len(beams.sequences) == 2


def test_parameters_of_arrays_and_a_ban(llm):
    params = SamplingParams(
        temperature=np.float32(0), max_tokens=np.int64(6), seed=np.int64(3), ignore_eos=np.True_
    )
    [plain] = llm.generate("Hello", GREEDY, use_tqdm=False)
    [output] = llm.generate("Hello", params, use_tqdm=False)
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    first = output.outputs[0].token_ids[0]
    banned = SamplingParams(
        temperature=0, max_tokens=6, ignore_eos=True, logit_bias={np.int64(first): -math.inf}
    )
    [without] = llm.generate("Hello", banned, use_tqdm=False)
    assert first not in without.outputs[0].token_ids
    nothing = SamplingParams(
        temperature=0, max_tokens=6, allowed_token_ids=[first], logit_bias={first: -math.inf}
    )
    with pytest.raises(RequestError, match="allowed_token_ids: with logit_bias"):
        llm.generate("Hello", nothing, use_tqdm=False)
    assert llm.generate("Hello", GREEDY, use_tqdm=False)[0].finished


@pytest.mark.parametrize(
    "given",
    [{"max_tokens": 3}, PoolingParams(), "greedy", 3, [None], [{"max_tokens": 3}], [PoolingParams()],
     b"", BeamSearchParams(1, 1)],
    ids=repr,
)  # fmt: skip
def test_sampling_params_of_another_kind(llm, given):
    chat = [{"role": "user", "content": "Hi"}]
    for call, prompts in ((llm.generate, "a"), (llm.chat, chat)):
        with pytest.raises(
            RequestError, match=r"^sampling_params.*must be.*SamplingParams"
        ) as caught:
            call(prompts, given, use_tqdm=False)
        assert caught.value.param == "sampling_params"
    with pytest.raises(RequestError, match=r"^params.*must be.*BeamSearchParams"):
        llm.beam_search("a", None if isinstance(given, BeamSearchParams) else given)


@pytest.mark.parametrize(
    "prompts",
    [[None], None, 3, [3.5], ["fine", None], [[None]], [b"bytes"], b"bytes", [True], [["a"]],
     np.array([0.5]), np.array(3), [{}], object()],
    ids=lambda given: "object" if type(given) is object else repr(given),  # without its address
)  # fmt: skip
def test_prompts_of_another_kind(llm, prompts):
    for call, params in ((llm.generate, GREEDY), (llm.beam_search, BeamSearchParams(1, 2))):
        with pytest.raises(RequestError, match="prompt"):
            call(prompts, params, use_tqdm=False)


@pytest.mark.parametrize(
    "messages",
    [[None], None, 3, "Hello", [["Hello"]], [3], np.array([1]), {"role": "user", "content": "Hi"}],
    ids=repr,
)
def test_messages_of_another_kind(llm, messages):
    with pytest.raises(RequestError, match=r"^messages.*must be"):
        llm.chat(messages, GREEDY, use_tqdm=False)
    with pytest.raises(RequestError, match=r"^messages.*must be"):
        llm.preprocess_chat(messages)


def test_lists_of_the_wrong_length(llm):
    for priority in ([1], [1, 2, 3], [None, 1], 3, "ab"):
        with pytest.raises(RequestError, match=r"^priority"):
            llm.generate(["a", "b"], GREEDY, priority=priority, use_tqdm=False)
    with pytest.raises(RequestError, match=r"^sampling_params: 3 given for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY] * 3, use_tqdm=False)
    assert llm.generate([], GREEDY, use_tqdm=False) == []
    assert llm.generate(["a"], (GREEDY for _ in range(1)), use_tqdm=False)[0].finished


def test_the_engine_step_by_step():
    with LLMEngine.from_engine_args(EngineArgs(**SMALL)) as engine:
        for params in (None, {"max_tokens": 3}, [GREEDY]):
            with pytest.raises(RequestError, match=r"^params.*must be"):
                engine.add_request("r", "Hello", params)
        for request_id in (None, 3, ["r"]):
            with pytest.raises(RequestError, match=r"^request_id.*must be"):
                engine.add_request(request_id, "Hello", GREEDY)
        with pytest.raises(RequestError, match="prompt"):
            engine.add_request("r", None, GREEDY)
        assert not engine.has_unfinished_requests()
        engine.add_request("r", np.array([5, 6]), GREEDY)
        while engine.has_unfinished_requests():
            outputs = engine.step()
        assert len(outputs[-1].outputs[0].token_ids) == 6


def test_the_async_engine():
    async def run() -> None:
        engine = AsyncLLM.from_engine_args(EngineArgs(**SMALL))
        try:
            for params in (None, {"max_tokens": 3}, PoolingParams()):
                with pytest.raises(RequestError, match=r"^sampling_params.*must be"):
                    async for _ in engine.generate("Hello", params, "r"):
                        pass
            with pytest.raises(RequestError, match=r"^params.*must be"):
                await engine.beam_search("Hello", GREEDY, "r")
            with pytest.raises(RequestError, match=r"^request_id.*must be"):
                async for _ in engine.generate("Hello", GREEDY, None):
                    pass
            outputs = [o async for o in engine.generate(torch.tensor([5, 6]), GREEDY, "r")]
            assert len(outputs[-1].outputs[0].token_ids) == 6
        finally:
            await engine.shutdown()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("chat_template", (3, ["x"], b"x"), "must be a template's text, or None"),
        ("tools", (3, "x", {"a": 1}, [3], [[]]), "must be a list of JSON objects, or None"),
        ("chat_template_kwargs", (3, [1], "x"), "must be a mapping of names to values, or None"),
        ("add_generation_prompt", (3, "x", None), "must be True or False"),
        ("continue_final_message", (3, "x", None), "must be True or False"),
    ],
)  # fmt: skip
def test_how_a_chat_is_rendered_of_another_kind(llm, name, values, said):
    chat = [{"role": "user", "content": "Hi"}]
    for value in values:
        given = {name: value}
        calls = [
            lambda g=given: llm.chat(chat, GREEDY, use_tqdm=False, **g),
            lambda g=given: llm.preprocess_chat(chat, **g),
        ]
        if name != "chat_template_kwargs":  # the tokenizer takes these one by one
            calls.append(lambda g=given: llm.get_tokenizer().apply_chat_template(chat, **g))
        for call in calls:
            with pytest.raises(RequestError, match=f"^{name} = .*{said}") as caught:
                call()
            assert caught.value.param == name


def test_control_calls_with_arguments_of_another_kind(llm):
    for value in ("x", 3.5, True, 0, -1):
        with pytest.raises(RequestError, match=r"^concurrency_limit = .*at least 1, or None"):
            llm.beam_search("a", BeamSearchParams(1, 1), concurrency_limit=value)
    for value in ("x", -1, 0, True, math.nan):
        with pytest.raises(RequestError, match=r"^timeout = .*seconds above 0, or None"):
            llm.collective_rpc("report", timeout=value)
    for value in (3, "x", None, {}):
        with pytest.raises(RequestError, match=r"^args = .*must be a list"):
            llm.collective_rpc("report", args=value)
    for value in (3, "x", [1]):
        with pytest.raises(RequestError, match=r"^kwargs = .*must be a mapping"):
            llm.collective_rpc("report", kwargs=value)
    for value in (3, "x", None):
        with pytest.raises(RequestError, match=r"^func = .*must be a function"):
            llm.apply_model(value)


def test_methods_have_the_name_of_the_class_that_a_script_calls(llm):
    """Python's own errors name them: ``LLM.generate() got an unexpected keyword argument``."""
    for made in (llm, llm.llm_engine, llm.get_tokenizer()):
        kind = type(made)
        for name in dir(kind):
            found = inspect.getattr_static(kind, name)
            if inspect.isfunction(found) and (not name.startswith("_") or name == "__call__"):
                assert found.__qualname__ == f"{kind.__name__}.{name}"
    with pytest.raises(TypeError, match=r"^LLM\.generate\(\) got an unexpected .*'nonsense'"):
        llm.generate("Hi", nonsense=1)
    with pytest.raises(
        TypeError, match=r"^LLM\.preprocess_chat\(\) got an unexpected .*'nonsense'"
    ):
        llm.preprocess_chat([{"role": "user", "content": "Hi"}], nonsense=1)
    with pytest.raises(
        TypeError, match=r"^ModelTokenizer\.__call__\(\) got an unexpected .*'nonsense'"
    ):
        llm.get_tokenizer()("Hi", nonsense=1)


def test_arguments_that_had_no_check(llm):
    chat = [{"role": "user", "content": "Hi"}]
    for call in (llm.chat, llm.preprocess_chat):
        with pytest.raises(RequestError, match=r"^chat_template_content_format = 'x': must be one"):
            call(chat, chat_template_content_format="x")
    same = llm.preprocess_chat(chat, chat_template_content_format="string", tools=None)
    assert same == llm.preprocess_chat(chat)
    with pytest.raises(RequestError, match=r"^reset_running_requests = 'x': must be True or False"):
        llm.reset_prefix_cache("x")
    params = BeamSearchParams(2, 3)
    for value in ("yes", 3, [1]):
        for call in (
            lambda v=value: llm.generate("Hi", GREEDY, use_tqdm=v),
            lambda v=value: llm.chat(chat, GREEDY, use_tqdm=v),
            lambda v=value: llm.enqueue("Hi", GREEDY, use_tqdm=v),
            lambda v=value: llm.beam_search("Hi", params, use_tqdm=v),
        ):
            with pytest.raises(
                RequestError, match=r"^use_tqdm = .*: must be True, False, or a call"
            ):
                call()


def test_a_bar_that_fails_loses_no_enqueued_prompt(llm):
    def fails(**_):
        raise KeyError("no bar")

    ids = llm.enqueue(["Hello", "Hi"], GREEDY, use_tqdm=False)
    for bar, error in ((fails, KeyError), ("x", RequestError)):
        with pytest.raises(error):
            llm.wait_for_completion(use_tqdm=bar)
    assert [output.request_id for output in llm.wait_for_completion(use_tqdm=False)] == ids


def test_the_assistants_mask_with_the_engines_own_template_settings(llm):
    """Through a real engine: what a training loop does with ``LLM.get_tokenizer()``."""
    tokenizer = copy.copy(llm.get_tokenizer())
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}{% endgeneration %}\n"
        "{% endfor %}"
    )
    chat = [{"role": "assistant", "content": "2 + 3 is 5"}]
    made = tokenizer.apply_chat_template(chat, return_assistant_tokens_mask=True)
    kept = [i for i, one in zip(made.input_ids, made.assistant_masks, strict=True) if one]
    assert "2 + 3 is 5" in tokenizer.decode(kept)
    assert "assistant" not in tokenizer.decode(kept)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    batch = tokenizer.pad([tokenizer("Hello"), tokenizer("Hello there")], return_tensors="pt")
    assert batch.input_ids.shape == batch.attention_mask.shape
    with pytest.raises(RequestError, match=r"^return_assistant_tokens_mask = True: needs a chat"):
        llm.get_tokenizer().apply_chat_template(chat, return_assistant_tokens_mask=True)
