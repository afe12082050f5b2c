"""Everything that is checked before a request reaches the core."""

from __future__ import annotations

from typing import Any

import pytest
from engine_fakes import EOS, VOCAB, CharTokenizer, served_model
from make_tokenizers import folder

from headrace_core.errors import GenerateError, PromptTooLong, RequestError, UnsupportedFeature
from headrace_core.request import ChatPrompt
from headrace_core.sampling.params import SamplingParams, StructuredOutputsParams
from headrace_core.text import ParsedDelta, ReasoningParser
from headrace_engine.input_processing.input_processor import InputProcessor, thinking_budget
from headrace_engine.input_processing.prompts import PromptTokens
from headrace_engine.input_processing.tokenizer import load_tokenizer

USER = {"role": "user", "content": "hi"}


def make(**model: Any) -> InputProcessor:
    return InputProcessor(CharTokenizer(), served_model(**model), clock=lambda: 123.0)


def prepare(
    prompt: Any = "hello", input_processor: InputProcessor | None = None, **params: Any
) -> Any:
    return (input_processor or make()).prepare(prompt, SamplingParams(**params), "r")


@pytest.mark.parametrize(
    ("prompt", "text", "salt"),
    [
        ("hello", "hello", None),
        ({"prompt": "hello"}, "hello", None),
        ({"prompt": "hello", "cache_salt": "s"}, "hello", "s"),
        ([ord(c) for c in "hello"], None, None),
        ({"prompt_token_ids": [ord(c) for c in "hello"]}, None, None),
        ({"prompt_token_ids": [ord(c) for c in "hello"], "prompt": "known", "cache_salt": "s"},
         "known", "s"),
    ],
)  # fmt: skip
def test_every_form_gives_the_same_ids(prompt: Any, text: str | None, salt: str | None) -> None:
    made = prepare(prompt)
    assert made.prompt_token_ids == [ord(c) for c in "hello"]
    assert made.prompt == text
    (core,) = made.core_requests
    assert core.prompt_token_ids == made.prompt_token_ids
    assert (core.cache_salt, core.arrival_time) == (salt, 123.0)
    assert core.stop_token_ids == frozenset({EOS})


def test_chats() -> None:
    made = prepare(ChatPrompt([USER], cache_salt="s"))
    assert made.prompt == "user: hi\n"
    assert made.core_requests[0].cache_salt == "s"


def test_special_tokens_are_for_text_unless_told() -> None:
    tokenizer = load_tokenizer(folder("byte-level"))
    input_processor = InputProcessor(tokenizer, served_model(vocab_size=tokenizer.vocab_size))
    bos = tokenizer.bos_token_id
    chat = ChatPrompt([USER])
    assert input_processor.tokenize("x").token_ids[0] == bos
    assert input_processor.tokenize("x", add_special_tokens=False).token_ids[0] != bos
    assert input_processor.tokenize(chat).token_ids[0] != bos
    assert input_processor.tokenize(chat, add_special_tokens=True).token_ids[0] == bos
    assert input_processor.tokenize(ChatPrompt([USER], add_special_tokens=True)).token_ids[0] == bos


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ({}, "prompt"),
        (None, "prompt"),
        (3, "prompt"),
        ([1, VOCAB], "prompt"),
        ([1, -1], "prompt"),
        ([1, 2.0], "prompt"),
        ([1, True], "prompt"),
        (["a"], "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt_token_ids": [VOCAB]}, "prompt_token_ids"),
        ({"prompt_token_ids": "abc"}, "prompt_token_ids"),
        ({"prompt": "x", "cache_salt": ""}, "cache_salt"),
        ({"prompt": "x", "cache_salt": 3}, "cache_salt"),
        ({"prompt": "x", "multi_modal_data": {}}, "multi_modal_data"),
        ("half \ud800 pair", "prompt"),
    ],
)
@pytest.mark.req("SEC-12")
def test_malformed_prompts(prompt: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        prepare(prompt)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
        ({"allowed_token_ids": [0, VOCAB]}, "allowed_token_ids"),
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ({"truncate_prompt_tokens": 513}, "truncate_prompt_tokens"),
    ],
)
def test_parameters_that_the_model_cannot_serve(params: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        prepare(**params)
    assert caught.value.param == param


def test_parameters_are_checked_again() -> None:
    params = SamplingParams()
    params.top_p = 7
    with pytest.raises(RequestError, match="top_p"):
        make().prepare("x", params, "r")


def test_all_log_probabilities_need_no_limit() -> None:
    assert prepare(input_processor=make(max_logprobs=-1), logprobs=-1).params.logprobs == -1
    assert prepare(input_processor=make(max_logprobs=20), logprobs=20).params.logprobs == 20
    with pytest.raises(RequestError, match="vocabulary"):
        prepare(input_processor=make(max_logprobs=-1), logprobs=VOCAB + 1)


@pytest.mark.parametrize(
    ("max_tokens", "cap", "prompt_length", "expected"),
    [
        (None, None, 10, 502),
        (None, 100, 10, 100),
        (50, 100, 10, 50),
        (200, 100, 10, 100),
        (502, None, 10, 502),
        (503, None, 10, None),
        (None, None, 511, 1),
        (None, None, 512, None),
        (1, None, 600, None),
    ],
)
def test_how_long_the_output_may_be(
    max_tokens: int | None, cap: int | None, prompt_length: int, expected: int | None
) -> None:
    defaults = {} if cap is None else {"max_tokens": cap}
    input_processor = make(default_sampling_params=defaults)
    if expected is None:
        with pytest.raises(PromptTooLong, match="512"):
            prepare("x" * prompt_length, input_processor, max_tokens=max_tokens)
    else:
        made = prepare("x" * prompt_length, input_processor, max_tokens=max_tokens)
        assert made.core_requests[0].max_tokens == expected


def test_a_cap_below_min_tokens_is_said() -> None:
    capped = make(default_sampling_params={"max_tokens": 16})
    with pytest.raises(RequestError, match="min_tokens = 17: must be at most 16") as caught:
        prepare("x", capped, max_tokens=None, min_tokens=17)
    assert caught.value.param == "min_tokens"
    assert prepare("x", capped, max_tokens=None, min_tokens=16).core_requests[0].max_tokens == 16


def test_clamping() -> None:
    params = SamplingParams(max_tokens=100)
    made = make().prepare("x" * 500, params, "r", clamp_max_tokens=True)
    assert made.core_requests[0].max_tokens == 12
    short = SamplingParams(max_tokens=100, min_tokens=50)
    with pytest.raises(PromptTooLong):
        make().prepare("x" * 500, short, "r", clamp_max_tokens=True)


@pytest.mark.parametrize(
    ("keep", "max_tokens", "expected"),
    [(None, 5, 400), (-1, 5, 400), (-1, 200, 312), (-1, None, 400), (3, 5, 3), (400, 5, 400)],
)
def test_truncation_keeps_the_end(keep: int | None, max_tokens: int | None, expected: int) -> None:
    text = "".join(chr(0x4E00 + i) for i in range(400))
    made = prepare(text, max_tokens=max_tokens, truncate_prompt_tokens=keep)
    assert made.prompt_token_ids == [ord(c) for c in text[-expected:]]
    assert made.prompt == (text if expected == 400 else None)


def test_truncation_leaves_room() -> None:
    made = prepare("x" * 900, max_tokens=None, truncate_prompt_tokens=-1)
    assert (len(made.prompt_token_ids), made.core_requests[0].max_tokens) == (511, 1)
    with pytest.raises(PromptTooLong):
        prepare("x" * 900, max_tokens=None, truncate_prompt_tokens=512)


def test_children() -> None:
    made = prepare(n=4, seed=7, prompt_logprobs=1, logprobs=1)
    ids = [core.request_id for core in made.core_requests]
    assert len(set(ids)) == 4
    seeds = [core.params.seed for core in made.core_requests]
    assert seeds[0] == 7
    assert len(set(seeds)) == 4
    assert not {seed for core in prepare(n=4, seed=8).core_requests if (seed := core.params.seed)
                } & set(seeds)  # fmt: skip
    assert [core.params.n for core in made.core_requests] == [1] * 4
    assert [core.params.prompt_logprobs for core in made.core_requests] == [1, None, None, None]
    assert [core.params.logprobs for core in made.core_requests] == [1] * 4
    assert made.params.n == 4
    assert [c.params.seed for c in prepare(n=2).core_requests] == [None, None]


@pytest.mark.req("SEC-12")
def test_core_ids_are_our_own() -> None:
    input_processor = make()
    ids = {input_processor.prepare("x", SamplingParams(), "same").core_requests[0].request_id
           for _ in range(100)}  # fmt: skip
    assert len(ids) == 100


def test_the_caller_s_parameters_are_left_alone() -> None:
    params = SamplingParams(n=2, seed=1, stop="x", prompt_logprobs=1)
    before = SamplingParams(n=2, seed=1, stop="x", prompt_logprobs=1)
    made = make().prepare("x", params, "r")
    made.core_requests[0].params.temperature = 0.7
    assert params == before
    dedicated = SamplingParams(n=2, seed=1, skip_clone=True)
    make().prepare("x", dedicated, "r")
    assert (dedicated.n, dedicated.seed) == (2, 1)


def test_stop_tokens() -> None:
    assert prepare(stop_token_ids=[5]).core_requests[0].stop_token_ids == {5, EOS}
    made = prepare(stop_token_ids=[5], ignore_eos=True)
    assert made.core_requests[0].stop_token_ids == {5}


def test_bad_words_are_spelled_both_ways() -> None:
    made = prepare(bad_words=["ab", " c", "ab"])
    words = made.core_requests[0].bad_words_token_ids
    assert ["".join(map(chr, w)) for w in words] == ["ab", " ab", "c", " c"]
    assert prepare().core_requests[0].bad_words_token_ids == []


def test_priority_needs_its_policy() -> None:
    with pytest.raises(RequestError, match="priority") as caught:
        make().prepare("x", SamplingParams(), "r", priority=1)
    assert caught.value.param == "priority"
    made = make(priority_scheduling=True).prepare("x", SamplingParams(), "r", priority=-3)
    assert made.core_requests[0].priority == -3


def test_without_a_tokenizer() -> None:
    input_processor = InputProcessor(None, served_model(has_tokenizer=False))
    made = input_processor.prepare([1, 2], SamplingParams(detokenize=False), "r")
    assert made.prompt_token_ids == [1, 2]
    for call in (
        lambda: input_processor.prepare("text", SamplingParams(), "r"),
        lambda: input_processor.prepare(ChatPrompt([USER]), SamplingParams(), "r"),
        lambda: input_processor.prepare([1], SamplingParams(stop="x"), "r"),
        lambda: input_processor.prepare([1], SamplingParams(bad_words=["x"]), "r"),
        lambda: input_processor.detokenize([1]),
        lambda: input_processor.tokenize([1], strings=True),
    ):
        with pytest.raises(RequestError, match="tokenizer"):
            call()


def test_defaults_of_the_generation_config() -> None:
    input_processor = make(default_sampling_params={"temperature": 0.6, "top_p": 0.9})
    assert input_processor.default_params(top_p=None, top_k=5) == SamplingParams(
        temperature=0.6, top_p=0.9, top_k=5
    )


def test_detokenize_checks_ids() -> None:
    assert make().detokenize([97, 98]) == "ab"
    with pytest.raises(RequestError):
        make().detokenize([VOCAB])


def test_unsupported_prompt_keys_are_features() -> None:
    with pytest.raises(UnsupportedFeature, match="prompt_embeds"):
        prepare({"prompt": "x", "prompt_embeds": 1})


class _Wants:
    """The class half of a logits processor: what input processing sees of it."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        target = (sampling_params.extra_args or {}).get("target")
        if target == "bug":
            raise KeyError("secret")
        if target is not None and not isinstance(target, int):
            raise ValueError(f"target = {target!r}: must be an integer")


def test_processors_check_requests_as_they_are_taken_in() -> None:
    processors: Any = [_Wants]
    input_processor = InputProcessor(CharTokenizer(), served_model(), processors=processors)
    prepare(input_processor=input_processor)
    prepare(input_processor=input_processor, extra_args={"target": 0})
    with pytest.raises(RequestError, match="_Wants: target = 'x': must be an integer") as caught:
        prepare(input_processor=input_processor, extra_args={"target": "x"})
    assert caught.value.param == "extra_args"
    with pytest.raises(GenerateError) as failed:
        prepare(input_processor=input_processor, extra_args={"target": "bug"})
    assert "secret" not in str(failed.value)


class _Thinks(ReasoningParser):
    start_marker, end_marker = "<think>", "</think>"

    def feed(self, text: str) -> ParsedDelta:
        raise AssertionError("only its marks matter here")

    def finish(self) -> ParsedDelta:
        raise AssertionError("only its marks matter here")


class _Calls(_Thinks):
    thought_end = "</t>"


def test_a_budget_beside_a_constraint_that_describes_the_reasoning() -> None:
    def end(parser: Any, **options: Any) -> str:
        params = SamplingParams(
            max_tokens=5, thinking_token_budget=0,
            structured_outputs=StructuredOutputsParams(regex="a", **options),
        )  # fmt: skip
        found = thinking_budget(params, parser, CharTokenizer(), PromptTokens([97], "a", None))
        assert found is not None
        return "".join(map(chr, found.end_token_ids))

    assert end(_Thinks) == end(_Calls) == end(_Thinks, enable_in_reasoning=True) == "</think>"
    assert end(_Calls, enable_in_reasoning=True) == "</t>"


def test_a_thinking_budget_needs_to_know_how_thinking_ends() -> None:
    with pytest.raises(UnsupportedFeature, match="--reasoning-parser"):
        prepare(thinking_token_budget=3)
    with pytest.raises(RequestError, match="thinking_token_budget"):
        prepare(thinking_token_budget=-1)
    input_processor = InputProcessor(CharTokenizer(), served_model(), reasoning_parser=_Thinks)
    assert prepare(input_processor=input_processor).core_requests[0].thinking is None
    [core] = prepare(input_processor=input_processor, thinking_token_budget=0).core_requests
    assert core.thinking.max_tokens == 0
    assert core.thinking.end_token_ids == [ord(c) for c in "</think>"]
    assert core.thinking.start_token_ids == [ord(c) for c in "<think>"]
    for closed in ("<think>\n\n</think>\n\n", "x</think>"):
        [core] = prepare(
            closed, input_processor=input_processor, thinking_token_budget=2
        ).core_requests
        assert core.thinking is None, "the template was told not to think"
    for begun in ("<think>\n", "<think>x</think> hi <think>"):
        [core] = prepare(
            begun, input_processor=input_processor, thinking_token_budget=2
        ).core_requests
        assert core.thinking.start_token_ids == []
    [core] = prepare(
        "</think> hi", input_processor=input_processor, thinking_token_budget=2
    ).core_requests
    assert core.thinking.start_token_ids
