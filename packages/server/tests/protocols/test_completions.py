"""POST /v1/completions."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from headrace_core.output import Logprob
from headrace_server.protocols.openai.logprobs import CompletionFormat, chat_logprobs
from headrace_testing.fakes.engine import FakeEngine, fake_served_model

URL = "/v1/completions"


async def post(client: Any, **body: Any) -> Any:
    answer = await client.post(URL, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_the_answer_has_every_field(connect: Any) -> None:
    answer = await post(connect(FakeEngine("word")), model="fake-model", prompt="ab")
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["model"] == "fake-model"
    (choice,) = answer["choices"]
    assert choice["index"] == 0
    assert choice["text"] == "word"
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] is choice["logprobs"] is None
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "total_tokens": 8,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([97, 98], ["ab"]),
        ([[97], [98, 99]], ["a", "bc"]),
        (["ab", [98, 99], ""], ["ab", "bc", ""]),
        ([[97], "b"], ["a", "b"]),
    ],
)
async def test_prompt_forms(connect: Any, prompt: Any, texts: list[str]) -> None:
    engine = FakeEngine(lambda text, index: text)
    answer = await post(connect(engine), prompt=prompt)
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert sorted(r.prompt_text for r in engine.requests) == sorted(texts)


async def test_indices_run_prompt_major(connect: Any) -> None:
    engine = FakeEngine(lambda text, index: f"{text}{index}")
    answer = await post(connect(engine), prompt=["a", "b"], n=3)
    assert [c["index"] for c in answer["choices"]] == list(range(6))
    assert [c["text"] for c in answer["choices"]] == ["a0", "a1", "a2", "b0", "b1", "b2"]
    assert answer["usage"]["prompt_tokens"] == 4
    assert answer["usage"]["completion_tokens"] == 18


async def test_streamed_choices_equal_the_whole(connect: Any, events: Any) -> None:
    engine = FakeEngine(lambda text, index: f"{text}-{index}-größe", tokens_per_output=3)
    client = connect(engine)
    body: dict[str, Any] = {"prompt": ["a", "b"], "n": 2, "logprobs": 1, "echo": True}
    whole = await post(client, **body)
    streamed = await client.post(
        URL, json={**body, "stream": True, "stream_options": {"include_usage": True}}
    )
    assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
    chunks = events(streamed.text)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        mine = [c for k in chunks for c in k["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["stop"]
        for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = [x for c in mine if c["logprobs"] for x in c["logprobs"][field]]
            assert joined == choice["logprobs"][field]


async def test_logprobs(connect: Any) -> None:
    answer = await post(connect(FakeEngine("xy")), prompt="a", logprobs=2)
    block = answer["choices"][0]["logprobs"]
    assert block["tokens"] == ["x", "y", "</s>"]
    assert block["token_logprobs"] == [-0.5] * 3
    assert block["top_logprobs"][0] == {"x": -0.5, "y": -1.5}
    assert block["text_offset"] == [0, 1, 2]


async def test_logprobs_zero_is_the_chosen_token(connect: Any) -> None:
    answer = await post(connect(FakeEngine("x")), prompt="a", logprobs=0)
    assert answer["choices"][0]["logprobs"]["top_logprobs"][0] == {"x": -0.5}


async def test_tokens_as_ids(connect: Any) -> None:
    client = connect(FakeEngine("x"), return_tokens_as_token_ids=True)
    answer = await post(client, prompt="a", logprobs=1)
    assert answer["choices"][0]["logprobs"]["tokens"][0] == "token_id:120"
    answer = await post(client, prompt="a", logprobs=1, return_tokens_as_token_ids=False)
    assert answer["choices"][0]["logprobs"]["tokens"][0] == "x"


def test_impossible_logprobs_are_finite() -> None:
    entries = {5: Logprob(-math.inf, 9, "a"), 6: Logprob(-0.1, 1, "b")}
    block = CompletionFormat(2, False).build([5], [entries])
    assert block.token_logprobs == [-9999.0]
    assert block.top_logprobs == [{"a": -9999.0, "b": -0.1}]
    chat = chat_logprobs([5], [entries], 1, False)
    assert chat.content[0].logprob == -9999.0
    assert [t.token for t in chat.content[0].top_logprobs] == ["b"]


async def test_echo(connect: Any) -> None:
    client = connect(FakeEngine("xy"))
    answer = await post(client, prompt="ab", echo=True)
    assert answer["choices"][0]["text"] == "abxy"
    answer = await post(client, prompt=[97, 98], echo=True)
    assert answer["choices"][0]["text"] == "abxy"


async def test_echo_alone(connect: Any) -> None:
    client = connect(FakeEngine("xy"))
    answer = await post(client, prompt="ab", echo=True, max_tokens=0, logprobs=1)
    (choice,) = answer["choices"]
    assert choice["text"] == "ab"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["<s>", "a", "b"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert answer["usage"]["completion_tokens"] == 0
    answer = await client.post(URL, json={"prompt": "ab", "max_tokens": 0})
    assert answer.json()["error"]["param"] == "max_tokens"


async def test_prompt_logprobs(connect: Any) -> None:
    client = connect(FakeEngine("x"))
    answer = await post(client, prompt="ab", prompt_logprobs=1)
    found = answer["choices"][0]["prompt_logprobs"]
    assert found[0] is None
    assert found[1]["97"] == {"logprob": -0.5, "rank": 1, "decoded_token": "a"}
    refused = await client.post(URL, json={"prompt": "a", "prompt_logprobs": 1, "stream": True})
    assert refused.json()["error"]["param"] == "prompt_logprobs"


@pytest.mark.parametrize("stop", ["r", ["zz", "r"]])
async def test_stop(connect: Any, stop: Any) -> None:
    client = connect(FakeEngine("word"))
    (choice,) = (await post(client, prompt="a", stop=stop))["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("wo", "stop", "r")
    (choice,) = (await post(client, prompt="a", stop=stop, include_stop_str_in_output=True))[
        "choices"
    ]
    assert choice["text"] == "wor"
    (choice,) = (await post(client, prompt="a", stop_token_ids=[ord("o")]))["choices"]
    assert (choice["text"], choice["stop_reason"]) == ("wo", ord("o"))


async def test_max_tokens(connect: Any) -> None:
    engine = FakeEngine("long " * 20)
    client = connect(engine)
    (choice,) = (await post(client, prompt="a"))["choices"]
    assert (len(choice["text"]), choice["finish_reason"]) == (16, "length")
    await post(client, prompt="a", max_tokens=None)
    assert engine.requests[-1].params.max_tokens is None


async def test_return_token_ids(connect: Any, events: Any) -> None:
    client = connect(FakeEngine("xy"))
    (choice,) = (await post(client, prompt="a", return_token_ids=True))["choices"]
    assert choice["token_ids"][:2] == [120, 121]
    assert choice["prompt_token_ids"][-1] == 97
    body = {"prompt": "a", "return_token_ids": True, "stream": True}
    chunks = events((await client.post(URL, json=body)).text)
    streamed = [t for c in chunks for t in c["choices"][0]["token_ids"]]
    assert streamed == choice["token_ids"]
    assert [("prompt_token_ids" in c["choices"][0]) for c in chunks] == [True, False, False]


async def test_usage_in_streams(connect: Any, events: Any) -> None:
    body: dict[str, Any] = {"prompt": "a", "stream": True}
    client = connect(FakeEngine("xy"))
    assert not any("usage" in c for c in events((await client.post(URL, json=body)).text))
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events((await client.post(URL, json=body)).text)
    assert [c["usage"]["completion_tokens"] for c in chunks] == [1, 2, 3, 3]
    forced = connect(FakeEngine("xy"), enable_force_include_usage=True)
    body.pop("stream_options")
    chunks = events((await forced.post(URL, json=body)).text)
    assert chunks[-1]["usage"]["total_tokens"] == 5
    refused = await client.post(URL, json={"prompt": "a", "stream_options": {}})
    assert refused.json()["error"]["param"] == "stream_options"


async def test_cached_tokens(connect: Any) -> None:
    client = connect(FakeEngine("x", cached_tokens=2), enable_prompt_tokens_details=True)
    answer = await post(client, prompt="abc")
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


async def test_all_sampling_fields_arrive(connect: Any) -> None:
    engine = FakeEngine("x")
    sent = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.2,
        "frequency_penalty": 0.3, "presence_penalty": -0.3, "seed": 11, "min_tokens": 1,
        "ignore_eos": False, "skip_special_tokens": False, "spaces_between_special_tokens": False,
        "truncate_prompt_tokens": 4, "allowed_token_ids": [1, 2], "bad_words": ["no"],
        "stop_token_ids": [5], "include_stop_str_in_output": True,
    }  # fmt: skip
    body = {
        **sent, "prompt": "a", "logit_bias": {"5": 200, "6": -1}, "stop": "s",
        "headrace_xargs": {"k": 1}, "vllm_xargs": {"j": 2}, "cache_salt": "pepper",
        "add_special_tokens": False, "user": "me",
    }  # fmt: skip
    await post(connect(engine), **body)
    (request,) = engine.requests
    assert {name: getattr(request.params, name) for name in sent} == sent
    assert request.params.logit_bias == {5: 100.0, 6: -1.0}
    assert request.params.stop == ["s"]
    assert request.params.extra_args == {"k": 1, "j": 2}
    assert request.prompt["cache_salt"] == "pepper"  # type: ignore[index,call-overload]
    assert request.add_special_tokens is False


async def test_model_defaults(connect: Any) -> None:
    model = fake_served_model(
        default_sampling_params={"temperature": 0.25, "top_k": 3, "max_tokens": 5}
    )
    engine = FakeEngine("x" * 50, model=model)
    client = connect(engine)
    await post(client, prompt="a", top_k=9, max_tokens=40)
    params = engine.requests[-1].params
    assert (params.temperature, params.top_k, params.max_tokens) == (0.25, 9, 5)
    await post(client, prompt="a", temperature=None)
    assert engine.requests[-1].params.temperature == 0.25


async def test_priority(connect: Any) -> None:
    refused = await connect().post(URL, json={"prompt": "a", "priority": 1})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")
    engine = FakeEngine("x", model=fake_served_model(priority_scheduling=True))
    await post(connect(engine), prompt="a", priority=-3)
    assert engine.requests[0].priority == -3


async def test_request_ids(connect: Any) -> None:
    engine = FakeEngine("x")
    client = connect(engine)
    assert (await post(client, prompt="a", request_id="mine"))["id"] == "cmpl-mine"
    answer = await client.post(
        URL, json={"prompt": ["a", "b"], "request_id": "mine"}, headers={"X-Request-Id": "theirs"}
    )
    assert answer.json()["id"] == "cmpl-theirs"
    ids = [r.request_id for r in engine.requests]
    assert len(set(ids)) == 3
    assert ids[1].startswith("cmpl-theirs-")
    refused = await client.post(URL, json={"prompt": "a", "request_id": "a b\n"})
    assert refused.json()["error"]["param"] == "request_id"


async def test_prompt_logprobs_that_come_once_reach_every_choice(connect: Any, events: Any) -> None:
    """Choices may begin in different outputs; only the first output carries the prompt's."""

    class OneByOne(FakeEngine):
        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            async for output in super().generate(*args, **kwargs):
                for part in output.outputs:
                    yield replace(output, outputs=[part], finished=output.finished)
                    output.prompt_logprobs = None

    body = {"prompt": "ab", "n": 2, "echo": True, "logprobs": 1, "stream": True}
    answer = await connect(OneByOne("x")).post(URL, json=body)
    firsts = {}
    for chunk in events(answer.text):
        for choice in chunk["choices"]:
            firsts.setdefault(choice["index"], choice["logprobs"]["tokens"])
    assert firsts == {0: ["<s>", "a", "b", "x"], 1: ["<s>", "a", "b", "x"]}


async def refused(client: Any, **body: Any) -> Any:
    answer = await client.post(URL, json=body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


async def test_best_of(connect: Any) -> None:
    """Completions are not made to be thrown away."""
    client = connect(FakeEngine("x"))
    await post(client, prompt="a", best_of=1)
    await post(client, prompt="a", best_of=2, n=2, temperature=1)
    error = await refused(client, prompt="a", best_of=3, n=2)
    assert (error["param"], "n = 2" in error["message"]) == ("best_of", True)


@pytest.mark.parametrize("value", ["a", 1, 1.5, True, ["a", 1, 2.5], []])
async def test_custom_arguments_arrive_unchanged(connect: Any, value: Any) -> None:
    engine = FakeEngine("x")
    await post(connect(engine), prompt="a", vllm_xargs={"k": value})
    assert repr(engine.requests[0].params.extra_args) == repr({"k": value})


@pytest.mark.parametrize("value", [None, {"a": 1}, [["a"]], [None]])
async def test_custom_arguments_of_other_kinds_are_refused(connect: Any, value: Any) -> None:
    error = await refused(connect(), prompt="a", headrace_xargs={"k": value})
    assert error["param"].startswith("headrace_xargs.k")


TAKES_EMBEDS = fake_served_model(prompt_embeds=True)


class EmbedsEngine(FakeEngine):
    """Answers prompts that are embeddings with their bytes as text."""

    def _tokens(self, prompt: Any, special: Any) -> Any:
        if isinstance(prompt, dict) and "prompt_embeds" in prompt:
            return "", [0] * len(prompt["prompt_embeds"])
        return super()._tokens(prompt, special)


@pytest.mark.parametrize("form", [str, list])
async def test_embeddings_come_before_texts(connect: Any, form: type) -> None:
    engine = EmbedsEngine(lambda text, index: text or "embedded", model=TAKES_EMBEDS)
    given: Any = "AAEC" if form is str else ["AAEC", "AA=="]
    answer = await post(connect(engine), prompt=["a", "b"], prompt_embeds=given, cache_salt="s")
    count = 1 if form is str else 2
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == ["embedded"] * count + ["a", "b"]
    sent = [r.prompt for r in engine.requests if "prompt_embeds" in r.prompt]  # type: ignore[operator]
    assert {"prompt_embeds": b"\x00\x01\x02", "cache_salt": "s"} in sent
    assert len(sent) == count
    alone = await post(connect(engine), prompt_embeds="AAEC")
    assert [choice["text"] for choice in alone["choices"]] == ["embedded"]


@pytest.mark.req("SEC-10")
async def test_embeddings_that_are_refused(connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    error = await refused(connect(), prompt="a", prompt_embeds="AAEC")
    assert error["param"] == "prompt_embeds"
    assert "--enable-prompt-embeds" in error["message"]
    engine = EmbedsEngine("x", model=TAKES_EMBEDS)
    client = connect(engine)
    for given in ("A", "AA=", "AA==\n", "A-_=", "AAEC AAEC", ["AAEC", "ü"]):
        assert (await refused(client, prompt_embeds=given))["param"] == "prompt_embeds", given
    for given in ("", [], ["AAEC"] * 1025, 3, [1]):
        assert "prompt_embeds" in (await refused(client, prompt_embeds=given))["param"]
    for field, value in (("echo", True), ("prompt_logprobs", 1), ("use_beam_search", True)):
        assert (await refused(client, prompt_embeds="AAEC", **{field: value}))["param"] == field
    monkeypatch.setattr("headrace_server.requests.prompt_embeds.MAX_BYTES", 8)
    assert "8 bytes" in (await refused(client, prompt_embeds=["AAEC" * 4, "AAEC" * 4]))["message"]
    assert engine.requests == []
    assert (await refused(connect()))["param"] == "prompt"
