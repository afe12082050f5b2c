"""Over HTTP: sparse vectors, and a decoder that scores by a template and reuses beginnings."""

from __future__ import annotations

import json
import urllib.request

import numpy as np
import pytest
import torch
from pooling_checkpoints import bert, qwen3, states, text, write_tokenizer
from servers import serving

QUERY = text(40, 1)
DOCUMENTS = [text(3 + seed, 10 + seed) for seed in range(5)]
TEMPLATE = "{{ messages[0].content }} a {{ messages[1].content }} the"


def ask(url, path, **body):
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_sparse_vectors(tmp_path):
    import transformers

    config = transformers.BertConfig(
        vocab_size=write_tokenizer(tmp_path, marked=True), hidden_size=32, intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=128,
        initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(3)
    model = transformers.BertForMaskedLM(config).eval()
    model.save_pretrained(tmp_path)
    overrides = json.dumps({"architectures": ["BertSpladeSparseEmbeddingModel"]})
    words = (str(tmp_path), "--dtype", "float32", "--hf-overrides", overrides)
    with serving(*words) as server:
        given = {"input": QUERY, "return_token_ids": True}
        (item,) = ask(server.url, "/v1/embeddings", **given, sparse=True)["data"]
        (full,) = ask(server.url, "/v1/embeddings", **given)["data"]
    with torch.no_grad():
        logits = model(torch.tensor([item["prompt_token_ids"]])).logits[0]
    expected = torch.log1p(logits.relu()).amax(0).numpy()
    np.testing.assert_allclose(full["embedding"], expected, atol=1e-4)
    sparse = item["embedding"]
    assert 0 < len(sparse["indices"]) < len(expected)
    assert sparse["indices"] == np.nonzero(full["embedding"])[0].tolist()
    assert sparse["values"] == [full["embedding"][i] for i in sparse["indices"]]


def test_a_decoder_reranks(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    model = qwen3(folder)
    (folder / "modules.json").unlink()
    template = tmp_path / "pair.jinja"
    template.write_text(TEMPLATE)
    overrides = json.dumps(
        {"architectures": ["Qwen3ForSequenceClassification"], "is_original_qwen3_reranker": True,
         "classifier_from_token": ["fox", "dog"]}
    )  # fmt: skip
    words = (
        str(folder), "--dtype", "float32", "--hf-overrides", overrides, "--chat-template",
        str(template), "--enable-prompt-tokens-details",
    )  # fmt: skip
    body = {"query": QUERY, "documents": DOCUMENTS, "return_token_ids": True}
    with serving(*words) as server:
        answer = ask(server.url, "/rerank", **body)
        pair = {"text_1": QUERY, "text_2": DOCUMENTS[0]}
        usage = ask(server.url, "/score", **pair)["usage"]
        tokens = ask(server.url, "/tokenize", prompt=_rendered(DOCUMENTS[0]))["tokens"]
        rows = [ask(server.url, "/tokenize", prompt=word)["tokens"] for word in ("fox", "dog")]
    (no,), (yes,) = rows
    head = model.embed_tokens.weight.detach()
    scores = {}
    for result in answer["results"]:
        last = states(model, result["prompt_token_ids"])[-1]
        logits = torch.stack([last @ head[no], last @ head[yes]])
        scores[result["index"]] = float(logits.softmax(0)[1])
        assert result["relevance_score"] == pytest.approx(scores[result["index"]], abs=1e-4)
    assert [r["index"] for r in answer["results"]] == sorted(scores, key=lambda i: -scores[i])
    (first,) = [r for r in answer["results"] if r["index"] == 0]
    assert first["prompt_token_ids"] == tokens
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 32


def _rendered(document):
    return f"{QUERY} a {document} the"


def test_several_http_processes(tmp_path):
    model = bert(tmp_path)
    words = (str(tmp_path), "--dtype", "float32", "--api-server-count", "2")
    with serving(*words) as server:
        for _ in range(6):
            answer = ask(server.url, "/v1/embeddings", input=DOCUMENTS, return_token_ids=True)
            for item in answer["data"]:
                mean = states(model, item["prompt_token_ids"]).mean(0)
                expected = torch.nn.functional.normalize(mean, dim=0)
                np.testing.assert_allclose(item["embedding"], expected.numpy(), atol=1e-4)
            assert ask(server.url, "/score", text_1=QUERY, text_2=QUERY)["data"][0]["score"] > 0.999
        assert server.metric("pooling_requests_total") == 6 * (len(DOCUMENTS) + 1)
