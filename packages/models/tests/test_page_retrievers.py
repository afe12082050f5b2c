"""ColQwen2 and ColPali: what their configs say, and names of tensors in published files. Images are compared
with transformers' in the whole engine."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.errors import UnsupportedModel
from headrace_core.model import ModelInfo
from headrace_core.platform import CpuPlatform
from headrace_models.loading.loader import load_model
from headrace_models.resolve import resolve
from headrace_testing.model.decoders import PagedDriver, build_context, randomise
from headrace_testing.model.pooling import flat_batch

TEXT: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
PROMPT = [5, 90, 17, 33, 8, 64]


def colqwen2(folder: Path) -> Any:
    from transformers import ColQwen2Config, ColQwen2ForRetrieval, Qwen2VLConfig

    vision = {
        "depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2,
        "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2,
    }  # fmt: skip
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    inner = Qwen2VLConfig(vision_config=vision, text_config={**TEXT, "rope_parameters": rope})
    return saved(ColQwen2ForRetrieval(ColQwen2Config(vlm_config=inner, embedding_dim=24)), folder)


def colpali(folder: Path) -> Any:
    from transformers import ColPaliConfig, ColPaliForRetrieval, PaliGemmaConfig

    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 48, "intermediate_size": 80,
        "num_hidden_layers": 1, "num_attention_heads": 3, "image_size": 28, "patch_size": 7,
    }  # fmt: skip
    text = {**TEXT, "model_type": "gemma", "head_dim": 16}
    inner = PaliGemmaConfig(
        vision_config=vision, text_config=text, projection_dim=64, image_token_index=130
    )
    model = saved(ColPaliForRetrieval(ColPaliConfig(vlm_config=inner, embedding_dim=24)), folder)
    file = folder / "config.json"
    whole = json.loads(file.read_text())  # published configs do not say that all sees all
    assert whole["vlm_config"]["text_config"].pop("use_bidirectional_attention") is True
    file.write_text(json.dumps(whole))
    return model


def saved(model: Any, folder: Path) -> Any:
    torch.manual_seed(0)
    randomise(model.eval())
    model.save_pretrained(folder)
    return model


MAKERS: dict[str, Callable[[Path], Any]] = {
    "ColPaliForRetrieval": colpali,
    "ColQwen2ForRetrieval": colqwen2,
}
SPELLINGS: dict[str, Sequence[tuple[str, str]]] = {
    "ColPaliForRetrieval": (
        (r"^vlm\.(model\.)?language_model\.(model\.)?", "vlm.language_model.model."),
        (r"^vlm\.(model\.)?vision_tower\.(vision_model\.)?", "vlm.vision_tower.vision_model."),
        (r"^vlm\.model\.multi_modal_projector", "vlm.multi_modal_projector"),
    ),
    "ColQwen2ForRetrieval": (
        (r"^vlm\.(model\.)?language_model\.", "vlm.model."),
        (r"^vlm\.model\.visual", "vlm.visual"),
    ),
}
"""Names that transformers saves -> those of files that it wrote when the classes came."""


def resolved(folder: Path, **settings: Any) -> ModelInfo:
    return resolve(ModelConfig(model=str(folder), **settings), LoadConfig(), CpuPlatform())


def vectors(folder: Path, processor: str = "") -> torch.Tensor:
    """[tokens, P], each of length 1.

    Args:
        processor: "" leaves the towers out.
    """
    info = replace(resolved(folder), processor=processor)
    model: Any = load_model(info, build_context(info))
    causal = bool(model.attention_layers())
    batch = PagedDriver(model).batch({"a": PROMPT}) if causal else flat_batch([PROMPT])
    with torch.inference_mode():
        [dense] = model.pooler.head.dense
        found = dense(model.forward(replace(batch, logits_rows=None)).float())
    return torch.nn.functional.normalize(found, dim=-1)


@pytest.mark.parametrize("name", MAKERS)
def test_older_names_are_read(name: str, tmp_path: Path) -> None:
    oracle = MAKERS[name](tmp_path)
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        wanted = oracle(input_ids=ids, attention_mask=torch.ones_like(ids)).embeddings[0]
    torch.testing.assert_close(vectors(tmp_path, name), wanted, atol=1e-5, rtol=0)
    file = tmp_path / "model.safetensors"
    renamed = load_file(file)
    for pattern, instead in SPELLINGS[name]:
        renamed = {re.sub(pattern, instead, key): tensor for key, tensor in renamed.items()}
    assert renamed.keys() != load_file(file).keys()
    save_file(renamed, file, metadata={"format": "pt"})
    torch.testing.assert_close(vectors(tmp_path, name), wanted, atol=1e-5, rtol=0)
    torch.testing.assert_close(vectors(tmp_path), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", MAKERS)
def test_what_a_checkpoint_comes_to(name: str, tmp_path: Path) -> None:
    MAKERS[name](tmp_path)
    info = resolved(tmp_path)
    assert (info.architecture, info.source, info.tasks) == (name, "native", ("token_embed",))
    assert info.pooling is not None
    assert (info.pooling.scoring, info.pooling.embedding_size) == ("late_interaction", 24)
    assert info.pooling.causal == (name == "ColQwen2ForRetrieval")
    texts = {"visual_prompt_prefix": 'See "it".', "query_prefix": "Find:\n"}
    (tmp_path / "processor_config.json").write_text(json.dumps(texts))
    pooling = resolved(tmp_path).pooling
    assert pooling is not None
    template = pooling.score_template or ""
    assert r'{{ "See \"it\"." }}' in template
    assert r'{{ "Find:\n" }}' in template
    (tmp_path / "processor_config.json").write_text('{"query_prefix": 3}')
    with pytest.raises(UnsupportedModel, match="query_prefix must be texts"):
        resolved(tmp_path)
