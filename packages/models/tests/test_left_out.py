"""Published configs whose parts leave out what is the default of transformers' class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headrace_core import plugins
from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.errors import WeightsError
from headrace_core.platform import CpuPlatform
from headrace_models.catalogue.multimodal.left_out import LEFT_OUT
from headrace_models.loading.loader import load_model
from headrace_models.resolve import resolve
from headrace_testing.model.decoders import build_context

CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096,
    "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768,
}  # fmt: skip
SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304,
    "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "LLaVA 1.5 7B": {
        "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava",
        "image_token_index": 32000, "pad_token_id": 32001, "vision_config": CLIP,
        "text_config": {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
                        "vocab_size": 32064},
    },
    "LLaVA-NeXT, on Mistral": {
        "architectures": ["LlavaNextForConditionalGeneration"], "model_type": "llava_next",
        "image_token_index": 32000, "vision_config": CLIP,
        "text_config": {"model_type": "mistral", "intermediate_size": 14336, "rms_norm_eps": 1e-5,
                        "max_position_embeddings": 32768, "num_key_value_heads": 8,
                        "rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32064},
    },
    "LLaVA-OneVision 0.5B": {
        "architectures": ["LlavaOnevisionForConditionalGeneration"], "model_type": "llava_onevision",
        "image_token_index": 151646, "video_token_index": 151647,
        "vision_config": {**SIGLIP, "image_size": 384, "num_hidden_layers": 26},
        "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
        "text_config": {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
                        "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
                        "rope_theta": 1000000.0, "tie_word_embeddings": True, "vocab_size": 152000},
    },
    "PaliGemma 3B": {
        "architectures": ["PaliGemmaForConditionalGeneration"], "model_type": "paligemma",
        "hidden_size": 2048, "image_token_index": 257152, "projection_dim": 2048,
        "vision_config": {**SIGLIP, "projection_dim": 2048},
        "text_config": {"model_type": "gemma", "hidden_size": 2048, "intermediate_size": 16384,
                        "num_attention_heads": 8, "num_hidden_layers": 18, "num_key_value_heads": 1,
                        "vocab_size": 257216},
    },
    "PaliGemma 2 3B": {
        "architectures": ["PaliGemmaForConditionalGeneration"], "model_type": "paligemma",
        "image_token_index": 257152, "projection_dim": 2304,
        "vision_config": {**SIGLIP, "projection_dim": 2304},
        "text_config": {"model_type": "gemma2", "num_hidden_layers": 26, "vocab_size": 257216},
    },
    "Gemma 3 4B": {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
        "image_token_index": 262144, "boi_token_index": 255999, "eoi_token_index": 256000,
        "mm_tokens_per_image": 256, "vision_config": {**SIGLIP, "image_size": 896},
        "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
                        "num_hidden_layers": 34, "sliding_window": 1024,
                        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
    },
}  # fmt: skip
"""As they lie on the hub, but for keys that change nothing."""


OF_NO_LIBRARY = {"kanana-1.5-3b-instruct": "llama"}
"""Kinds of checkpoints' own code -> the kind whose defaults they have."""


@pytest.mark.parametrize("kind", LEFT_OUT)
def test_the_table_is_what_transformers_classes_have(kind: str) -> None:
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[OF_NO_LIBRARY.get(kind, kind)]()
    for key, value in LEFT_OUT[kind].items():
        assert getattr(config, key) == value, key


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_say_enough(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of the sizes that transformers makes of it is built; the file holds a tensor of one number."""
    from transformers import CONFIG_MAPPING

    installed, group = plugins.installed, "headrace.multimodal_processors"
    processors = {PUBLISHED[name]["architectures"][0]: None}
    monkeypatch.setattr(
        plugins, "installed", lambda asked: processors if asked == group else installed(asked)
    )
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    file = tmp_path / "model.safetensors"
    save_file({"language_model.model.norm.weight": torch.zeros(1)}, file)
    info = resolve(ModelConfig(model=str(tmp_path)), LoadConfig(), CpuPlatform())
    said = PUBLISHED[name]["text_config"]
    whole = CONFIG_MAPPING[said["model_type"]](**said)
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim",
                "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "max_position_embeddings",
                "sliding_window", "query_pre_attn_scalar", "final_logit_softcapping"):  # fmt: skip
        if info.config.get(key) is not None:
            assert info.config[key] == getattr(whole, key), key
    with pytest.raises(
        WeightsError, match=rf"shape \[1\], the model needs \[{whole.hidden_size}\]"
    ):
        load_model(info, build_context(info))
