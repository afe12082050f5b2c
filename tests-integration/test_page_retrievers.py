"""ColQwen2 and ColPali in the whole engine: vectors of a query's and of a page's tokens, and their late
interaction, equal transformers'."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import numpy as np
import pytest
import torch
from image_checkpoints import data_url, picture
from page_retriever_checkpoints import PAD, save_colpali, save_colqwen2
from posted import post
from servers import RunningServer, serving
from speech_checkpoints import token_ids

from headrace import LLM
from headrace_core.errors import UnsupportedFeature

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_num_seqs": 8, "num_threads": 1, "block_size": 8, "max_model_len": 256,
    "kv_cache_memory_bytes": 16 << 20, "use_tqdm_on_load": False,
}  # fmt: skip
QUERIES = ("the water runs", "over the wheel")
PAGES = (picture(1, 40, 56), picture(2, 90, 30))
NEAR = 1e-4


class Retriever(NamedTuple):
    """A checkpoint, and transformers' vectors of the tokens of :data:`QUERIES` and :data:`PAGES`."""

    folder: Path
    queries: list[torch.Tensor]
    pages: list[torch.Tensor]
    modes: Sequence[dict[str, Any]]
    """Settings under which they are tried."""

    def score(self, query: int, page: int) -> float:
        """MaxSim (Khattab and Zaharia 2020, arXiv:2004.12832)."""
        return float((self.queries[query] @ self.pages[page].T).amax(1).sum())


def embedded(oracle: Any, ids: list[int], **images: Any) -> torch.Tensor:
    tokens = torch.tensor([ids])
    with torch.no_grad():
        out = oracle(input_ids=tokens, attention_mask=torch.ones_like(tokens), **images)
    rows: torch.Tensor = out.embeddings[0]
    return rows


def of_colqwen2(folder: Path) -> Retriever:
    from transformers import Qwen2VLImageProcessor

    oracle = save_colqwen2(folder)
    processor = Qwen2VLImageProcessor.from_pretrained(folder)

    def page(image: Any) -> torch.Tensor:
        made = processor(images=[image], return_tensors="pt")
        grid = made["image_grid_thw"]
        marks = "<|image_pad|>" * (int(grid.prod()) // 4)
        text = f"<|im_start|>user\n<|vision_start|>{marks}<|vision_end|>Describe the image.<|im_end|>{PAD}"
        ids = token_ids(folder, text)
        tokens = torch.tensor([ids])
        kinds = (tokens == oracle.config.vlm_config.image_token_id).int()
        # Transformers leaves the places of an image's tokens out, which the authors' own class has.
        places, _ = oracle.vlm.get_rope_index(tokens, image_grid_thw=grid, mm_token_type_ids=kinds)
        return embedded(
            oracle, ids, pixel_values=made["pixel_values"][None], image_grid_thw=grid,
            position_ids=places,
        )  # fmt: skip

    texts = [f"Query: {query}{PAD * 10}\n" for query in QUERIES]
    queries = [embedded(oracle, token_ids(folder, text)) for text in texts]
    modes = ({}, {"enforce_eager": True}, {"max_num_batched_tokens": 8})
    return Retriever(folder, queries, [page(image) for image in PAGES], modes)


def of_colpali(folder: Path) -> Retriever:
    from transformers import SiglipImageProcessor

    oracle = save_colpali(folder)
    processor = SiglipImageProcessor.from_pretrained(folder)
    texts = [f"<bos>Question: {query}{PAD * 10}\n" for query in QUERIES]
    queries = [embedded(oracle, token_ids(folder, text)) for text in texts]
    ids = token_ids(folder, "<image>" * 16 + "<bos>Describe the image.\n")
    pages = [
        embedded(oracle, ids, **processor(images=[image], return_tensors="pt")) for image in PAGES
    ]
    return Retriever(folder, queries, pages, ({}, {"enforce_eager": True}))


RETRIEVERS: Mapping[str, Callable[[Path], Retriever]] = {
    "colqwen2": of_colqwen2,
    "colpali": of_colpali,
}


@pytest.fixture(scope="module", params=RETRIEVERS)
def retriever(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Retriever:
    return RETRIEVERS[request.param](tmp_path_factory.mktemp(request.param))


def test_scores_in_every_mode(retriever: Retriever) -> None:
    parts = [{"type": "image_pil", "image_pil": page} for page in PAGES]
    for settings in retriever.modes:
        with LLM(str(retriever.folder), **SETTINGS, **settings) as model:
            for query, text in enumerate(QUERIES):
                for page, score in enumerate(model.score(text, {"content": parts})):
                    wanted = retriever.score(query, page)
                    assert score.outputs.score == pytest.approx(wanted, abs=1e-3)


def test_without_images_queries_have_their_form(retriever: Retriever) -> None:
    image = {"content": [{"type": "image_pil", "image_pil": PAGES[0]}]}
    with LLM(str(retriever.folder), **SETTINGS, limit_mm_per_prompt={"image": 0}) as model:
        [score] = model.score(*QUERIES)
        wanted = (retriever.queries[0] @ retriever.queries[1].T).amax(1).sum()
        assert score.outputs.score == pytest.approx(float(wanted), abs=1e-3)
        with pytest.raises(UnsupportedFeature, match="image_pil"):
            model.score(QUERIES[0], image)


@pytest.fixture(scope="module")
def server(retriever: Retriever) -> Iterator[RunningServer]:
    words = (
        "--dtype", "float32", "--max-model-len", "256", "--block-size", "8",
        "--kv-cache-memory-bytes", "16777216",
    )  # fmt: skip
    with serving(str(retriever.folder), *words) as running:
        yield running


def test_over_the_wire(retriever: Retriever, server: RunningServer) -> None:
    parts = [{"type": "image_url", "image_url": {"url": data_url(page)}} for page in PAGES]
    for content, rows in ((QUERIES[0], retriever.queries[0]), (parts[:1], retriever.pages[0])):
        body = {"messages": [{"role": "user", "content": content}], "task": "token_embed"}
        pooled = post(f"{server.url}/pooling", body)
        np.testing.assert_allclose(pooled["data"][0]["data"], rows.numpy(), atol=NEAR)
    body = {"query": QUERIES[0], "documents": {"content": parts}}
    for result in post(f"{server.url}/rerank", body)["results"]:
        wanted = retriever.score(0, result["index"])
        assert result["relevance_score"] == pytest.approx(wanted, abs=1e-3)


def test_a_text_beside_an_image_is_refused(server: RunningServer) -> None:
    parts = [
        {"type": "image_url", "image_url": {"url": data_url(PAGES[0])}},
        {"type": "text", "text": "the water"},
    ]
    body = {"messages": [{"role": "user", "content": parts}], "task": "token_embed"}
    answer = httpx2.post(f"{server.url}/pooling", json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    assert "one text, or one image" in answer.text
