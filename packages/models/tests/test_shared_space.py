"""Encoders of texts and images beside transformers' on tiny checkpoints: what configs say and leave out,
where a text ends, and checkpoints of the text encoder alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.errors import UnsupportedModel
from headrace_core.model import ModelInfo, PoolingBatch
from headrace_core.platform import CpuPlatform
from headrace_core.pooling import PoolingParams
from headrace_models.loading.loader import load_model
from headrace_models.resolve import resolve
from headrace_testing.model.decoders import PagedDriver, build_context, randomise
from headrace_testing.model.pooling import flat_batch

TEXT: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 24, "eos_token_id": 130, "bos_token_id": 129,
}  # fmt: skip
TOWER: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 3,
    "image_size": 28, "patch_size": 7,
}  # fmt: skip
PROMPTS = [[129, 5, 90, 17, 130], [129, 33, 130], [129, 8, 130, 64, 7, 130], [129, 41, 99, 3]]
"""The third has two end tokens, the last none."""


def save(model: Any, folder: Path) -> Any:
    randomise(model.eval())
    model.save_pretrained(folder)
    return model


def resolved(folder: Path, **settings: Any) -> ModelInfo:
    config = ModelConfig(model=str(folder), **settings)
    return resolve(config, LoadConfig(), CpuPlatform())


def embedded(folder: Path, prompts: Sequence[Sequence[int]], **settings: Any) -> list[Tensor]:
    """Vectors of prompts that are computed in one step."""
    info = resolved(folder, **settings)
    model: Any = load_model(info, build_context(info))
    if model.attention_layers():
        batch = PagedDriver(model).batch({str(i): list(p) for i, p in enumerate(prompts)})
        bounds = torch.tensor([0, *map(len, prompts)]).cumsum(0)
    else:
        batch = flat_batch(prompts)
        batch = replace(batch, logits_rows=batch.cu_seqlens_q[1:].long() - 1)
        bounds = torch.arange(len(prompts) + 1)
    params = [PoolingParams(task="embed", normalize=False)] * len(prompts)
    with torch.inference_mode():
        return list(model.pooler(PoolingBatch(model.forward(batch), bounds, params, prompts)))


def siglip(folder: Path, **text: Any) -> Any:
    from transformers import SiglipConfig, SiglipModel

    settings = {**TEXT, "projection_size": 48, **text}
    return save(SiglipModel(SiglipConfig(text_config=settings, vision_config=TOWER)), folder)


def clip(folder: Path, **text: Any) -> Any:
    from transformers import CLIPConfig, CLIPModel

    settings = {**TEXT, **text}
    config = CLIPConfig(text_config=settings, vision_config=TOWER, projection_dim=40)
    return save(CLIPModel(config), folder)


def features(oracle: Any, prompt: Sequence[int]) -> Tensor:
    with torch.inference_mode():
        found: Tensor = oracle.get_text_features(torch.tensor([list(prompt)])).pooler_output[0]
    return found


@pytest.mark.parametrize(
    "text", [{}, {"eos_token_id": 2}, {"hidden_act": "gelu"}], ids=["plain", "old end", "gelu"]
)
def test_clip_pools_the_first_end_of_a_text(text: dict[str, Any], tmp_path: Path) -> None:
    oracle = clip(tmp_path, **text)
    found = embedded(tmp_path, PROMPTS, limit_mm_per_prompt={"image": 0})
    ended = PROMPTS if text.get("eos_token_id") == 2 else PROMPTS[:3]
    for vector, prompt in zip(found, ended):
        torch.testing.assert_close(vector, features(oracle, prompt), atol=1e-5, rtol=0)


def test_clip_without_an_end_pools_the_last_token(tmp_path: Path) -> None:
    oracle = clip(tmp_path)
    vector = embedded(tmp_path, PROMPTS[3:])[0]
    with torch.inference_mode():
        states = oracle.text_model(torch.tensor(PROMPTS[3:])).last_hidden_state
        wanted = oracle.text_projection(states[0, -1])
    torch.testing.assert_close(vector, wanted, atol=1e-5, rtol=0)


def test_the_text_encoder_of_clip_alone(tmp_path: Path) -> None:
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    config = CLIPTextConfig(**TEXT, projection_dim=40)
    oracle = save(CLIPTextModelWithProjection(config), tmp_path)
    found = embedded(tmp_path, PROMPTS[:3])
    for vector, prompt in zip(found, PROMPTS):
        with torch.inference_mode():
            wanted = oracle(torch.tensor([prompt])).text_embeds[0]
        torch.testing.assert_close(vector, wanted, atol=1e-5, rtol=0)


def test_configs_that_leave_out_the_defaults_of_clip(tmp_path: Path) -> None:
    clip(tmp_path)
    file = tmp_path / "config.json"
    whole = json.loads(file.read_text())
    whole["text_config"] = {"model_type": "clip_text_model", "projection_dim": 7}
    file.write_text(json.dumps(whole))
    info = resolved(tmp_path)
    assert (info.vocab_size, info.max_model_len, info.eos_token_ids) == (49408, 77, (49407,))
    assert (info.config["num_hidden_layers"], info.config["hidden_act"]) == (12, "quick_gelu")
    assert info.pooling is not None
    assert info.pooling.embedding_size == 40
    assert (info.runner, info.tasks) == ("pooling", ("embed",))


@pytest.mark.parametrize("name", ["CLIPModel", "SiglipModel"])
def test_images_and_no_tower_without_them(name: str, tmp_path: Path) -> None:
    oracle = {"CLIPModel": clip, "SiglipModel": siglip}[name](tmp_path)
    info = replace(resolved(tmp_path), processor=name)
    model: Any = load_model(info, build_context(info))
    pixels = torch.randn(2, 3, 28, 28)
    with torch.inference_mode():
        found = model.embed_media("image", [{"pixel_values": one} for one in pixels])
        wanted = oracle.get_image_features(pixels).pooler_output
    torch.testing.assert_close(torch.cat(list(found)), wanted, atol=1e-5, rtol=0)
    info = resolved(tmp_path, limit_mm_per_prompt={"image": 0})
    assert not hasattr(load_model(info, build_context(info)), "tower")


def test_siglip_2_of_any_resolution(tmp_path: Path) -> None:
    """Images of two shapes, and texts."""
    from transformers import Siglip2Config, Siglip2Model

    text = {**TEXT, "projection_size": 48, "pad_token_id": 7}
    tower = {**TOWER, "patch_size": 4, "num_patches": 25}
    del tower["image_size"]
    config = Siglip2Config(text_config=text, vision_config=tower)
    oracle = save(Siglip2Model(config), tmp_path)
    info = replace(resolved(tmp_path), processor="Siglip2Model")
    assert (info.runner, info.tasks) == ("pooling", ("embed",))
    model: Any = load_model(info, build_context(info))
    grids = torch.tensor([[3, 7], [6, 2]])
    patches = [torch.randn(int(rows * columns), 48) for rows, columns in grids]
    mask = (torch.arange(21)[None] < grids.prod(1)[:, None]).int()
    values = torch.nn.utils.rnn.pad_sequence(patches, batch_first=True)
    with torch.inference_mode():
        found = model.embed_media(
            "image",
            [
                {"pixel_values": own, "spatial_shapes": grid[None]}
                for own, grid in zip(patches, grids, strict=True)
            ],
        )
        wanted = oracle.get_image_features(
            pixel_values=values, pixel_attention_mask=mask, spatial_shapes=grids
        ).pooler_output
    torch.testing.assert_close(torch.cat(list(found)), wanted, atol=1e-5, rtol=0)
    own = embedded(tmp_path, PROMPTS[:2], limit_mm_per_prompt={"image": 0})
    for vector, prompt in zip(own, PROMPTS, strict=False):
        ids = torch.tensor([[*prompt, *[7] * (24 - len(prompt))]])
        with torch.inference_mode():
            made = oracle.get_text_features(ids).pooler_output[0]
        torch.testing.assert_close(vector, made, atol=1e-5, rtol=0)


@pytest.mark.parametrize("alone", [False, True])
def test_siglip_fills_texts_up(alone: bool, tmp_path: Path) -> None:
    """With the config's token, as there is no tokenizer."""
    from transformers import SiglipTextConfig, SiglipTextModel

    if alone:
        config = SiglipTextConfig(**TEXT, pad_token_id=7, projection_size=40)
        oracle = save(SiglipTextModel(config), tmp_path)
    else:
        oracle = siglip(tmp_path, pad_token_id=7)
    found = embedded(tmp_path, PROMPTS, limit_mm_per_prompt={"image": 0})
    for vector, prompt in zip(found, PROMPTS, strict=True):
        ids = torch.tensor([[*prompt, *[7] * (24 - len(prompt))]])
        with torch.inference_mode():
            made = oracle(ids) if alone else oracle.get_text_features(ids)
        torch.testing.assert_close(vector, made.pooler_output[0], atol=1e-5, rtol=0)


def test_configs_that_leave_out_the_defaults_of_siglip(tmp_path: Path) -> None:
    siglip(tmp_path)
    file = tmp_path / "config.json"
    whole = json.loads(file.read_text())
    file.write_text(json.dumps({**whole, "text_config": {"model_type": "siglip_text_model"}}))
    info = resolved(tmp_path)
    assert (info.vocab_size, info.max_model_len) == (32000, 64)
    assert info.pooling is not None
    assert (info.pooling.embedding_size, info.pooling.causal) == (768, False)


@pytest.mark.parametrize(
    ("tower", "told"),
    [
        ({"hidden_size": 36}, "vision_config.hidden_size = 36: must be 48"),
        ({"vision_use_head": False}, "vision_config.vision_use_head"),
    ],
)
def test_towers_of_siglip_that_are_refused(
    tower: dict[str, Any], told: str, tmp_path: Path
) -> None:
    siglip(tmp_path)
    file = tmp_path / "config.json"
    whole = json.loads(file.read_text())
    file.write_text(json.dumps({**whole, "vision_config": {**whole["vision_config"], **tower}}))
    info = replace(resolved(tmp_path), processor="SiglipModel")
    with pytest.raises(UnsupportedModel, match=told):
        load_model(info, build_context(info))
