"""POST /v1/embeddings and /pooling: inputs, encodings, refusals, many texts at once."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import threading
from array import array
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI

from headrace_core.errors import GenerateError, QueueFull
from headrace_core.pooling import PoolingParams
from headrace_core.pooling.io_processor import IOProcessor, IOProcessorResponse
from headrace_server.pooling import embeddings
from headrace_server.pooling.call import PARALLEL
from headrace_server.pooling.embeddings import MAX_METADATA
from headrace_server.pooling.vectors import as_json
from headrace_testing.fakes.engine import BOS, FakeEngine
from headrace_testing.fakes.pooling import fake_pooling_model

URL = "/v1/embeddings"
CHAT = [{"role": "user", "content": "Hi"}]
PLAIN = {"normalize": False, "add_special_tokens": False}


def fake(*tasks: str, **options: Any) -> FakeEngine:
    changes = options.pop("model", {})
    return FakeEngine(model=fake_pooling_model(*tasks, **changes), **options)


async def post(client: Any, path: str = URL, **body: Any) -> Any:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def refused(client: Any, path: str = URL, **body: Any) -> Any:
    answer = await client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


async def test_the_answer_has_every_field(connect: Any) -> None:
    answer = await post(connect(fake()), input="Hi", request_id="mine", user="me", **PLAIN)
    assert answer.pop("created") > 1_700_000_000
    assert answer == {
        "id": "embd-mine", "object": "list", "model": "fake-model",
        "data": [{"index": 0, "object": "embedding", "embedding": [72, 105, 0, 0]}],
        "usage": {"prompt_tokens": 2, "completion_tokens": 0, "total_tokens": 2,
                  "prompt_tokens_details": None, "completion_tokens_details": None},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ("Hi", ["Hi"]), (["a", "bc"], ["a", "bc"]), ([97, 98], ["ab"]), ([[97], [98, 99]], ["a", "bc"]),
        ("", [""]),
    ],
)  # fmt: skip
async def test_forms_of_input(connect: Any, given: Any, texts: list[str]) -> None:
    engine = fake()
    answer = await post(connect(engine), input=given, normalize=False, return_token_ids=True)
    assert [call.prompt_text for call in engine.pooled] == texts
    assert all(call.add_special_tokens is True for call in engine.pooled)
    assert [item["index"] for item in answer["data"]] == list(range(len(texts)))
    is_text = isinstance(given, str) or isinstance(given[0], str)
    for item, text in zip(answer["data"], texts):
        assert item["prompt_token_ids"] == [*[BOS] * is_text, *map(ord, text)]


async def test_a_chat_is_one_prompt(connect: Any) -> None:
    engine = fake()
    client = connect(engine)
    answer = await post(client, messages=CHAT, **{**PLAIN, "return_token_ids": True})
    (item,) = answer["data"]
    text = "<user>Hi</user>"
    assert item["prompt_token_ids"] == [ord(c) for c in text]
    opened = await post(client, messages=CHAT, add_generation_prompt=True, return_token_ids=True)
    assert len(opened["data"][0]["prompt_token_ids"]) == len(text + "<assistant>")
    both = {"add_generation_prompt": True, "continue_final_message": True}
    assert (await refused(client, messages=CHAT, **both))["param"] == "continue_final_message"
    without = connect(fake(model={"has_chat_template": False}))
    assert "chat template" in (await refused(without, messages=CHAT))["message"]


async def test_parameters_reach_the_engine(connect: Any) -> None:
    engine = fake(model={"priority_scheduling": True})
    await post(
        connect(engine), input="abc", dimensions=2, normalize=False, truncate_prompt_tokens=2,
        priority=-3, add_special_tokens=False, model="fake-model",
    )  # fmt: skip
    (call,) = engine.pooled
    params = PoolingParams(
        task="embed", dimensions=2, normalize=False, truncate_prompt_tokens=2,
        skip_reading_prefix_cache=False,
    )  # fmt: skip
    assert (call.params, call.priority, call.add_special_tokens) == (params, -3, False)
    nulls = dict.fromkeys(("dimensions", "priority", "encoding_format", "user", "model", "sparse"))
    await post(connect(engine), input="a", **nulls)


async def test_token_ids_are_those_after_truncation(connect: Any) -> None:
    client = connect(fake())
    answer = await post(client, input="abc", truncate_prompt_tokens=2, return_token_ids=True)
    assert answer["data"][0]["prompt_token_ids"] == [98, 99]
    for without in ({}, {"return_token_ids": False}, {"return_token_ids": None}):
        assert "prompt_token_ids" not in (await post(client, input="abc", **without))["data"][0]
    binary = {"encoding_format": "bytes", "return_token_ids": True, "add_special_tokens": False}
    told = (await client.post(URL, json={"input": "ab", **binary})).headers["metadata"]
    assert json.loads(told)["data"][0]["prompt_token_ids"] == [97, 98]


async def test_ids_of_requests(connect: Any) -> None:
    engine = fake()
    client = connect(engine)
    headers = {"X-Request-Id": "header"}
    answer = await client.post(URL, json={"input": "a", "request_id": "body"}, headers=headers)
    assert answer.json()["id"] == "embd-header"
    await post(client, input=["a", "b"], request_id="body")
    names = [call.request_id for call in engine.pooled]
    assert len(set(names)) == 3
    assert names[1].startswith("embd-body-0-")


async def test_cached_tokens(connect: Any) -> None:
    client = connect(fake(cached_tokens=2), enable_prompt_tokens_details=True)
    usage = (await post(client, input=["abcd", "efgh"]))["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4}
    assert (usage["prompt_tokens"], usage["total_tokens"]) == (10, 10)


@pytest.mark.parametrize("form", ["float", "base64", "bytes", "bytes_only"])
async def test_forms_of_answers(connect: Any, form: str) -> None:
    client = connect(fake())
    body = {"input": ["Hi", "abc"], **PLAIN, "encoding_format": form, "request_id": "r"}
    answer = await client.post(URL, json=body)
    vectors = [[72.0, 105.0, 0.0, 0.0], [97.0, 98.0, 99.0, 0.0]]
    if form.startswith("bytes"):
        assert answer.headers["content-type"] == "application/octet-stream"
        assert list(array("f", answer.content)) == vectors[0] + vectors[1]
    else:
        found = [item["embedding"] for item in answer.json()["data"]]
        if form == "base64":
            found = [list(array("f", base64.b64decode(text))) for text in found]
        assert found == vectors
    assert ("metadata" in answer.headers) == (form == "bytes")
    if form == "bytes":
        metadata = json.loads(answer.headers["metadata"])
        assert {"id", "created", "model", "data", "usage"} == set(metadata)
        assert metadata["id"] == "embd-r"
        assert [(item["start"], item["end"], item["shape"]) for item in metadata["data"]] == [
            (0, 16, [4]), (16, 32, [4]),
        ]  # fmt: skip
        assert {item["endianness"] for item in metadata["data"]} <= {"little", "big"}


@pytest.mark.parametrize("form", ["base64", "bytes"])
async def test_types_and_orders(connect: Any, form: str) -> None:
    client = connect(fake())
    wire = {"encoding_format": form, "embed_dtype": "float16", "endianness": "big"}
    answer = await client.post(URL, json={"input": "Hi", **PLAIN, **wire})
    data = answer.content
    if form == "base64":
        data = base64.b64decode(answer.json()["data"][0]["embedding"])
    assert data.hex() == "5480569000000000"  # 72 and 105 in binary16
    if form == "bytes":
        (item,) = json.loads(answer.headers["metadata"])["data"]
        assert (item["embed_dtype"], item["endianness"]) == ("float16", "big")


async def test_a_header_has_its_bounds(connect: Any) -> None:
    client = connect(fake())
    body: dict[str, Any] = {"input": ["a"] * 1000, "encoding_format": "bytes"}
    error = await refused(client, **body)
    assert (error["param"], str(MAX_METADATA) in error["message"]) == ("encoding_format", True)
    whole = await client.post(URL, json={**body, "encoding_format": "bytes_only"})
    assert len(whole.content) == 1000 * 16


async def test_sparse(connect: Any) -> None:
    engine = fake(model={"sparse": True, "embedding_size": 300, "normalize": False})
    client = connect(engine)
    answer = await post(client, input="Hi", sparse=True, add_special_tokens=False)
    assert answer["data"][0]["embedding"] == {"indices": [0, 1], "values": [72, 105]}
    full = await post(client, input="Hi", add_special_tokens=False)
    assert len(full["data"][0]["embedding"]) == 300
    both = await refused(client, input="Hi", sparse=True, encoding_format="base64")
    assert both["param"] == "sparse"
    dense = await refused(connect(fake()), input="Hi", sparse=True)
    assert "vocabulary" in dense["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input[0]"),
        ({"input": ["a", [1]]}, "input[1]"),
        ({"input": [1, "a"]}, "input[1]"),
        ({"input": [[1], "a"]}, "input[1]"),
        ({"input": {"a": 1}}, "input"),
        ({"input": [-1]}, "input[0]"),
        ({"messages": []}, "messages"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 5}, "dimensions"),
        ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a" * 5000}, "input"),
        ({"input": "", "add_special_tokens": False}, "input"),
        ({"input": "a", "priority": 1}, "priority"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "embed_dtype": "int8", "encoding_format": "base64"}, "embed_dtype"),
        ({"input": "a", "embed_dtype": "float16"}, "embed_dtype"),
        ({"input": "a", "endianness": "big"}, "endianness"),
        ({"input": "a", "mm_processor_kwargs": {"x": 1}}, "mm_processor_kwargs"),
        ({"input": "a", "request_id": "a b"}, "request_id"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": CHAT, "chat_template": "x"}, "chat_template"),
    ],
)
async def test_refusals_name_the_field(connect: Any, body: Any, param: str) -> None:
    engine = fake()
    error = await refused(connect(engine), **body)
    assert (error["type"], error["param"]) == ("BadRequestError", param)
    assert engine.pooled == []


async def test_prompts_by_name(connect: Any) -> None:
    engine = fake(model={"prompts": {"query": "q: "}})
    await post(connect(engine), input="a", prompt_name="query")
    assert engine.pooled[0].params.prompt_name == "query"
    error = await refused(connect(engine), input="a", prompt_name="passage")
    assert (error["param"], "['query']" in error["message"]) == ("prompt_name", True)


async def test_dimensions_that_a_model_does_not_have(connect: Any) -> None:
    model = {"matryoshka": None, "name": "mine", "names": ("mine",)}
    error = await refused(connect(fake(model=model)), input="a", dimensions=2)
    assert "'mine' does not support matryoshka" in error["message"]
    listed = await refused(connect(fake(model={"matryoshka": (1, 3)})), input="a", dimensions=2)
    assert "[1, 3]" in listed["message"]


async def test_an_unknown_model(connect: Any) -> None:
    answer = await connect(fake()).post(URL, json={"input": "a", "model": "other"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "NotFoundError")


async def test_unknown_fields_are_ignored(connect: Any) -> None:
    await post(connect(fake()), input="a", truncate="END", input_type="query")


async def test_a_thousand_texts(connect: Any) -> None:
    """In order, whatever the order in which they end, and never more at once than the bound."""
    engine = _Uneven(model=fake_pooling_model())
    texts = [chr(97 + i % 26) * (i % 3 + 1) for i in range(1000)]
    answer = await post(connect(engine), input=texts, **PLAIN)
    firsts = [item["embedding"][0] for item in answer["data"]]
    assert firsts == [ord(text[0]) for text in texts]
    assert engine.finished != sorted(engine.finished, key=lambda name: int(name.split("-")[2]))
    assert engine.most == PARALLEL
    assert len({id(call.entry) for call in engine.pooled}) == 1, (
        "for the queue they are one request"
    )
    assert answer["usage"]["prompt_tokens"] == sum(map(len, texts))


class _Uneven(FakeEngine):
    """Early requests take longer than those after them."""

    most = 0

    async def _pause(self, seconds: float, stop: asyncio.Event) -> None:
        self.most = max(self.most, self.num_running)
        for _ in range(50 - len(self.pooled) % 50):
            await asyncio.sleep(0)


@pytest.mark.parametrize("path", [URL, "/score"])
async def test_a_client_that_leaves_aborts_all(live: Any, until: Any, path: str) -> None:
    engine = fake(gate=asyncio.Event())
    server = await live(engine)
    body = {"input": ["a"] * 20, "text_1": "a", "text_2": ["b"] * 20}
    if path == URL:
        body = {"input": body["input"]}
    async with httpx2.AsyncClient() as client:
        asking = asyncio.create_task(client.post(server.url + path, json=body))
        await until(lambda: engine.num_running == (20 if path == URL else 1))
        asking.cancel()
        await until(lambda: engine.num_running == 0)
    assert len(engine.aborted) == (20 if path == URL else 1)
    assert engine.finished == []


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"reject": QueueFull("full", retry_after=3)}, 429), ({"reject": GenerateError("no")}, 500),
        ({"fail_after": 1}, 500), ({"die_after": 3}, 500), ({"max_running": 4}, 429),
    ],
)  # fmt: skip
async def test_an_engine_that_fails(connect: Any, options: Any, status: int) -> None:
    engine = fake(**options)
    answer = await connect(engine).post(URL, json={"input": ["a"] * 10})
    assert answer.status_code == status
    assert engine.num_running == 0


async def test_the_openai_client(live: Any) -> None:
    server = await live(fake())
    async with AsyncOpenAI(base_url=server.url + "/v1", api_key="x") as client:
        texts = ["abc", "de"]
        plain = await client.embeddings.create(
            model="fake-model", input=texts, encoding_format="float"
        )
        packed = await client.embeddings.create(model="fake-model", input=texts)
        short = await client.embeddings.create(model="fake-model", input="abc", dimensions=3)
    assert [item.embedding for item in packed.data] == [item.embedding for item in plain.data]
    assert math.hypot(*plain.data[0].embedding) == pytest.approx(1)
    assert len(short.data[0].embedding) == 3
    assert plain.usage.total_tokens == 7


async def test_pooling(connect: Any) -> None:
    client = connect(fake())
    answer = await post(client, "/pooling", input=["ab", "c"], request_id="r", **PLAIN)
    assert (answer["id"], answer["object"]) == ("pool-r", "list")
    assert answer["data"] == [
        {"index": 0, "object": "pooling", "data": [[97, 0, 0, 0], [98, 1, 0, 0]]},
        {"index": 1, "object": "pooling", "data": [[99, 0, 0, 0]]},
    ]
    whole = await post(client, "/pooling", input="ab", task="embed", **PLAIN)
    assert whole["data"][0]["data"] == [97, 98, 0, 0]
    packed = await client.post(
        "/pooling", json={"input": ["ab", "c"], **PLAIN, "encoding_format": "bytes"}
    )
    assert [i["shape"] for i in json.loads(packed.headers["metadata"])["data"]] == [[2, 4], [1, 4]]
    chat = await post(client, "/pooling", messages=CHAT, task="embed")
    assert len(chat["data"]) == 1


@pytest.mark.parametrize(
    ("tasks", "used"),
    [
        (("embed", "token_embed"), "token_embed"),
        (("classify", "token_classify"), "token_classify"),
        (("classify", "score"), None),
        (("embed",), None),
    ],
)
async def test_the_task_that_goes_without_saying(connect: Any, tasks: Any, used: str) -> None:
    engine = fake(*tasks)
    client = connect(engine)
    if used is None:
        error = await refused(client, "/pooling", input="a")
        assert error["param"] == "task"
        assert error["message"].startswith(f"task: must be given: one of {sorted(tasks)}")
    else:
        await post(client, "/pooling", input="a")
        assert engine.pooled[0].task == used
    for task in tasks:
        await post(client, "/pooling", input="a", task=task)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "a", "task": "classify"}, "task"),
        ({"input": "a", "task": "generate"}, "task"),
        ({"input": "a", "task": "plugin"}, "data"),
        ({"input": "a", "task": "embed", "use_activation": True}, "use_activation"),
        ({"data": 1}, "data"),
    ],
)
async def test_pooling_refusals(connect: Any, body: Any, param: str) -> None:
    assert (await refused(connect(fake()), "/pooling", **body))["param"] == param


async def test_parameters_of_other_tasks(connect: Any) -> None:
    client = connect(fake("classify", "token_classify"))
    for name, value in (("dimensions", 2), ("normalize", True)):
        body = {"input": "a", "task": "classify", name: value}
        assert (await refused(client, "/pooling", **body))["param"] == name


class Dots(IOProcessor):
    """A text three ways; the answer is how their vectors agree."""

    def __init__(self) -> None:
        pass

    def parse_request(self, request: Any) -> str:
        if not isinstance(request, dict) or not isinstance(request.get("text"), str):
            raise ValueError("text is missing, please send some")
        return str(request["text"])

    def pre_process(self, prompt: str, request_id: str | None = None, **kwargs: Any) -> list[str]:
        return [prompt, prompt[::-1], prompt[:1]]

    def validate_or_generate_params(self, params: PoolingParams | None = None) -> PoolingParams:
        return PoolingParams(task="embed", normalize=False)

    def post_process(
        self, model_output: Any, request_id: str | None = None, **kwargs: Any
    ) -> list[float]:
        one, *others = (output.outputs.data.tolist() for output in model_output)
        return [sum(a * b for a, b in zip(one, other)) for other in others]

    def output_to_response(self, output: Any) -> IOProcessorResponse:
        if output == [0.0, 0.0]:
            raise RuntimeError("a secret")
        return IOProcessorResponse(data={"dots": output}, extra={"more": 1})


async def test_an_io_processor(connect: Any) -> None:
    engine = fake(io_processor=Dots())
    client = connect(engine)
    texts = [chr(i + 1) + chr(i + 2) for i in range(50)]
    answers = await asyncio.gather(
        *(post(client, "/pooling", data={"text": text}, request_id=f"r{i}")
          for i, text in enumerate(texts))
    )  # fmt: skip
    for i, answer in enumerate(answers):
        a, b = i + 1, i + 2
        assert answer.pop("created_at") > 1_700_000_000
        expected = {"dots": [2 * a * b, a * a]}
        assert answer == {"request_id": f"r{i}", "data": expected, "more": 1}
    assert len(engine.pooled) == 150
    assert {call.task for call in engine.pooled} == {"embed"}


async def test_an_io_processor_that_raises(connect: Any) -> None:
    client = connect(fake(io_processor=Dots()))
    error = await refused(client, "/pooling", data=[1])
    assert (error["param"], error["message"]) == ("data", "data: text is missing, please send some")
    for wrong in ({"priority": 1}, {"encoding_format": "base64"}, {"task": "embed"}):
        await refused(client, "/pooling", data={"text": "a"}, **wrong)
    ours = await client.post("/pooling", json={"data": {"text": "\0"}})
    assert (ours.status_code, "secret" in ours.text) == (500, False)
    await post(client, "/pooling", data={"text": "a"})


async def test_answers_have_a_most(connect: Any) -> None:
    """Counted before anything is computed: what fits exactly is answered."""
    sizes = {"num_labels": 3, "embedding_size": 4, "matryoshka": ()}
    engine = fake("embed", "token_embed", "classify", model=sizes)
    client = connect(engine, max_answer_numbers=12)
    rows = {"task": "token_embed"}  # of 4 numbers
    for path, body, number in (
        (URL, {"input": ["a"] * 3}, 0), (URL, {"input": ["a"] * 4}, 16),
        (URL, {"input": ["a"] * 6, "dimensions": 2}, 0), ("/classify", {"input": ["a"] * 5}, 15),
        ("/pooling", {"input": "ab", **rows}, 0), ("/pooling", {"input": [1, 2, 3], **rows}, 0),
        ("/pooling", {"input": ["ab", "a"], **rows}, 20),
        ("/pooling", {"input": "ab" * 9, "truncate_prompt_tokens": 3, **rows}, 0),
    ):  # fmt: skip
        engine.pooled.clear()
        if not number:
            await post(client, path, **body)
            continue
        error = await refused(client, path, **body)
        assert (
            f" {number} in all; one answer may have 12 (--max-answer-numbers)" in error["message"]
        )
        assert (error["param"], engine.pooled) == ("input", [])


@pytest.mark.parametrize(("count", "thread"), [(1, "MainThread"), (64, "headrace-offload")])
async def test_large_answers_are_made_off_the_loop(
    connect: Any, monkeypatch: pytest.MonkeyPatch, count: int, thread: str
) -> None:
    names = []

    def noted(values: Any) -> Any:
        names.append(threading.current_thread().name.partition("_")[0])
        return as_json(values)

    monkeypatch.setattr(embeddings, "as_json", noted)
    client = connect(fake(model={"embedding_size": 768}))
    answer = await post(client, input=["a"] * count)
    assert len(answer["data"]) == count
    assert set(names) == {thread}


async def test_tokenize(connect: Any) -> None:
    client = connect(fake())
    assert (await post(client, "/tokenize", prompt="ab"))["count"] == 3
    chat = await post(client, "/tokenize", messages=CHAT, add_generation_prompt=False)
    pooled = await post(client, messages=CHAT, return_token_ids=True)
    assert chat["tokens"] == pooled["data"][0]["prompt_token_ids"]
