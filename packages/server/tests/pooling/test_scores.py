"""POST /classify, /score and /rerank."""

from __future__ import annotations

import math
from typing import Any

import cohere
import pytest

from headrace_testing.fakes.engine import FakeEngine
from headrace_testing.fakes.pooling import fake_pooling_model

RERANK = ("/rerank", "/v1/rerank", "/v2/rerank")
MODELS = {
    "cross": ("score", "classify"),
    "cosine": ("embed", "token_embed"),
    "late_interaction": ("token_embed",),
}
DOCUMENTS = ["xyz", "abc", "abx", "cba"]
"""Shares of ``abc``: 0, 1, 2/3, 1."""


def fake(*tasks: str, **changes: Any) -> FakeEngine:
    return FakeEngine(model=fake_pooling_model(*(tasks or MODELS["cross"]), **changes))


async def post(client: Any, path: str, **body: Any) -> Any:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def refused(client: Any, path: str, **body: Any) -> Any:
    answer = await client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


async def test_classify(connect: Any) -> None:
    engine = fake("classify", labels=("odd", "even"), num_labels=2)
    answer = await post(
        connect(engine), "/classify", input=["bdf", "a"], request_id="r", add_special_tokens=False,
        return_token_ids=True,
    )  # fmt: skip
    assert answer.pop("created") > 0
    likely = math.exp(3) / (math.exp(3) + 1)
    first, second = answer.pop("data")
    assert first["probs"] == pytest.approx([likely, 1 - likely])
    assert (first["label"], second["label"]) == ("odd", "even")
    assert (first["index"], second["index"], second["num_classes"]) == (0, 1, 2)
    assert second["prompt_token_ids"] == [97]
    assert answer == {
        "id": "classify-r", "object": "list", "model": "fake-model",
        "usage": {"prompt_tokens": 4, "completion_tokens": 0, "total_tokens": 4,
                  "prompt_tokens_details": None, "completion_tokens_details": None},
    }  # fmt: skip


async def test_logits_and_chats(connect: Any) -> None:
    engine = fake("classify")
    client = connect(engine)
    for name in ("use_activation", "softmax", "activation"):
        answer = await post(client, "/classify", input="aab", **{name: False})
        assert answer["data"][0]["probs"] == [2, 2]  # the beginning of a text counts as 0
        assert answer["data"][0]["label"] is None
    await post(client, "/classify", messages=[{"role": "user", "content": "a"}])
    assert engine.pooled[-1].prompt_text == "<user>a</user>"
    assert engine.pooled[-1].task == "classify"
    params = engine.pooled[-1].params
    assert (params.use_activation, params.task) == (True, "classify")


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize("scoring", MODELS)
async def test_score(connect: Any, path: str, scoring: str) -> None:
    client = connect(fake(*MODELS[scoring], scoring=scoring))
    answer = await post(
        client, path, text_1="abc", text_2=["a", "ax"], request_id="r", return_token_ids=True
    )
    assert answer.pop("created") > 0
    assert answer == {
        "id": "score-r", "object": "list", "model": "fake-model",
        "data": [
            {"index": 0, "object": "score", "score": 1.0, "prompt_token_ids": [97, 98, 99, 97]},
            {"index": 1, "object": "score", "score": 0.5, "prompt_token_ids": [97, 98, 99, 97, 120]},
        ],
        "usage": {"prompt_tokens": 9, "completion_tokens": 0, "total_tokens": 9,
                  "prompt_tokens_details": None, "completion_tokens_details": None},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("body", "scores"),
    [
        ({"text_1": "ab", "text_2": "ab"}, [1]),
        ({"text_1": ["ab"], "text_2": ["ax", "b", "y"]}, [0.5, 1, 0]),
        ({"text_1": ["a", "b"], "text_2": ["a", "a"]}, [1, 0]),
        ({"queries": "ab", "documents": ["a", "x"]}, [1, 0]),
        ({"text_1": "a", "documents": "a"}, [1]),
        (
            {"text_1": "a", "text_2": {"content": [{"type": "text", "text": t} for t in "ax"]}},
            [1, 0],
        ),
        ({"text_1": {"text": "a"}, "text_2": [{"text": "x", "page": 3}, "a"]}, [0, 1]),
        ({"queries": [{"text": "a"}], "documents": {"text": "a"}}, [1]),
        ({"text_1": "ab", "text_2": "xa", "use_activation": False}, [1]),
    ],
)
async def test_pairs(connect: Any, body: Any, scores: list[float]) -> None:
    answer = await post(connect(fake()), "/score", **body)
    assert [item["score"] for item in answer["data"]] == scores


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ({"queries": ["a", "b"], "documents": ["a"]}, "queries"),
        ({"text_1": "a", "text_2": []}, "text_1"),
        ({"text_1": [], "text_2": "a"}, "text_1"),
        ({"text_1": "a"}, "text_2"),
        ({"text_2": "a"}, "text_1"),
        ({"text_1": "a", "queries": "a", "text_2": "a"}, "text_1"),
        ({"text_1": 1, "text_2": "a"}, "text_1"),
        ({"text_1": [[1]], "text_2": "a"}, "text_1[0]"),
        ({"text_1": "a", "text_2": {"content": [{"type": "image_url"}]}}, "text_2.content[0].type"),
        ({"text_1": "a", "text_2": {"content": []}}, "text_2.content"),
        ({"text_1": {"text": 1}, "text_2": "a"}, "text_1.text"),
        ({"text_1": {"image": "a"}, "text_2": "a"}, "text_1"),
        ({"text_1": "a", "text_2": ["a", {"image": "a"}]}, "text_2[1]"),
        ({"text_1": "a" * 5000, "text_2": "a"}, "text_2"),
        ({"text_1": "a", "text_2": "b", "priority": 1}, "priority"),
        ({"text_1": "a", "text_2": "b", "prompt_name": ["q"]}, "prompt_name"),
    ],
)
async def test_wrong_pairs(connect: Any, body: Any, param: str) -> None:
    engine = fake()
    assert (await refused(connect(engine), "/score", **body))["param"] == param
    assert engine.pooled == []


@pytest.mark.parametrize("path", RERANK)
@pytest.mark.parametrize("scoring", MODELS)
async def test_rerank(connect: Any, path: str, scoring: str) -> None:
    client = connect(fake(*MODELS[scoring], scoring=scoring))
    answer = await post(client, path, query="abc", documents=DOCUMENTS, request_id="r")
    assert answer == {
        "id": "rerank-r", "model": "fake-model", "usage": {"prompt_tokens": 24, "total_tokens": 24},
        "results": [
            {"index": 1, "document": {"text": "abc"}, "relevance_score": 1.0},
            {"index": 3, "document": {"text": "cba"}, "relevance_score": 1.0},
            {"index": 2, "document": {"text": "abx"}, "relevance_score": pytest.approx(2 / 3)},
            {"index": 0, "document": {"text": "xyz"}, "relevance_score": 0.0},
        ],
    }  # fmt: skip


@pytest.mark.parametrize(("top_n", "count"), [(0, 4), (None, 4), (1, 1), (3, 3), (4, 4), (9, 4)])
async def test_top_n(connect: Any, top_n: int | None, count: int) -> None:
    answer = await post(connect(fake()), "/rerank", query="abc", documents=DOCUMENTS, top_n=top_n)
    assert [result["index"] for result in answer["results"]] == [1, 3, 2, 0][:count]


async def test_documents_that_are_objects(connect: Any) -> None:
    engine = fake()
    client = connect(engine)
    documents = [{"text": "abc", "page": 3}, "x", {"title": "a", "body": "b", "text": "zz"}]
    answer = await post(client, "/rerank", query="abc", documents=documents)
    assert [call.prompt[1] for call in engine.pooled] == ["abc", "x", "zz"]
    assert answer["results"][0]["document"] == {"text": "abc", "page": 3}
    fields = await post(
        client, "/rerank", query="abc", documents=documents[2:], rank_fields=["title", "none", "body"]
    )  # fmt: skip
    assert engine.pooled[-1].prompt[1] == "a\nb"
    assert fields["results"][0]["document"] == {"title": "a", "body": "b", "text": "a\nb"}
    parts = {"content": ["x", {"type": "text", "text": "ab"}]}
    answer = await post(client, "/rerank", query={"content": parts["content"][1:]}, documents=parts)
    assert [result["document"] for result in answer["results"]] == [{"text": "ab"}, {"text": "x"}]
    hidden = await post(client, "/rerank", query="a", documents=["a"], return_documents=False)
    assert set(hidden["results"][0]) == {"index", "relevance_score"}


async def test_long_documents_are_cut(connect: Any) -> None:
    engine = fake()
    client = connect(engine)
    body = {"query": "q", "documents": ["abcdef", "ab", "éé"], "max_chunks_per_doc": 5}
    await post(client, "/rerank", **body, max_tokens_per_doc=3)
    assert [call.prompt[1] for call in engine.pooled] == ["abc", "ab", "éé"]
    await post(client, "/rerank", **body, truncate_prompt_tokens=2)
    assert engine.pooled[-1].params.truncate_prompt_tokens == 2


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "query"),
        ({"query": "a"}, "documents"),
        ({"query": "a", "documents": []}, "documents"),
        ({"query": "a", "documents": "b"}, "documents"),
        ({"query": ["a"], "documents": ["b"]}, "query"),
        ({"query": {"text": ["a"]}, "documents": ["b"]}, "query.text"),
        ({"query": "a", "documents": [1]}, "documents[0]"),
        ({"query": "a", "documents": [{"title": "b"}]}, "documents"),
        ({"query": "a", "documents": [{"text": 1}]}, "documents"),
        ({"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ({"query": "a", "documents": ["b"], "max_tokens_per_doc": 0}, "max_tokens_per_doc"),
        ({"query": "a", "documents": ["b" * 5000]}, "documents"),
    ],
)
async def test_wrong_reranks(connect: Any, body: Any, param: str) -> None:
    engine = fake()
    assert (await refused(connect(engine), "/rerank", **body))["param"] == param
    assert engine.pooled == []


@pytest.mark.parametrize("path", RERANK)
async def test_texts_as_objects(connect: Any, path: str) -> None:
    engine = fake()
    client = connect(engine)
    several = [{"text": "xa"}, {"text": "ab"}]
    answer = await post(client, path, query={"text": "ab"}, documents=several)
    assert [result["document"] for result in answer["results"]] == several[::-1]
    one = await post(client, path, query={"text": "ab", "id": 3}, documents={"text": "a"})
    assert [result["document"] for result in one["results"]] == [{"text": "a"}]
    assert [call.prompt for call in engine.pooled] == [("ab", "xa"), ("ab", "ab"), ("ab", "a")]


@pytest.mark.parametrize(
    ("path", "body", "accepted"),
    [
        ("/rerank", {"query": {"image": "a"}, "documents": ["b"]},
         """query: must be a text, {"text": "..."} or {"content": [parts]}"""),
        ("/rerank", {"query": {"text": "a", "content": []}, "documents": ["b"]},
         """query: must be a text, {"text": "..."} or {"content": [parts]}"""),
        ("/rerank", {"query": 1, "documents": ["b"]}, "query: must be a text, {"),
        ("/rerank", {"query": "a", "documents": {"image": "b"}},
         """documents: must be a list of texts and of {"text": "..."}, or one"""),
        ("/rerank", {"query": "a", "documents": [3]}, "documents[0]: must be a text, {"),
        ("/rerank", {"query": "a", "documents": [{"image": "b"}]},
         "documents[0]: must be a text, or an object with 'text'; media come as"),
        ("/score", {"text_1": {"image": "a"}, "text_2": "b"},
         """text_1: must be a text, {"text": "..."}, a list of those, or {"content": [parts]}"""),
        ("/score", {"text_1": "a", "text_2": [{"image": "a"}]},
         """text_2[0]: must be a text or {"text": "..."}"""),
        ("/score", {"text_1": "a", "text_2": ["b", {"content": [{"type": "text", "text": "c"}]}]},
         """text_2[1]: must be a text or {"text": "..."}; media come as {"content": [parts]} in place"""),
    ],
)  # fmt: skip
async def test_other_objects_are_told_the_forms(
    connect: Any, path: str, body: Any, accepted: str
) -> None:
    assert (await refused(connect(fake()), path, **body))["message"].startswith(accepted)


async def test_the_score_template(connect: Any, tmp_path: Any) -> None:
    """The operator's template is that of pairs; embeddings have none."""
    path = tmp_path / "pair.jinja"
    path.write_text("{{ messages }}")
    for tasks, template in ((MODELS["cross"], "{{ messages }}"), (MODELS["cosine"], None)):
        engine = fake(*tasks)
        client = connect(engine, chat_template=str(path))
        await post(client, "/rerank", query="a", documents=["b"])
        assert engine.pooled[0].chat_template == template


@pytest.mark.parametrize("version", [1, 2])
async def test_the_cohere_clients(live: Any, version: int) -> None:
    server = await live(fake())
    kind = cohere.AsyncClient if version == 1 else cohere.AsyncClientV2
    client = kind(api_key="x", base_url=server.url)
    extra: Any = {"return_documents": True} if version == 1 else {"max_tokens_per_doc": 4096}
    answer = await client.rerank(
        model="fake-model", query="abc", documents=DOCUMENTS, top_n=2, **extra
    )
    assert [(r.index, r.relevance_score) for r in answer.results] == [(1, 1.0), (3, 1.0)]
    assert answer.id is not None
    assert answer.id.startswith("rerank-")
    if version == 1:
        assert answer.results[0].document.text == "abc"


@pytest.mark.keep(4, every_value=False)
@pytest.mark.parametrize(
    ("tasks", "path", "api"),
    [
        (("generate",), "/v1/embeddings", "Embeddings API"),
        (("generate",), "/v2/rerank", "Rerank API"),
        (("embed",), "/v1/chat/completions", "Chat Completions API"),
        (("embed",), "/v1/responses", "Responses API"),
        (("embed",), "/v1/messages", "Messages API"),
        (("embed",), "/inference/v1/generate", "Generate API"),
        (("embed",), "/classify", "Classification API"),
        (("embed",), "/v1/audio/transcriptions", "Transcriptions API"),
        (("embed",), "/v1/audio/translations", "Translations API"),
        (("classify",), "/score", "Score API"),
        (("transcription",), "/pooling", "Pooling API"),
    ],
)
async def test_apis_that_the_model_does_not_have(
    connect: Any, tasks: Any, path: str, api: str
) -> None:
    client = connect(fake(*tasks, class_path="a.b:C", unmet={"classify": ("no head",)}))
    said = await client.post(path, json={})
    assert said.status_code == 400
    message = said.text
    assert f"does not support {api}" in message
    assert "API: C has the tasks" in message, "clients are told of no module"
    assert ", ".join(sorted(tasks)) in message
    assert ("no head" in message) == (path in ("/classify", "/pooling"))
    assert path not in (await client.get("/openapi.json")).json()["paths"]
