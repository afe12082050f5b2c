"""Embeddings, classes, scores and ranks over HTTP: real clients, real servers, tiny encoders."""

from __future__ import annotations

import base64
import json
import random
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import cohere
import numpy as np
import openai
import pytest
import torch
from malformed import Client, bodies
from pooling_checkpoints import bert, text
from servers import serving

from headrace_testing.waiting import wait_until

TEXTS = [text(1 + seed % 20, seed) for seed in range(24)]
QUERY = text(5, 500)
DOCUMENTS = [text(3 + seed % 9, 600 + seed) for seed in range(12)]
HIDDEN, MAX_LENGTH = 32, 128
CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
DTYPES = {
    "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2,
}  # fmt: skip
NUM_BODIES = 1500


class Served:
    """A running server, its oracle and its tokenizer."""

    def __init__(self, server, model, folder):
        from transformers import AutoTokenizer

        self.server, self.model = server, model
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.url = server.url

    def ask(self, path, **body):
        """Status, headers, body."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.headers, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.headers, error.read()

    def post(self, path, **body):
        status, _, said = self.ask(path, **body)
        assert status == 200, said
        return json.loads(said)

    def refused(self, path, status=400, **body):
        got, _, said = self.ask(path, **body)
        assert got == status, said
        return json.loads(said)["error"]

    def embed(self, texts):
        """Normalised means [len(texts), HIDDEN], each text by itself."""
        with torch.no_grad():
            means = [
                self.model(**self.tokenizer(one, return_tensors="pt", **CUT)).last_hidden_state[0]
                for one in texts
            ]
        return torch.nn.functional.normalize(torch.stack([m.mean(0) for m in means])).numpy()

    def scores(self, pairs):
        with torch.no_grad():
            logits = [
                self.model(**self.tokenizer(*pair, return_tensors="pt", **CUT)).logits[0, 0]
                for pair in pairs
            ]
        return torch.stack(logits).sigmoid().numpy()


def _add(path, **fields):
    """Put fields into a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


CUT = {"truncation": True, "max_length": MAX_LENGTH, "return_token_type_ids": True}


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("embedder")
    model = bert(folder)
    _add(folder / "config.json", is_matryoshka=True)
    _add(folder / "tokenizer_config.json", chat_template=CHAT_TEMPLATE)
    words = (str(folder), "--dtype", "float32", "--served-model-name", "emb")
    with serving(*words) as server:
        yield Served(server, model, folder)
        wait_until(lambda: server.metric("num_requests_running") == 0)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reranker")
    model = bert(folder, labels=1)
    words = (str(folder), "--dtype", "float32", "--served-model-name", "rank")
    with serving(*words) as server:
        yield Served(server, model, folder)


def test_openai(embedder):
    client = openai.OpenAI(base_url=embedder.server.api, api_key="none")
    packed = client.embeddings.create(model="emb", input=TEXTS)
    plain = client.embeddings.create(model="emb", input=TEXTS, encoding_format="float")
    assert [item.index for item in plain.data] == list(range(len(TEXTS)))
    got = np.array([item.embedding for item in plain.data])
    assert np.array_equal(got, np.array([item.embedding for item in packed.data]))
    np.testing.assert_allclose(got, embedder.embed(TEXTS), atol=1e-4)
    short = client.embeddings.create(model="emb", input=TEXTS[0], dimensions=8)
    cut = got[0, :8] / np.linalg.norm(got[0, :8])
    np.testing.assert_allclose(short.data[0].embedding, cut, atol=1e-5)
    ids = [len(embedder.tokenizer(one).input_ids) for one in TEXTS]
    assert plain.usage.prompt_tokens == plain.usage.total_tokens == sum(ids)
    with pytest.raises(openai.BadRequestError, match="at most 32"):
        client.embeddings.create(model="emb", input="x", dimensions=HIDDEN + 1)
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="other", input="x")


@pytest.mark.parametrize("endianness", ["native", "little", "big"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_wire(embedder, dtype, endianness):
    exact = torch.tensor(
        [item["embedding"] for item in embedder.post("/v1/embeddings", input=TEXTS[:3])["data"]]
    )
    wire = {"embed_dtype": dtype, "endianness": endianness}
    size = DTYPES[dtype].itemsize

    def decoded(data):
        data = np.frombuffer(data, np.uint8).reshape(-1, size)
        data = data[:, ::-1] if endianness == "big" else data
        return torch.from_numpy(data.copy()).view(DTYPES[dtype]).float().flatten()

    packed = embedder.post("/v1/embeddings", input=TEXTS[:3], encoding_format="base64", **wire)
    for item, row in zip(packed["data"], exact):
        data = base64.b64decode(item["embedding"])
        assert torch.equal(decoded(data), row.to(DTYPES[dtype]).float())
    _, headers, data = embedder.ask(
        "/v1/embeddings", input=TEXTS[:3], encoding_format="bytes", **wire
    )
    for item, row in zip(json.loads(headers["metadata"])["data"], exact):
        part = decoded(data[item["start"] : item["end"]]).reshape(item["shape"])
        assert torch.equal(part, row.to(DTYPES[dtype]).float())
    _, headers, only = embedder.ask(
        "/v1/embeddings", input=TEXTS[:3], encoding_format="bytes_only", **wire
    )
    assert (only, headers["metadata"]) == (data, None)


def test_token_ids(embedder, reranker):
    def ids(path, **body):
        return embedder.post(path, return_token_ids=True, **body)["data"][0]["prompt_token_ids"]

    given, chat = TEXTS[7], [{"role": "user", "content": TEXTS[8]}]
    expected = embedder.tokenizer(given).input_ids
    assert ids("/v1/embeddings", input=given) == expected
    assert ids("/pooling", input=given) == expected
    plain = embedder.tokenizer(given, add_special_tokens=False).input_ids
    assert ids("/v1/embeddings", input=given, add_special_tokens=False) == plain
    assert ids("/v1/embeddings", input=plain) == plain
    assert len(ids("/v1/embeddings", input=given, truncate_prompt_tokens=3)) == 3
    rendered = embedder.tokenizer.apply_chat_template(chat, tokenize=False)
    expected = embedder.tokenizer(rendered, add_special_tokens=False).input_ids
    assert ids("/v1/embeddings", messages=chat) == expected
    pair = reranker.post("/score", text_1=given, text_2=TEXTS[9], return_token_ids=True)
    expected = reranker.tokenizer(given, TEXTS[9]).input_ids
    assert pair["data"][0]["prompt_token_ids"] == expected


def test_pooling(embedder):
    answer = embedder.post("/pooling", input=TEXTS[:4])
    for item, given in zip(answer["data"], TEXTS):
        shape = np.array(item["data"]).shape
        assert shape == (len(embedder.tokenizer(given).input_ids), HIDDEN)
    whole = embedder.post("/pooling", input=TEXTS[:4], task="embed")
    got = np.array([item["data"] for item in whole["data"]])
    np.testing.assert_allclose(got, embedder.embed(TEXTS[:4]), atol=1e-4)


def test_score(embedder, reranker):
    answer = reranker.post("/score", text_1=QUERY, text_2=DOCUMENTS)
    got = [item["score"] for item in answer["data"]]
    np.testing.assert_allclose(got, reranker.scores([(QUERY, d) for d in DOCUMENTS]), atol=1e-4)
    each = reranker.post("/v1/score", queries=DOCUMENTS[:3], documents=DOCUMENTS[3:6])
    expected = reranker.scores(list(zip(DOCUMENTS[:3], DOCUMENTS[3:6])))
    np.testing.assert_allclose([item["score"] for item in each["data"]], expected, atol=1e-4)
    cosine = embedder.post("/score", text_1=QUERY, text_2=DOCUMENTS)
    (query, *documents) = embedder.embed([QUERY, *DOCUMENTS])
    got = [item["score"] for item in cosine["data"]]
    np.testing.assert_allclose(got, np.array(documents) @ query, atol=1e-4)


def test_classify(reranker):
    answer = reranker.post("/classify", input=TEXTS[:4])
    with torch.no_grad():
        expected = [
            reranker.model(**reranker.tokenizer(t, return_tensors="pt")).logits[0].sigmoid()
            for t in TEXTS[:4]
        ]
    got = [item["probs"] for item in answer["data"]]
    np.testing.assert_allclose(got, torch.stack(expected).numpy(), atol=1e-4)
    assert {item["num_classes"] for item in answer["data"]} == {1}
    assert {item["label"] for item in answer["data"]} == {"LABEL_0"}


@pytest.mark.parametrize("client", [cohere.Client, cohere.ClientV2])
def test_cohere(reranker, client):
    scores = reranker.scores([(QUERY, document) for document in DOCUMENTS])
    answer = client(api_key="none", base_url=reranker.url).rerank(
        model="rank", query=QUERY, documents=DOCUMENTS, top_n=5
    )
    assert [result.index for result in answer.results] == np.argsort(-scores)[:5].tolist()
    got = [result.relevance_score for result in answer.results]
    np.testing.assert_allclose(got, np.sort(scores)[::-1][:5], atol=1e-4)
    with pytest.raises(cohere.NotFoundError):
        client(api_key="none", base_url=reranker.url).rerank(
            model="other", query=QUERY, documents=DOCUMENTS
        )


def test_cohere_embeds(embedder):
    """Cohere's client: vectors and their signs equal transformers', long texts are cut at either end as
    transformers cuts them, and what cannot be done is the client's BadRequestError."""
    client = cohere.ClientV2(api_key="none", base_url=embedder.url)
    asked = {"model": "emb", "input_type": "search_document"}
    kinds = ["float", "base64", "binary", "ubinary"]
    answer = client.embed(texts=TEXTS[:4], embedding_types=kinds, **asked)
    expected = embedder.embed(TEXTS[:4])
    np.testing.assert_allclose(np.array(answer.embeddings.float_), expected, atol=1e-4)
    packed = [np.frombuffer(base64.b64decode(one), "<f4") for one in answer.embeddings.base64]
    assert np.array_equal(np.array(packed), np.array(answer.embeddings.float_, np.float32))
    bits = np.packbits(np.array(answer.embeddings.float_) > 0, axis=1)
    assert np.array_equal(bits, answer.embeddings.ubinary)
    assert np.array_equal(bits.astype(int) - 128, answer.embeddings.binary)
    ids = [len(embedder.tokenizer(one).input_ids) for one in TEXTS[:4]]
    assert answer.meta.billed_units.input_tokens == sum(ids)
    long = text(300, 9)
    (cut,) = client.embed(texts=[long], **asked).embeddings.float_
    np.testing.assert_allclose(cut, embedder.embed([long])[0], atol=1e-4)
    for side, name in (("right", "END"), ("left", "START")):
        embedder.tokenizer.truncation_side = side
        given = embedder.tokenizer(long, truncation=True, max_length=9).input_ids
        found = client.embed(texts=[long], truncate=name, max_tokens=9, **asked)
        same = embedder.post("/v1/embeddings", input=given)["data"][0]["embedding"]
        np.testing.assert_allclose(found.embeddings.float_[0], same, atol=1e-5)
    embedder.tokenizer.truncation_side = "right"
    short = client.embed(texts=TEXTS[:1], output_dimension=8, **asked).embeddings.float_[0]
    np.testing.assert_allclose(short, expected[0, :8] / np.linalg.norm(expected[0, :8]), atol=1e-4)
    with pytest.raises(cohere.BadRequestError) as caught:
        client.embed(texts=[long], truncate="NONE", **asked)
    assert "maximum context length" in caught.value.body["message"]
    assert "truncate 'START' or 'END'" in caught.value.body["message"]
    assert "truncate_prompt_tokens" not in caught.value.body["message"]
    with pytest.raises(cohere.BadRequestError, match="int8"):
        client.embed(texts=["a"], embedding_types=["int8"], **asked)
    with pytest.raises(cohere.NotFoundError):
        client.embed(texts=["a"], **{**asked, "model": "other"})


def test_jina(embedder, reranker):
    body = {
        "model": "rank", "query": QUERY, "top_n": 3, "return_documents": True,
        "documents": [{"text": document} for document in DOCUMENTS],
    }  # fmt: skip
    answer = reranker.post("/v1/rerank", **body)
    scores = reranker.scores([(QUERY, document) for document in DOCUMENTS])
    best = np.argsort(-scores)[:3].tolist()
    assert [result["index"] for result in answer["results"]] == best
    assert [r["document"]["text"] for r in answer["results"]] == [DOCUMENTS[i] for i in best]
    pairs = [reranker.tokenizer(QUERY, document).input_ids for document in DOCUMENTS]
    assert answer["usage"]["total_tokens"] == sum(map(len, pairs))
    by_cosine = embedder.post("/rerank", **{**body, "model": "emb"})
    (query, *documents) = embedder.embed([QUERY, *DOCUMENTS])
    order = np.argsort(-(np.array(documents) @ query))[:3].tolist()
    assert [result["index"] for result in by_cosine["results"]] == order


def test_32_parallel_clients(embedder, reranker):
    alone = [item["embedding"] for item in embedder.post("/v1/embeddings", input=TEXTS)["data"]]
    score = reranker.post("/score", text_1=QUERY, text_2=DOCUMENTS)["data"]

    def ask(number):
        rng = random.Random(number)
        for _ in range(3):
            chosen = rng.sample(range(len(TEXTS)), 5)
            answer = embedder.post("/v1/embeddings", input=[TEXTS[i] for i in chosen])
            got = [item["embedding"] for item in answer["data"]]
            np.testing.assert_allclose(got, [alone[i] for i in chosen], atol=1e-5)
            chosen = rng.sample(range(len(DOCUMENTS)), 3)
            documents = [DOCUMENTS[i] for i in chosen]
            answer = reranker.post("/score", text_1=QUERY, text_2=documents)
            got = [item["score"] for item in answer["data"]]
            np.testing.assert_allclose(got, [score[i]["score"] for i in chosen], atol=1e-5)

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(ask, range(32)))


def test_a_thousand_texts(embedder):
    texts = [TEXTS[i % len(TEXTS)] for i in range(1000)]
    answer = embedder.post("/v1/embeddings", input=texts)
    alone = embedder.embed(TEXTS)
    got = np.array([item["embedding"] for item in answer["data"]])
    np.testing.assert_allclose(got, alone[np.arange(1000) % len(TEXTS)], atol=1e-4)


def test_refusals(embedder, reranker):
    long = " ".join(["river"] * 200)
    chat = [{"role": "user", "content": "x"}]
    for path, body, param in (
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": ["a", [1]]}, "input[1]"),
        ("/v1/embeddings", {"input": long}, "input"),
        ("/v1/embeddings", {"input": [300]}, "input"),
        ("/v1/embeddings", {"input": "x", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": "x", "dimensions": 33}, "dimensions"),
        ("/v1/embeddings", {"input": "x", "priority": 1}, "priority"),
        ("/v1/embeddings", {"input": "x", "sparse": True}, "sparse"),
        ("/v1/embeddings", {"input": "x", "truncate_prompt_tokens": 129}, "truncate_prompt_tokens"),
        ("/v1/embeddings",
         {"messages": chat, "add_generation_prompt": True, "continue_final_message": True},
         "continue_final_message"),
        ("/pooling", {"input": "x", "task": "classify"}, "task"),
        ("/pooling", {"input": "x", "task": "embed", "use_activation": True}, "use_activation"),
        ("/pooling", {"data": 1}, "data"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/rerank", {"query": "x", "documents": ["a"], "top_n": -1}, "top_n"),
        ("/score", {"text_1": "a", "text_2": "b", "prompt_name": ["q"]}, "prompt_name"),
        ("/rerank", {"query": "x", "documents": ["a"], "prompt_name": {}}, "prompt_name"),
        ("/rerank", {"query": "x", "documents": ["a"], "dimensions": 8.5}, "dimensions"),
    ):  # fmt: skip
        assert embedder.refused(path, **body)["param"] == param, (path, body)
    for path in ("/v1/embeddings", "/classify"):
        error = reranker.refused(path, messages=chat)
        assert ("Embeddings API" if path == "/v1/embeddings" else "template") in error["message"]
    for path, api in (
        ("/v1/completions", "Completions"), ("/v1/chat/completions", "Chat Completions"),
        ("/classify", "Classification"), ("/v1/audio/transcriptions", "Transcriptions"),
    ):  # fmt: skip
        message = embedder.refused(path, input="x")["message"]
        assert f"does not support {api} API" in message
        assert "BertModel" in message
        assert "embed, token_embed" in message
    for path, body in (
        ("/rerank", {"query": "a", "documents": ["b"]}),
        ("/pooling", {"input": "a"}),
    ):
        assert embedder.refused(path, 404, model="other", **body)["type"] == "NotFoundError"
    wrong = urllib.request.Request(embedder.url + "/v1/embeddings", b'{"input": "x"}')
    with pytest.raises(urllib.error.HTTPError, match="400"):
        urllib.request.urlopen(wrong, timeout=30)


def test_models_say_their_tasks(embedder, reranker):
    def tasks(served):
        with urllib.request.urlopen(served.url + "/v1/models", timeout=30) as answer:
            return json.load(answer)["data"][0]["supported_tasks"]

    assert tasks(embedder) == ["embed", "token_embed"]
    assert tasks(reranker) == ["classify", "score", "token_classify"]
    log = "".join(embedder.server.log)
    line = next(line for line in log.splitlines() if "the model, as served here" in line)
    said_of_it = line.partition("as served here: ")[2].split("; ")
    facts = ("architecture ", "supported_tasks ", "routes ", "pooling ")
    found = {fact: [each for each in said_of_it if each.startswith(fact)] for fact in facts}
    assert [len(each) for each in found.values()] == [1] * len(facts), found
    [architecture], [said], [routes], [pooler] = found.values()
    assert architecture.endswith(" BertModel")
    assert said.endswith(" embed, token_embed")
    assert "/v1/embeddings" in routes
    assert "/classify" not in routes
    assert "pooling_type = MEAN" in pooler


@pytest.mark.req("F5")
@pytest.mark.req("SEC-11")
@pytest.mark.parametrize("name", ["embedder", "reranker"])
def test_wrong_bodies(request, name):
    served = request.getfixturevalue(name)
    with urllib.request.urlopen(served.url + "/openapi.json", timeout=30) as answer:
        every = list(bodies(json.load(answer)))
    client, problems = Client(served.url), []
    for path, body in random.Random(1).sample(every, NUM_BODIES):
        answer = client.post(path, body)
        problem = answer.problem(body) or ("no answer" if answer.status == 0 else "")
        if problem:
            problems.append(f"{path}: {problem}; sent {body[:300]!r}")
    client.close()
    assert served.server.status("/health") == 200
    assert not problems, f"{len(problems)}:\n" + "\n".join(problems[:20])
