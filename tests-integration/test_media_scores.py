"""Texts and pictures that are scored together: rerankers of two classes, equal to a plain reading through
transformers, offline and by socket."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest
import torch
from image_checkpoints import data_url, picture, save_qwen2_vl, save_qwen3_vl
from posted import post
from safetensors.torch import load_file, save_file
from servers import RunningServer, serving
from speech_checkpoints import token_ids
from test_image_prompts import SETTINGS, Seer, of_qwen
from test_media_pooling import states

from headrace import LLM, PoolingParams
from headrace_core.errors import RequestError

NEAR = 1e-4
MARK = "<|vision_start|><|image_pad|><|vision_end|>"
EXAMPLES = Path(__file__).parents[1] / "examples"
QUERY = "the wheel runs"


class Reranker(NamedTuple):
    """A checkpoint, how it is run, and what transformers makes of a query and a document."""

    folder: Path
    settings: dict[str, Any]
    template: str | None
    words: tuple[str, ...]
    score: Callable[[str, str, list[Any]], float]


def jina(folder: Path) -> Reranker:
    """A Qwen2-VL with two layers in place of its head, as jina-reranker-m0 has them."""
    seer = Seer(folder, save_qwen2_vl(folder), MARK, "<|image_pad|>", of_qwen)
    draw = torch.Generator().manual_seed(3)
    size = 64
    layers = {
        "score.0.weight": torch.randn(size, size, generator=draw) / 4,
        "score.0.bias": torch.randn(size, generator=draw) / 4,
        "score.2.weight": torch.randn(1, size, generator=draw),
        "score.2.bias": torch.tensor([2.0]),
    }
    [file] = folder.glob("*.safetensors")
    tensors = {name: x for name, x in load_file(file).items() if not name.startswith("lm_head")}
    save_file(tensors | layers, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["JinaVLForRanking"]
    (folder / "config.json").write_text(json.dumps(config))

    def score(query: str, document: str, images: list[Any]) -> float:
        prompt = f"**Document**:\n{document}\n**Query**:\n{query}"
        hidden = states(seer, prompt, images, behind=[100])[-1]
        inner = torch.relu(layers["score.0.weight"] @ hidden + layers["score.0.bias"])
        logit = layers["score.2.weight"] @ inner + layers["score.2.bias"]
        return float(torch.sigmoid(logit - 2.65))

    return Reranker(folder, {}, None, (), score)


def qwen3(folder: Path) -> Reranker:
    """A Qwen3-VL that says one of two tokens."""
    seer = Seer(folder, save_qwen3_vl(folder), MARK, "<|image_pad|>", of_qwen)
    template = EXAMPLES / "score_template_qwen3_vl_reranker.jinja"
    [no, yes] = token_ids(folder, "n")[:1] + token_ids(folder, "y")[:1]
    overrides = {
        "architectures": ["Qwen3VLForSequenceClassification"],
        "classifier_from_token": [no, yes],
        "method": "from_2_way_softmax",
    }

    def score(query: str, document: str, images: list[Any]) -> float:
        prompt = (
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
            'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
            "<|im_start|>user\n<Instruct>: Given a search query, retrieve relevant candidates that answer "
            f"the query.<Query>:{query}\n<Document>:{document}<|im_end|>\n<|im_start|>assistant\n"
        )
        logits = seer.oracle.lm_head(states(seer, prompt, images)[-1]).detach()
        return float(torch.softmax(logits[[no, yes]], dim=0)[1])

    settings = {"hf_overrides": overrides}
    words = ("--hf-overrides", json.dumps(overrides), "--chat-template", str(template))
    return Reranker(folder, settings, template.read_text(), words, score)


def qwen3_by_files(folder: Path) -> Reranker:
    """The same as Sentence Transformers stores it: no word about it is needed."""
    made = qwen3(folder)
    [no, yes] = made.settings["hf_overrides"]["classifier_from_token"]
    kind = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
    files: dict[str, Any] = {
        "config_sentence_transformers.json": {"model_type": "CrossEncoder"},
        "modules.json": [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "name": "1", "path": "1_LogitScore", "type": kind},
        ],
        "1_LogitScore/config.json": {"true_token_id": yes, "false_token_id": no},
        "sentence_bert_config.json": {"modality_config": {"message": {"format": "structured"}}},
        "tokenizer_config.json": {"chat_template": made.template, "eos_token": "<|endoftext|>"},
    }
    (folder / "1_LogitScore").mkdir()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return Reranker(folder, {}, None, (), made.score)


@pytest.fixture(scope="module", params=[jina, qwen3, qwen3_by_files])
def reranker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reranker:
    made: Reranker = request.param(tmp_path_factory.mktemp(request.param.__name__))
    return made


PICTURES = [picture(1), picture(2, 64, 64)]


@pytest.fixture(scope="module")
def expected(reranker: Reranker) -> list[float]:
    """Of both pictures, and of a text."""
    return [
        *(reranker.score(QUERY, MARK, [image]) for image in PICTURES),
        reranker.score(QUERY, "the long race", []),
    ]


def pil(*images: Any) -> list[Any]:
    return [{"type": "image_pil", "image_pil": image} for image in images]


def urls(*images: Any) -> list[Any]:
    return [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in images]


TEXT = {"type": "text", "text": "the long race"}


@pytest.fixture(scope="module")
def model(reranker: Reranker) -> Iterator[LLM]:
    settings = {**SETTINGS, "max_model_len": 512, "max_num_batched_tokens": 48}
    with LLM(str(reranker.folder), runner="pooling", **settings, **reranker.settings) as made:
        yield made


@pytest.fixture
def scores(reranker: Reranker, model: LLM) -> Callable[[Any, Any], list[float]]:
    """Scores of what is given, offline."""

    def made(first: Any, second: Any) -> list[float]:
        outputs = model.score(first, second, chat_template=reranker.template)
        return [output.outputs.score for output in outputs]

    return made


Scores = Callable[[Any, Any], list[float]]


def test_each_part_is_one_document(scores: Scores, expected: list[float]) -> None:
    documents = {"content": [*pil(*PICTURES), TEXT]}
    for _ in range(2):  # the second time from caches
        assert scores(QUERY, documents) == pytest.approx(expected, abs=NEAR)
    assert len(set(expected)) == 3
    pairs = [{"content": pil(image)} for image in PICTURES]
    assert scores(QUERY, pairs) == pytest.approx(expected[:2], abs=NEAR)


def test_pictures_on_both_sides(reranker: Reranker, scores: Scores) -> None:
    query, document = PICTURES
    given = [query, document]
    if "JinaVL" in (reranker.folder / "config.json").read_text():
        given.reverse()  # its prompt begins with the document
    wanted = reranker.score(MARK, MARK, given)
    found = scores({"content": pil(query)}, {"content": pil(document)})
    assert found == pytest.approx([wanted], abs=NEAR)


def test_the_token_behind_a_pair_stays_when_texts_are_cut(reranker: Reranker, model: LLM) -> None:
    if "JinaVL" not in (reranker.folder / "config.json").read_text():
        pytest.skip("nothing is behind its prompts")
    for side in ("left", "right"):
        params = PoolingParams(truncate_prompt_tokens=6, truncation_side=side)
        [output] = model.score(QUERY, "the long race over the water", pooling_params=params)
        assert len(output.prompt_token_ids) == 6
        assert output.prompt_token_ids[-1] == 100


def test_what_is_refused_by_name(scores: Scores) -> None:
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}
    with pytest.raises(RequestError, match=r"content\[0\]\.image_url\.url"):
        scores(QUERY, {"content": [broken]})
    with pytest.raises(RequestError, match="content"):
        scores(QUERY, {"prompt": MARK, "multi_modal_data": {"image": PICTURES[0]}})


@pytest.fixture(scope="module")
def server(reranker: Reranker) -> Iterator[RunningServer]:
    words = (
        "--dtype", "float32", "--max-model-len", "512", "--block-size", "8",
        "--kv-cache-memory-bytes", "16777216", "--runner", "pooling",
    )  # fmt: skip
    with serving(str(reranker.folder), *words, *reranker.words) as running:
        yield running


def test_scores_over_the_wire(server: RunningServer, expected: list[float]) -> None:
    documents = {"content": [*urls(*PICTURES), TEXT]}
    for names in (("text_1", "text_2"), ("queries", "documents")):
        answer = post(f"{server.url}/score", dict(zip(names, (QUERY, documents), strict=True)))
        found = [item["score"] for item in answer["data"]]
        assert found == pytest.approx(expected, abs=NEAR)
        assert [item["index"] for item in answer["data"]] == [0, 1, 2]


def test_reranking_over_the_wire(server: RunningServer, expected: list[float]) -> None:
    parts = [*urls(*PICTURES), TEXT]
    answer = post(f"{server.url}/rerank", {"query": QUERY, "documents": {"content": parts}})
    order = sorted(range(3), key=lambda index: -expected[index])
    assert [result["index"] for result in answer["results"]] == order
    found = [result["relevance_score"] for result in answer["results"]]
    assert found == pytest.approx([expected[index] for index in order], abs=NEAR)
    shown = {result["index"]: result["document"] for result in answer["results"]}
    assert shown[0] == {"multi_modal": {"content": [parts[0]]}}
    assert shown[2] == {"text": TEXT["text"]}


def test_what_cannot_be_read_is_a_400(reranker: Reranker, server: RunningServer) -> None:
    body = {
        "query": QUERY,
        "documents": {"content": [TEXT, {"type": "image_url", "image_url": {"url": "x"}}]},
    }
    answer = httpx2.post(f"{server.url}/rerank", json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == "documents.content[1].image_url"
    assert error["message"].startswith(error["param"])
