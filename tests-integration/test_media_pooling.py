"""Decoders that see, run as embedders: equal to transformers' last hidden states, offline and by socket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from image_checkpoints import (
    data_url,
    picture,
    save_gemma3,
    save_llava,
    save_qwen2_vl,
    save_qwen3_vl,
)
from posted import post
from servers import RunningServer, serving
from speech_checkpoints import token_ids
from test_image_prompts import (
    PROMPTS,
    SETTINGS,
    Seer,
    asked,
    of_gemma3,
    of_llava,
    of_qwen,
    pictures,
)

from headrace import LLM
from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_testing.sampling import todays

POOLS: dict[str, Any] = {**SETTINGS, "runner": "pooling"}
MODES: dict[str, dict[str, Any]] = {
    "captured": {},
    "eager": {"enforce_eager": True},
    "chunked": {"max_num_batched_tokens": 8},
    "no prefix cache": {"enable_prefix_caching": False},
    "process": {"engine_process": True},
}
NEAR = 1e-4


@pytest.fixture(scope="module", params=todays(["llava", "gemma3", "qwen2_vl", "qwen3_vl"], days=2))
def seer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seer:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "llava":
        return Seer(folder, save_llava(folder), "<image>", "<image>", of_llava)
    if request.param == "gemma3":
        mark = "<start_of_image>"
        return Seer(folder, save_gemma3(folder), mark, mark, of_gemma3, cache_groups=2)
    mark = "<|vision_start|><|image_pad|><|vision_end|>"
    save = save_qwen3_vl if request.param == "qwen3_vl" else save_qwen2_vl
    return Seer(folder, save(folder), mark, "<|image_pad|>", of_qwen)


def states(seer: Seer, prompt: str, images: list[Any], behind: Sequence[int] = ()) -> torch.Tensor:
    """Transformers' last hidden states [tokens, H], behind the last norm.

    Args:
        behind: tokens behind the prompt's.
    """
    ids = token_ids(seer.folder, prompt)
    [pad] = token_ids(seer.folder, seer.token)
    given: dict[str, Any] = {}
    if images:
        given = seer.inputs(seer.folder, images)
        items = iter(given.pop("items"))
        ids = [i for token in ids for i in (next(items) if token == pad else [token])]
    tokens = torch.tensor([[*ids, *behind]])
    if seer.token == "<start_of_image>":
        [soft] = token_ids(seer.folder, "<image_soft_token>")
        given["token_type_ids"] = (tokens == soft).int()
    if seer.token == "<|image_pad|>":
        given["mm_token_type_ids"] = (tokens == pad).int()
    with torch.no_grad():
        out = seer.oracle.model(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False, **given
        )
    hidden: torch.Tensor = out.last_hidden_state[0]
    return hidden


def unit(rows: torch.Tensor) -> np.ndarray[Any, Any]:
    return torch.nn.functional.normalize(rows.float(), dim=-1).numpy()


@pytest.fixture(scope="module")
def expected(seer: Seer) -> list[np.ndarray[Any, Any]]:
    """Each prompt's rows, of length 1."""
    return [
        unit(states(seer, text.replace("MARK", seer.mark), pictures(names)))
        for text, names in PROMPTS.items()
    ]


@pytest.mark.keep(6, every_value=False)
@pytest.mark.parametrize("mode", MODES)
def test_embeddings_equal_transformers_in_every_mode(
    seer: Seer, expected: list[Any], mode: str
) -> None:
    prompts = [asked(seer, *pair) for pair in PROMPTS.items()]
    with LLM(str(seer.folder), **POOLS, **MODES[mode]) as model:
        first = model.embed(prompts)
        again = model.embed(prompts)  # from caches
        alone = [model.embed(prompt)[0] for prompt in prompts]
    for outputs in (first, again, alone):
        for output, rows in zip(outputs, expected, strict=True):
            np.testing.assert_allclose(output.outputs.embedding, rows[-1], atol=NEAR)
            assert len(output.prompt_token_ids) == len(rows)
    cached = sum(output.num_cached_tokens for output in again)
    assert bool(cached) == (mode != "no prefix cache")


@pytest.fixture(scope="module")
def model(seer: Seer) -> Iterator[LLM]:
    with LLM(str(seer.folder), **POOLS) as made:
        yield made


def test_a_row_for_each_token_of_text_and_image(
    seer: Seer, model: LLM, expected: list[Any]
) -> None:
    prompts = [asked(seer, *pair) for pair in PROMPTS.items()]
    for output, rows in zip(model.encode(prompts, pooling_task="token_embed"), expected):
        np.testing.assert_allclose(output.outputs.data.numpy(), rows, atol=NEAR)


def test_the_cosine_of_a_text_and_a_picture(seer: Seer, model: LLM) -> None:
    picture_prompt = asked(seer, "MARK", "c")
    [score] = model.score("in the race", [picture_prompt])
    first, second = model.embed(["in the race", picture_prompt])
    wanted = np.dot(first.outputs.embedding, second.outputs.embedding)
    assert score.outputs.score == pytest.approx(wanted, abs=1e-6)


def test_objects_with_content_are_scored_as_messages(seer: Seer, model: LLM) -> None:
    images = pictures("ac")
    parts = [{"type": "image_pil", "image_pil": image} for image in images]
    scores = [out.outputs.score for out in model.score("in the race", {"content": parts})]
    text = unit(states(seer, "in the race", []))[-1]
    for score, image in zip(scores, images, strict=True):
        rows = unit(states(seer, f"user: {seer.mark}assistant:", [image]))
        assert score == pytest.approx(float(text @ rows[-1]), abs=NEAR)


def test_what_is_refused_by_name(seer: Seer, model: LLM) -> None:
    prompt = asked(seer, "the water MARK runs", "a")
    with pytest.raises(RequestError, match="truncate_prompt_tokens"):
        model.embed(prompt, truncate_prompt_tokens=4)
    with pytest.raises(RequestError, match="there must be one for each"):
        model.embed({**prompt, "prompt": seer.mark * 2})


def test_without_images_no_tower_is_loaded(seer: Seer, expected: list[Any]) -> None:
    limits = {"image": 0, "video": 0}
    with LLM(str(seer.folder), **POOLS, limit_mm_per_prompt=limits) as model:
        [output] = model.embed("in the race")
        index = list(PROMPTS).index("in the race")
        np.testing.assert_allclose(output.outputs.embedding, expected[index][-1], atol=NEAR)
        with pytest.raises(UnsupportedFeature, match="text only"):
            model.embed(asked(seer, "MARK", "a"))


@pytest.fixture(scope="module")
def server(seer: Seer) -> Iterator[RunningServer]:
    words = (
        "--dtype", "float32", "--max-model-len", "256", "--block-size", "8",
        "--kv-cache-memory-bytes", "16777216", "--runner", "pooling", "--convert", "embed",
    )  # fmt: skip
    with serving(str(seer.folder), *words) as running:
        yield running


def body(*pictures_: Any) -> dict[str, Any]:
    """A chat of text and pictures."""
    content: list[Any] = [{"type": "text", "text": "the water "}]
    content += [{"type": "image_url", "image_url": {"url": data_url(one)}} for one in pictures_]
    return {"messages": [{"role": "user", "content": content}]}


def test_chats_with_images_over_the_wire(seer: Seer, server: RunningServer) -> None:
    images = pictures("ab")
    prompt = f"user: the water {seer.mark * 2}assistant:"
    rows = unit(states(seer, prompt, images))
    answer = post(f"{server.url}/v1/embeddings", body(*images))
    np.testing.assert_allclose(answer["data"][0]["embedding"], rows[-1], atol=NEAR)
    assert answer["usage"]["prompt_tokens"] == len(rows)
    pooled = post(f"{server.url}/pooling", {**body(*images), "task": "token_embed"})
    np.testing.assert_allclose(pooled["data"][0]["data"], rows, atol=NEAR)


def test_options_of_the_processor_come_with_a_chat(seer: Seer, server: RunningServer) -> None:
    if seer.token != "<|image_pad|>":
        pytest.skip("its images have one size")
    options = {"max_pixels": 16 * 16 * 6}
    image = picture(5, 96, 96)
    few, many = (
        post(f"{server.url}/v1/embeddings", {**body(image), "mm_processor_kwargs": given})
        for given in (options, {})
    )
    assert few["usage"]["prompt_tokens"] < many["usage"]["prompt_tokens"]
