"""Architectures that join a language model of :data:`~headrace_models.catalogue.ARCHITECTURES` with towers
for media. Their language model is served; the towers are not read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Wrapper:
    """An architecture that has a language model in it. Plain data."""

    name: str
    """The class, as ``architectures`` in ``config.json`` spells it."""
    texts: Mapping[str, str]
    """``model_type`` of the language model's config -> the architecture that serves it."""
    models: str
    """Name of the models, as people know them."""
    passed_over: tuple[str, ...] = ("vision_tower", "multi_modal_projector")
    """Modules beside the language model, as names of tensors begin, perhaps after ``model.``."""

    def own_name(self, tensor: str) -> str | None:
        """A tensor's name in the language model's own class; None if it belongs to another module."""
        for prefix, own in _PREFIXES.items():
            if tensor.startswith(prefix):
                return own + tensor.removeprefix(prefix)
        module = tensor.removeprefix("model.").partition(".")[0]
        return None if module in self.passed_over else tensor


_PREFIXES: Mapping[str, str] = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
"""Before transformers 4.52, and since."""
_LLAVA = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}

WRAPPERS: Mapping[str, Wrapper] = {
    row.name: row
    for row in (
        Wrapper("Gemma3ForConditionalGeneration", {"gemma3_text": "Gemma3ForCausalLM"}, "Gemma 3"),
        Wrapper(
            "Gemma3nForConditionalGeneration",
            {"gemma3n_text": "Gemma3nForCausalLM"},
            "Gemma 3n",
            ("vision_tower", "audio_tower", "embed_vision", "embed_audio"),
        ),
        Wrapper(
            "Gemma4ForConditionalGeneration",
            {"gemma4_text": "Gemma4ForCausalLM"},
            "Gemma 4",
            ("vision_tower", "audio_tower", "embed_vision", "embed_audio"),
        ),
        Wrapper(
            "InternVLForConditionalGeneration",
            {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"},
            "InternVL, by transformers",
        ),
        Wrapper("Lfm2VlForConditionalGeneration", {"lfm2": "Lfm2ForCausalLM"}, "LFM2-VL"),
        Wrapper(
            "Llama4ForConditionalGeneration",
            {"llama4_text": "Llama4ForCausalLM"},
            "Llama 4 Scout, Maverick",
            ("vision_model", "multi_modal_projector"),
        ),
        Wrapper("LlavaForConditionalGeneration", _LLAVA, "LLaVA 1.5, Pixtral by transformers"),
        Wrapper(
            "LlavaNextForConditionalGeneration",
            _LLAVA,
            "LLaVA-NeXT",
            ("vision_tower", "multi_modal_projector", "image_newline"),
        ),
        Wrapper(
            "Mistral3ForConditionalGeneration",
            {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"},
            "Mistral Small 3.1 and 3.2, Ministral 3",
        ),
        Wrapper(
            "Qwen2VLForConditionalGeneration",
            {"qwen2_vl_text": "Qwen2ForCausalLM", "qwen2_vl": "Qwen2ForCausalLM"},
            "Qwen2-VL",
            ("visual",),
        ),
        Wrapper(
            "Qwen2_5_VLForConditionalGeneration",
            {"qwen2_5_vl_text": "Qwen2ForCausalLM", "qwen2_5_vl": "Qwen2ForCausalLM"},
            "Qwen2.5-VL",
            ("visual",),
        ),
        Wrapper(
            "Qwen3VLForConditionalGeneration",
            {"qwen3_vl_text": "Qwen3ForCausalLM"},
            "Qwen3-VL",
            ("visual",),
        ),
        Wrapper(
            "Qwen3_5ForConditionalGeneration",
            {"qwen3_5_text": "Qwen3_5ForCausalLM"},
            "Qwen3.5",
            ("visual", "mtp"),
        ),
        Wrapper(
            "Qwen3_5MoeForConditionalGeneration",
            {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
            "Qwen3.5, mixtures",
            ("visual", "mtp"),
        ),
    )
}
"""By name."""


def text_architecture(architecture: str, whole: Mapping[str, Any]) -> str:
    """The architecture of a checkpoint's language model: of a wrapper's, or its own.

    Args:
        whole: ``config.json``.
    """
    wrapper = WRAPPERS.get(architecture)
    if wrapper is None:
        return architecture
    inner = whole.get("text_config")
    stated = inner.get("model_type") if isinstance(inner, Mapping) else whole.get("model_type")
    return wrapper.texts.get(str(stated), architecture)


def ties_by_tensors(
    architecture: str, config: Mapping[str, Any], stored: Iterable[str]
) -> dict[str, Any]:
    """A wrapper's text settings, with ``tie_word_embeddings`` as its files have it: configs say it on two
    levels, which differ, and classes have defaults of their own.

    Args:
        config: of the language model.
        stored: names of the checkpoint's tensors; none: the config is believed.
    """
    names = [name for name in stored if name]
    if architecture not in WRAPPERS or not names:
        return dict(config)
    has_head = any(name.startswith(("lm_head.", "language_model.lm_head.")) for name in names)
    return {**config, "tie_word_embeddings": not has_head}
