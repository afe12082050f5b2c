"""CLIP and SigLIP: texts and images in one space, by the engine; equal to transformers' features."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import numpy as np
import pytest
import torch
from image_checkpoints import data_url, picture
from posted import post
from servers import RunningServer, serving
from shared_space_checkpoints import PAD, save_clip, save_siglip
from speech_checkpoints import token_ids

from headrace import LLM
from headrace_core.errors import ConfigError, PromptTooLong, RequestError, UnsupportedFeature

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_num_seqs": 8, "num_threads": 1, "block_size": 8,
    "kv_cache_memory_bytes": 16 << 20, "use_tqdm_on_load": False,
}  # fmt: skip
TEXTS = ("the water runs", "in the long race over the wheel", "a")
LONG = "the water runs in the long race " * 20
PICTURES = {"wide": picture(1, 40, 56), "high": picture(2, 90, 30)}
NEAR = 1e-4
Features = Mapping[str, np.ndarray[Any, Any]]


class Encoder(NamedTuple):
    """A checkpoint, and the features that transformers makes of :data:`TEXTS` and :data:`PICTURES`."""

    folder: Path
    features: Features
    most: int
    """Tokens that a text may have."""
    modes: Sequence[dict[str, Any]]
    """Settings under which they are tried."""


def unit(features: Any) -> np.ndarray[Any, Any]:
    rows: np.ndarray[Any, Any] = torch.nn.functional.normalize(features, dim=-1).numpy()
    return rows


def features(oracle: Any, texts: Mapping[str, Any], images: Any) -> Features:
    """Features of length 1, by text and by name of a picture.

    Args:
        texts: text -> tokens.
        images: transformers' processor.
    """
    with torch.no_grad():
        found = {text: oracle.get_text_features(torch.tensor([ids])) for text, ids in texts.items()}
        for name, image in PICTURES.items():
            found[name] = oracle.get_image_features(**images(image, return_tensors="pt"))
    return {name: unit(out.pooler_output[0]) for name, out in found.items()}


def of_clip(folder: Path) -> Encoder:
    from transformers import CLIPImageProcessor

    oracle = save_clip(folder)
    texts = {text: token_ids(folder, text) for text in TEXTS}
    found = features(oracle, texts, CLIPImageProcessor.from_pretrained(folder))
    modes = ({}, {"enforce_eager": True}, {"max_num_batched_tokens": 8}, {"engine_process": True})
    return Encoder(folder, found, 32, modes)


def of_siglip(folder: Path) -> Encoder:
    from transformers import SiglipImageProcessor

    oracle, texts = save_siglip(folder), {}
    [pad] = token_ids(folder, PAD)[:1]
    for text in TEXTS:
        ids = token_ids(folder, text)
        texts[text] = ids + [pad] * (24 - len(ids))
    found = features(oracle, texts, SiglipImageProcessor.from_pretrained(folder))
    return Encoder(folder, found, 24, ({},))


ENCODERS: Mapping[str, Callable[[Path], Encoder]] = {"clip": of_clip, "siglip": of_siglip}


@pytest.fixture(scope="module", params=ENCODERS)
def encoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    return ENCODERS[request.param](tmp_path_factory.mktemp(request.param))


def prompt_of(name: str) -> Any:
    image = PICTURES.get(name)
    return name if image is None else {"prompt": "", "multi_modal_data": {"image": image}}


def check(outputs: Any, encoder: Encoder) -> None:
    for output, feature in zip(outputs, encoder.features.values(), strict=True):
        np.testing.assert_allclose(output.outputs.embedding, feature, atol=NEAR)


def test_features_in_every_mode(encoder: Encoder) -> None:
    prompts = [prompt_of(name) for name in encoder.features]
    for settings in encoder.modes:
        with LLM(str(encoder.folder), **SETTINGS, **settings) as model:
            check(model.embed(prompts), encoder)
            check(model.embed(prompts), encoder)
            check([model.embed(prompt)[0] for prompt in prompts], encoder)


@pytest.fixture(scope="module")
def model(encoder: Encoder) -> Iterator[LLM]:
    with LLM(str(encoder.folder), **SETTINGS) as made:
        yield made


def test_the_cosine_of_a_text_and_pictures(encoder: Encoder, model: LLM) -> None:
    text = TEXTS[0]
    parts = [{"type": "image_pil", "image_pil": image} for image in PICTURES.values()]
    scores = model.score(text, {"content": parts})
    for score, name in zip(scores, PICTURES, strict=True):
        wanted = float(encoder.features[text] @ encoder.features[name])
        assert score.outputs.score == pytest.approx(wanted, abs=NEAR)


def test_what_is_refused_by_name(encoder: Encoder, model: LLM) -> None:
    image = PICTURES["wide"]
    with pytest.raises(RequestError, match=r"^prompt: must be empty beside an image"):
        model.embed({"prompt": "the water", "multi_modal_data": {"image": image}})
    with pytest.raises(RequestError, match=r"^multi_modal_data: 2 images: .* one image, or a text"):
        model.embed({"prompt": "", "multi_modal_data": {"image": [image, image]}})
    with pytest.raises(PromptTooLong, match=f"is {encoder.most} tokens"):
        model.embed(LONG)
    [cut] = model.embed(LONG, truncate_prompt_tokens=-1)
    assert len(cut.prompt_token_ids) == encoder.most
    with pytest.raises(ConfigError, match="pooling_type = 'MEAN'"):
        LLM(str(encoder.folder), **SETTINGS, pooler_config={"pooling_type": "MEAN"})


def test_without_images_no_tower_is_loaded(encoder: Encoder) -> None:
    with LLM(str(encoder.folder), **SETTINGS, limit_mm_per_prompt={"image": 0}) as model:
        check(model.embed(list(TEXTS)), encoder._replace(features=texts_only(encoder)))
        with pytest.raises(UnsupportedFeature, match="text only"):
            model.embed(prompt_of("wide"))


def texts_only(encoder: Encoder) -> Features:
    return {text: encoder.features[text] for text in TEXTS}


@pytest.fixture(scope="module")
def server(encoder: Encoder) -> Iterator[RunningServer]:
    words = ("--dtype", "float32", "--block-size", "8", "--kv-cache-memory-bytes", "16777216")
    with serving(str(encoder.folder), *words) as running:
        yield running


def chat(*parts: Any) -> dict[str, Any]:
    """A conversation of texts and pictures."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(part)}}
        for part in parts
    ]
    return {"messages": [{"role": "user", "content": content}]}


def test_texts_and_images_over_the_wire(encoder: Encoder, server: RunningServer) -> None:
    url, features = f"{server.url}/v1/embeddings", encoder.features
    answer = post(url, {"input": list(TEXTS)})
    for entry, text in zip(answer["data"], TEXTS, strict=True):
        np.testing.assert_allclose(entry["embedding"], features[text], atol=NEAR)
    for part, name in ((PICTURES["high"], "high"), (TEXTS[0], TEXTS[0])):
        [entry] = post(url, chat(part))["data"]
        np.testing.assert_allclose(entry["embedding"], features[name], atol=NEAR)


def test_text_beside_an_image_is_refused_over_the_wire(server: RunningServer) -> None:
    body = chat("the water", PICTURES["wide"])
    answer = httpx2.post(f"{server.url}/v1/embeddings", json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    assert "must be empty beside an image" in answer.text
