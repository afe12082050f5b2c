"""Checkpoints of models that also see or hear: their language model is served, equal to transformers'
class on prompts of text. Checkpoints are saved by that class, towers included."""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from adapter_files import choose, with_adapters
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.errors import UnsupportedModel
from headrace_core.model import ModelInfo
from headrace_core.platform import CpuPlatform
from headrace_models.catalogue import ARCHITECTURES
from headrace_models.catalogue.multimodal import (
    REFUSED,
    WRAPPERS,
    own_quantization,
    ties_by_tensors,
)
from headrace_models.loading.loader import load_model
from headrace_models.resolve import resolve
from headrace_testing.model.adapters import linear_modules, merged, write_adapter
from headrace_testing.model.decoders import PagedDriver, build_context, randomise

pytestmark = pytest.mark.filterwarnings("ignore")  # of model code that is not ours

PROMPT = [5, 90, 17, 33, 2, 8, 120, 64, 7, 7, 41, 99, 3, 18, 77, 52, 6, 110, 13, 29, 31]
TEXT: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sliding_window": 9, "num_experts": 4,
    "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24, "attention_chunk_size": 8, "query_pre_attn_scalar": 20,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 131, "intermediate_size_mlp": 48,
    "global_head_dim": 16, "num_global_key_value_heads": 2, "num_kv_shared_layers": 0,
    "laurel_rank": 4, "activation_sparsity_pattern": None,
}  # fmt: skip
_SEQUENCE = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 3, 3]}
_PARTIAL = {
    "rope_parameters": {**_SEQUENCE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}
}
_INTERLEAVED = {**_SEQUENCE, "mrope_interleaved": True}
_FULL = {"layer_types": ["full_attention"] * 4, "use_sliding_window": False}
_MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_SCALED = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5,
           "attention_multiplier": 0.2}  # fmt: skip
_DELTA = {"layer_types": ["linear_attention", "full_attention"] * 2}
DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 1,
    "num_key_value_heads": 4, "head_dim": 8,
}  # fmt: skip
ERNIE: dict[str, Any] = {
    "moe_intermediate_size": [24, 16], "moe_num_experts": 4, "moe_k": 2,
    "rope_parameters": {**_SEQUENCE, "mrope_section": [3, 3, 2]},
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "gemma3_text": _MIXED, "gemma3n_text": _MIXED, "gemma4_text": _MIXED, "qwen2": _FULL, "qwen3": _FULL,
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4_text": {"no_rope_layers": [1, 0, 1, 0]},
    "qwen2_vl_text": {"rope_parameters": _SEQUENCE}, "qwen2_5_vl_text": {"rope_parameters": _SEQUENCE},
    "qwen3_vl_text": {"rope_parameters": _INTERLEAVED}, "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA, "cohere2": _MIXED, "glm4v_text": _PARTIAL | {"head_dim": 16},
    "glm4v_moe_text": _PARTIAL | {"n_routed_experts": 4, "first_k_dense_replace": 1},
    "glm_ocr_text": {"rope_parameters": {**_SEQUENCE, "partial_rotary_factor": 1.0}, "head_dim": 16},
    "qwen3_vl_moe_text": {"rope_parameters": _INTERLEAVED},
    "qwen2_5_omni_text": {"rope_parameters": _SEQUENCE},
    "qwen3_omni_moe_text": {"rope_parameters": _INTERLEAVED},
    "hunyuan_vl_text": {"rope_parameters": _SEQUENCE},
    "lfm3": {}, "gemma4_unified_text": _MIXED, "exaone4": _MIXED,
    "deepseek_v3": DEEPSEEK, "mllama_text_model": {"cross_attention_layers": [1]},
    "ernie4_5_vl_moe_text": ERNIE, "aria_text": {"moe_num_experts": 4},
    "paddleocr_vl_text": {"rope_parameters": _SEQUENCE},
    "granite": _SCALED, "granite_docling_text": _SCALED, "granite4_vision_text": _SCALED,
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp", "moe"], "mamba_num_heads": 4, "mamba_head_dim": 8,
        "ssm_state_size": 8, "n_groups": 2, "chunk_size": 8, "n_routed_experts": 4,
        "moe_shared_expert_intermediate_size": 24, "sliding_window": None,
    },
}  # fmt: skip
"""Values of a language model's config, by its ``model_type``."""
VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14, "depth": 1, "embed_dim": 32, "num_heads": 2,
    "out_hidden_size": 64, "num_channels": 3, "num_position_embeddings": 16, "vision_output_dim": 64,
    "projector_input_dim": 32, "projector_output_dim": 32, "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0], "spatial_merge_size": 2, "num_key_value_heads": 2, "head_dim": 16,
    "d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32,
    "base_channels": 32, "num_res_blocks": 1, "num_blocks": 1, "channel_multiplier": [1, 1],
    "depths": [1, 1], "downsampling_ratios": [2], "num_filters": 8,
    "num_layers": 1, "hidden_dim": 32, "output_dim": 64, "global_attn_indexes": [],
}  # fmt: skip
LEFT_AS_THEY_ARE = {"text_config", "high_res_vision_config"}
"""Parts of configs that :data:`VISION` does not shrink."""
TOWERS: dict[str, dict[str, Any]] = {
    "FastVlmForConditionalGeneration": {"hidden_size": 32},
    "Granite4VisionForConditionalGeneration": {"hidden_size": 64},
    "Llama4ForConditionalGeneration": {"intermediate_size": 128, "vision_output_dim": 32},
    "Ovis2ForConditionalGeneration": {"vocab_size": 64, "num_visual_indicator_tokens": 5},
    "PerceptionLMForConditionalGeneration": {"model_args": {"embed_dim": 32}},
    "Qwen2VLForConditionalGeneration": {"hidden_size": 64},
    "NemotronH_Omni_Reasoning_V3": {"video_temporal_patch_size": 2},
}
"""Further values of towers' configs, by the whole's class."""
ADAPTOR = {"hidden_size": 64, "intermediate_size": 16}
"""Config of the part that makes a language model's vectors of sound."""
OTHERS: dict[str, dict[str, Any]] = {
    "Gemma3ForConditionalGeneration": {"mm_tokens_per_image": 4},
    "Emu3ForConditionalGeneration": {"vocabulary_map": {"<image>": 130}},
    "Granite4VisionForConditionalGeneration": {
        "deepstack_layer_map": [[0, 1]], "downsample_rate": "1/2", "use_spatial_sampling": False,
    },
    "LlavaOnevisionForConditionalGeneration": {"image_grid_pinpoints": [[28, 56]]},
    "Ovis2ForConditionalGeneration": {"hidden_size": 64},
}  # fmt: skip
"""Further values of a whole's config, by its class."""
OF_FLAT_CONFIGS = {"qwen2_vl", "qwen2_5_vl", "paddleocr_vl", "ernie4_5_moe_vl", "hunyuan_vl"}
BY_HAND = {
    "Gemma3nForConditionalGeneration", "InternVLChatModel", "KimiVLForConditionalGeneration",
    "Qwen2_5OmniModel", "Qwen2_5OmniForConditionalGeneration", "Qwen3OmniMoeForConditionalGeneration",
    "KimiK25ForConditionalGeneration", "NemotronH_Nano_VL_V2", "Phi4MMForCausalLM",
    "Phi4MultimodalForCausalLM", "MiniCPMO", "MiniCPMV", "UltravoxModel", "DotsOCRForCausalLM",
    "OpenCUAForConditionalGeneration", "Tarsier2ForConditionalGeneration", "KeyeForConditionalGeneration",
    "KeyeVL1_5ForConditionalGeneration", "Phi3VForCausalLM",
    "BeeForConditionalGeneration", "RForConditionalGeneration", "MantisForConditionalGeneration",
    "InternS1ForConditionalGeneration", "NVLM_D_Model", "SkyworkR1VChatModel",
    "H2OVLChatModel", "Llama_Nemotron_Nano_VL", "Eagle2_5_VLForConditionalGeneration",
    "MolmoForCausalLM", "Ovis", "Ovis2_5", "ChameleonForConditionalGeneration",
    "DeepseekOCRForCausalLM",
    "DeepseekVLV2ForCausalLM", "TarsierForConditionalGeneration", "MiniMaxVL01ForConditionalGeneration",
    "MiDashengLMModel", "HCXVisionForCausalLM", "KananaVForConditionalGeneration",
    "Molmo2ForConditionalGeneration", "BagelForConditionalGeneration", "IsaacForConditionalGeneration",
    "Step3VLForConditionalGeneration", "StepVLForConditionalGeneration", "PixtralForConditionalGeneration",
}  # fmt: skip
"""transformers has no class for them, or one that needs a library or several models: checkpoints of the
language model's own class are put under the whole's names (:func:`test_gemma_3n`,
:func:`test_names_and_configs_of_remote_code`, :func:`test_thinkers`), the config is flat
(:func:`test_phi_4_multimodal`), or text alone is among the tests of their towers (``test_vision_*.py``)."""
REMOTE_KINDS = {"chatglm", "fuyu", "kimi_k2", "qwen", "qwen3_asr_text"}
"""Kinds of configs that only checkpoints' own code knows, or of a flat one that a file of its own tests."""
CASES = [
    (name, kind)
    for name, wrapper in WRAPPERS.items()
    if not wrapper.needs_media and not wrapper.processor  # which is another class, with labels
    if wrapper.task == "generate"
    for kind in wrapper.texts
    if kind not in OF_FLAT_CONFIGS | REMOTE_KINDS and name not in BY_HAND
]


class _TowerOfTimm(torch.nn.Linear):
    """Stands for a tower that needs the library timm; text does not reach it."""

    def __init__(self) -> None:
        super().__init__(2, 2)


class _AutoModel:
    @staticmethod
    def from_config(config: Any) -> Any:
        if "Timm" in type(config).__name__:
            return _TowerOfTimm()
        return transformers.AutoModel.from_config(config)


@pytest.fixture(autouse=True)
def _towers_of_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("fast_vlm", "perception_lm"):
        module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
        monkeypatch.setattr(module, "AutoModel", _AutoModel)


def small(config_class: Any, values: dict[str, Any]) -> dict[str, Any]:
    names = {f.name for f in dataclasses.fields(config_class) if f.init}
    return {name: value for name, value in values.items() if name in names}


def make(name: str, kind: str, folder: Path, **settings: Any) -> Any:
    """Save a checkpoint with random weights; returns transformers' model."""
    model_class = getattr(transformers, name)
    config_class = model_class.config_class
    own_class = kind in CONFIG_MAPPING
    text_class = CONFIG_MAPPING[kind] if own_class else config_class.sub_configs["text_config"]
    parts: dict[str, Any] = {
        "text_config": text_class(**{**small(text_class, TEXT), **OWN.get(kind, {}), **settings})
    }
    whole = config_class()
    for part in sorted(set(config_class.sub_configs) - LEFT_AS_THEY_ARE):
        tower = getattr(whole, part, None)
        if tower is not None:
            own = ADAPTOR if part == "adaptor_config" else TOWERS.get(name, {})
            parts[part] = type(tower)(**{**small(type(tower), VISION), **own})
    parts |= OTHERS.get(name, {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = model_class._from_config(
            config_class(**parts), attn_implementation="eager", dtype=torch.float32
        ).eval()
        randomise(model)
        model.save_pretrained(folder)
    return model


def wanted(model: Any) -> Tensor:
    """Log-probabilities. Cohere's language model multiplies its logits by ``logit_scale``, Granite's divides
    them by ``logits_scaling``, by their published definitions and their own classes; some of transformers'
    classes around them leave that out."""
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.tensor([PROMPT])).logits[0]
    text = model.config.get_text_config()
    scale = {
        "AyaVisionForConditionalGeneration": lambda: text.logit_scale,
        "Cohere2VisionForConditionalGeneration": lambda: text.logit_scale,
        "GraniteSpeechForConditionalGeneration": lambda: 1 / text.logits_scaling,
        "GraniteSpeechPlusForConditionalGeneration": lambda: 1 / text.logits_scaling,
    }.get(type(model).__name__, lambda: 1.0)()
    return (logits * scale).log_softmax(-1)


def resolved(folder: Path, **limits: int) -> ModelInfo:
    """Without towers for audio, whose tiny configs are not all ones that can be built, and without others
    that the config does not have.

    Args:
        limits: of further modalities.
    """
    limited = {"audio": 0, **limits}
    if "vision_config" not in json.loads((folder / "config.json").read_text()):
        limited |= {"image": 0, "video": 0}
    config = ModelConfig(model=str(folder), max_model_len=64, limit_mm_per_prompt=limited)
    return resolve(config, LoadConfig(), CpuPlatform())


def served(folder: Path, load: LoadConfig | None = None, **limits: int) -> Tensor:
    """In two chunks."""
    info = resolved(folder, **limits)
    driver = PagedDriver(load_model(info, build_context(info), load=load))
    pieces = driver.step({"a": PROMPT[:13]}), driver.step({"a": PROMPT[13:]})
    return torch.cat(pieces).log_softmax(-1)


def check_equal(folder: Path, model: Any, **limits: int) -> None:
    ours, theirs = served(folder, **limits), wanted(model)
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=0)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.mark.keep(24, every_value=False)
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_text_is_equal(name: str, kind: str, tmp_path: Path) -> None:
    model = make(name, kind, tmp_path)
    check_equal(tmp_path, model)
    info = resolved(tmp_path)
    assert (info.architecture, info.source) == (name, "native")


@pytest.mark.parametrize(
    "name", ["LlavaForConditionalGeneration", "Qwen2VLForConditionalGeneration"]
)
def test_the_other_layout_of_names(name: str, tmp_path: Path) -> None:
    """The class of transformers has other names of tensors since 4.52; both load."""
    kind = next(iter(WRAPPERS[name].texts))
    model = make(name, kind, tmp_path)
    tensors = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert any(key.startswith("model.language_model.") for key in tensors)
    check_equal(tmp_path, model)


@pytest.mark.parametrize("kind", sorted(OF_FLAT_CONFIGS))
def test_a_config_that_is_not_nested(kind: str, tmp_path: Path) -> None:
    """The published Qwen2-VL, Qwen2.5-VL and PaddleOCR-VL have such a config."""
    name, row = next((name, row) for name, row in WRAPPERS.items() if kind in row.texts)
    model = make(name, next(iter(row.texts)), tmp_path)
    file = tmp_path / "config.json"
    said = json.loads(file.read_text())
    text = said.pop("text_config")
    text.pop("rope_parameters")
    old = {"rope_theta": 500.0, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    file.write_text(json.dumps({**text, **said, **old, "model_type": kind}))
    check_equal(tmp_path, model)


def test_published_names_of_paddleocr_vl(tmp_path: Path) -> None:
    """The language model's tensors have its own class's names."""
    model = make("PaddleOCRVLForConditionalGeneration", "paddleocr_vl_text", tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert "model.layers.0.self_attn.q_proj.weight" in names
    assert any(name.startswith("mlp_AR.") for name in names)
    check_equal(tmp_path, model)


def phi_4_multimodal(folder: Path) -> Any:
    config_class = transformers.Phi4MultimodalConfig
    parts = {}
    for part, size in (("vision_config", {"crop_size": 28}), ("audio_config", PHI_4_AUDIO)):
        tower = type(getattr(config_class(), part))
        parts[part] = tower(**{**small(tower, VISION), **size})
    text = small(config_class, {**TEXT, "hidden_size": 64, "sliding_window": None})
    config = config_class(**text, **parts, tie_word_embeddings=True)
    model: Any = transformers.Phi4MultimodalForCausalLM._from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    randomise(model)
    model.save_pretrained(folder)
    return model


PHI_4_AUDIO = {
    "hidden_size": 32, "intermediate_size": 48, "num_blocks": 1, "num_attention_heads": 2,
    "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 32,
}  # fmt: skip


def test_phi_4_multimodal(tmp_path: Path) -> None:
    """The config is flat; transformers' own class is saved without adapters."""
    model = phi_4_multimodal(tmp_path)
    check_equal(tmp_path, model)
    info = resolved(tmp_path)
    assert (info.architecture, info.source) == ("Phi4MultimodalForCausalLM", "native")


def test_phi_4_multimodal_as_published(tmp_path: Path) -> None:
    """Layers stand under ``base_layer``, beside adapters that only images and sound switch on."""
    model = phi_4_multimodal(tmp_path)
    tensors = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        module, _, kind = name.rpartition(".")
        if module.startswith("model.layers.") and module.endswith("_proj"):
            tensors[f"{module}.base_layer.{kind}"] = tensor
            for adapter in ("speech", "vision"):
                tensors[f"{module}.lora_A.{adapter}.weight"] = torch.ones(2, tensor.shape[1])
                tensors[f"{module}.lora_B.{adapter}.weight"] = torch.ones(tensor.shape[0], 2)
        else:
            tensors[name] = tensor
    assert "model.layers.0.self_attn.qkv_proj.base_layer.weight" in tensors
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    said = json.loads((tmp_path / "config.json").read_text())
    said |= {"architectures": ["Phi4MMForCausalLM"], "model_type": "phi4mm"}
    (tmp_path / "config.json").write_text(json.dumps(said))
    check_equal(tmp_path, model)


def test_settings_of_a_tower_are_not_the_language_models(tmp_path: Path) -> None:
    """Music Flamingo's config has rotary settings of its sound beside those of its text."""
    make("MusicFlamingoForConditionalGeneration", "qwen2", tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    assert said["head_dim"] == 32
    assert "head_dim" not in said["text_config"]
    assert "head_dim" not in resolved(tmp_path).config


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_text_that_is_not_served_is_refused_by_name(name: str, tmp_path: Path) -> None:
    language_model("gemma", tmp_path)
    rewrap(tmp_path, "language_model.", {},
           lambda own: {"architectures": [name], "model_type": "paligemma", "text_config": own})  # fmt: skip
    for choice in ("auto", "transformers"):
        settings = ModelConfig(model=str(tmp_path), model_impl=choice)
        with pytest.raises(
            UnsupportedModel, match=re.escape(f"{name} is not supported: {REFUSED[name]}")
        ):
            resolve(settings, LoadConfig(), CpuPlatform())


def test_gemma_3n(tmp_path: Path) -> None:
    """The whole needs a library for its towers: its language model is saved under the whole's names."""
    config_class = CONFIG_MAPPING["gemma3n_text"]
    config = config_class(**{**small(config_class, TEXT), **OWN["gemma3n_text"]})
    model = transformers.Gemma3nForCausalLM._from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    randomise(model)
    model.save_pretrained(tmp_path)
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    tensors["model.vision_tower.timm_model.conv_stem.weight"] = torch.zeros(3)
    tensors["model.embed_audio.embedding.weight"] = torch.zeros(3)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    said = json.loads((tmp_path / "config.json").read_text())
    whole = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n",
             "text_config": said, "vision_config": {}, "audio_config": {}}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(whole))
    check_equal(tmp_path, model, image=0)


def rewrap(folder: Path, prefix: str, extra: dict[str, Tensor], config: Any) -> None:
    """Put a language model's checkpoint under other names.

    Args:
        config: its own config -> the whole's.
    """
    own = load_file(folder / "model.safetensors")
    tensors = {prefix + name: tensor for name, tensor in own.items()}
    save_file({**tensors, **extra}, folder / "model.safetensors", metadata={"format": "pt"})
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config(said)))


def language_model(kind: str, folder: Path, **settings: Any) -> Any:
    """Save a checkpoint of a language model by itself; returns transformers' model."""
    config_class: Any = CONFIG_MAPPING[kind]
    config = config_class(**{**small(config_class, TEXT), **OWN.get(kind, {}), **settings})
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    randomise(model)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    ("name", "kind", "key", "module", "settings"),
    [
        ("InternVLChatModel", "qwen2", "llm_config", "mlp1.0", {}),
        ("InternVLChatModel", "qwen3", "llm_config", "vision_model", {}),
        ("InternVLChatModel", "qwen3_moe", "llm_config", "vision_model", {}),
        ("InternVLChatModel", "phi3", "llm_config", "vision_model", {}),
        ("InternVLChatModel", "gpt_oss", "llm_config", "vision_model", {}),
        ("KimiVLForConditionalGeneration", "deepseek_v3", "text_config", "vision_tower", DEEPSEEK),
        ("KimiK25ForConditionalGeneration", "deepseek_v3", "text_config", "mm_projector", DEEPSEEK),
        ("QianfanOCRForConditionalGeneration", "qwen3", "llm_config", "mlp1.0", {}),
        ("MantisForConditionalGeneration", "llama", "text_config", "vision_tower", {}),
        ("InternS1ForConditionalGeneration", "qwen3_moe", "text_config", "vision_tower", {}),
    ],
)
def test_names_and_configs_of_remote_code(
    name: str, kind: str, key: str, module: str, settings: Any, tmp_path: Path
) -> None:
    model = language_model(kind, tmp_path, **settings)
    renamed = "kimi_k2" if name == "KimiK25ForConditionalGeneration" else None
    extra = {f"{module}.weight": torch.zeros(3)}
    rewrap(tmp_path, "language_model.", extra,
           lambda own: {"architectures": [name], "model_type": "remote",
                        key: {**own, "model_type": renamed or own["model_type"]}})  # fmt: skip
    check_equal(tmp_path, model)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Qwen2_5OmniModel", "qwen2_5_omni_text"),
        ("Qwen2_5OmniForConditionalGeneration", "qwen2_5_omni_text"),
        ("Qwen3OmniMoeForConditionalGeneration", "qwen3_omni_moe_text"),
    ],
)
def test_thinkers(name: str, kind: str, tmp_path: Path) -> None:
    """The published checkpoints: the thinker under a name of its own, beside what speaks."""
    thinker = name.replace("Model", "ForConditionalGeneration")
    thinker = thinker.replace("ForConditionalGeneration", "ThinkerForConditionalGeneration")
    model = make(thinker, kind, tmp_path)
    extra = {"talker.model.embed_tokens.weight": torch.zeros(3), "token2wav.x": torch.zeros(2)}
    rewrap(tmp_path, "thinker.", extra,
           lambda own: {"architectures": [name], "model_type": "omni", "thinker_config": own})  # fmt: skip
    check_equal(tmp_path, model)


def test_experts_with_their_dimensions_exchanged(tmp_path: Path) -> None:
    """Configs as those of the published Qwen3-VL mixtures: they do not state what the class fixes."""
    model = make("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe_text", tmp_path)
    tensors = {
        name: tensor.transpose(1, 2).contiguous() if ".mlp.experts." in name else tensor
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    assert any(".mlp.experts." in name for name in tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    said = json.loads((tmp_path / "config.json").read_text())
    said["text_config"].pop("norm_topk_prob", None)
    (tmp_path / "config.json").write_text(json.dumps(said))
    check_equal(tmp_path, model)


def test_one_line_says_what_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make("VipLlavaForConditionalGeneration", "llama", tmp_path)
    with caplog.at_level(logging.INFO):
        served(tmp_path)
    [line] = [r.message for r in caplog.records if "are not read" in r.message]
    assert line.startswith("VipLlavaForConditionalGeneration: text is served; ")
    assert "tensors for images and other media" in line


def test_dummy_weights(tmp_path: Path) -> None:
    make("LlavaForConditionalGeneration", "llama", tmp_path)
    assert bool(served(tmp_path, LoadConfig(load_format="dummy")).isfinite().all())


def test_a_tensor_of_an_unknown_module_is_left_over(tmp_path: Path) -> None:
    make("LlavaForConditionalGeneration", "llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["adapter.weight"] = torch.zeros(3)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Exception, match=r"'adapter\.weight' \[3\].* belongs to no layer"):
        served(tmp_path)


def test_another_language_model_is_not_taken_for_a_known_one(tmp_path: Path) -> None:
    make("LlavaForConditionalGeneration", "llama", tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    said["text_config"]["model_type"] = "gpt_of_nobody"
    (tmp_path / "config.json").write_text(json.dumps(said))
    settings = ModelConfig(model=str(tmp_path), model_impl="headrace")
    with pytest.raises(UnsupportedModel, match="LlavaForConditionalGeneration"):
        resolve(settings, LoadConfig(), CpuPlatform())


def test_whether_the_head_is_the_embedding_the_files_say() -> None:
    name, config = "Mistral3ForConditionalGeneration", {"tie_word_embeddings": False}
    body = "language_model.model.norm.weight"
    assert ties_by_tensors(name, config, [body])["tie_word_embeddings"] is True
    head = "language_model.lm_head.weight"
    assert ties_by_tensors(name, {}, [body, head])["tie_word_embeddings"] is False
    assert ties_by_tensors(name, config, []) == config
    assert ties_by_tensors("MistralForCausalLM", config, [body]) == config


@pytest.mark.parametrize(
    ("entry", "own"),
    [
        ("model.language_model.layers.1.mlp.down_proj", "model.layers.1.mlp.down_proj"),
        ("language_model.model.layers.1", "model.layers.1"),
        ("language_model.lm_head", "lm_head"), ("thinker.model.layers.1", "model.layers.1"),
        ("re:model.language_model.layers.*mlp", "re:model.layers.*mlp"),
        (r"re:^model\.language_model\.layers\.2\..*", r"re:^model\.layers\.2\..*"),
        (r"re:language_model\.model\.layers.*", r"re:model\.layers.*"),
        ("-:model.language_model.layers.1.*", "-:model.layers.1.*"),
        ("re:.*lm_head", "re:.*lm_head"), ("visual", "visual"),
        ("model.visual.blocks.0", "model.visual.blocks.0"),
        ("Linear", "Linear"), ("lm_head", "lm_head"),
    ],
)  # fmt: skip
def test_names_in_lists_of_layers(entry: str, own: str) -> None:
    name = "Qwen3VLForConditionalGeneration"
    said = {"quant_method": "awq", "ignore": [entry], "dynamic": {entry: {}}, "bits": 4}
    assert own_quantization(name, said) == {**said, "ignore": [own], "dynamic": {own: {}}}
    assert own_quantization("Qwen3ForCausalLM", said) == said


def test_language_models_are_rows_of_the_catalogue() -> None:
    for wrapper in WRAPPERS.values():
        assert set(wrapper.texts.values()) <= set(ARCHITECTURES)
        assert wrapper.name not in ARCHITECTURES


@pytest.mark.parametrize(
    "name",
    ["LlavaForConditionalGeneration", "Qwen2VLForConditionalGeneration", "Gemma3ForConditionalGeneration"],
)  # fmt: skip
def test_an_adapter_of_the_language_model(name: str, tmp_path: Path) -> None:
    """Under the names of transformers' modules, and under those that it had before 4.52; modules of towers
    are refused by name."""
    check_adapter(name, next(iter(WRAPPERS[name].texts)), tmp_path)


def check_adapter(name: str, kind: str, folder: Path) -> None:
    model = make(name, kind, folder)
    info = resolved(folder)
    context, slots = with_adapters(build_context(info))
    own = load_model(info, context)
    decoder = next(n for n, module in model.named_modules() if module is model.get_decoder())
    modules = linear_modules(model)
    modules = {n: size for n, size in modules.items() if n.startswith((f"{decoder}.", "lm_head"))}
    terms = write_adapter(folder / "new", modules)
    older = {n: re.sub("^model.language_model", "language_model.model", n) for n in modules}
    write_adapter(folder / "old", {older[n]: size for n, size in modules.items()})
    expected, plain = wanted(merged(model, terms)), wanted(model)
    for slot, layout in enumerate(("new", "old")):
        slots.place(slot, slots.read(str(folder / layout)))
        choose(slots, [slot] * len(PROMPT) + [-1] * len(PROMPT))
        found = PagedDriver(own).step({"a": PROMPT, "b": PROMPT}).log_softmax(-1)
        torch.testing.assert_close(found[: len(PROMPT)], expected, atol=2e-4, rtol=0)
        torch.testing.assert_close(found[len(PROMPT) :], plain, atol=2e-4, rtol=0)
    tower = next(n for n in linear_modules(model) if n not in modules)
    write_adapter(folder / "tower", {tower: (8, 8)})
    with pytest.raises(UnsupportedModel, match=tower):
        slots.read(str(folder / "tower"))
