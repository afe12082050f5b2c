"""Facts of some models that transformers' interfaces do not tell."""

from __future__ import annotations

from collections.abc import Mapping

REFUSED: Mapping[str, str] = {}
"""``model_type`` of the language model -> why it is refused before it is built."""

KEPT: Mapping[str, tuple[str, ...]] = {"longcat_flash": ("router.classifier",)}
"""``model_type`` -> ends of the names of linear layers whose weight the code reads by itself."""

_BOTH_WAYS = "tokens of an image attend to each other in both directions"
IMAGES_REFUSED: Mapping[str, str] = {
    "gemma4": _BOTH_WAYS,
    "gemma4_unified": _BOTH_WAYS,
    "ovis2": "tokens beside an image's get vectors of its tower",
}
"""``model_type`` of a checkpoint -> why its images are refused, though nothing else shows it."""

PROJECTORS: Mapping[str, str] = {"llama4": "multi_modal_projector"}
"""``model_type`` of a checkpoint -> module through which ``get_image_features`` does not lead its vectors."""

IMAGES_SERVED = frozenset({
    "AriaForConditionalGeneration", "DeepseekVLForConditionalGeneration",
    "DeepseekVLHybridForConditionalGeneration", "Exaone4_5_ForConditionalGeneration", "FuyuForCausalLM",
    "Glm46VForConditionalGeneration", "Glm4vForConditionalGeneration", "Glm4vMoeForConditionalGeneration",
    "GlmOcrForConditionalGeneration", "GotOcr2ForConditionalGeneration",
    "HyperCLOVAXVisionV2ForConditionalGeneration", "Idefics2ForConditionalGeneration",
    "JanusForConditionalGeneration", "Kimi_K25ForConditionalGeneration", "Llama4ForConditionalGeneration",
    "LlavaNextVideoForConditionalGeneration", "PaddleOCRVLForConditionalGeneration",
    "QianfanOCRForConditionalGeneration", "VideoLlama3ForConditionalGeneration",
    "VideoLlavaForConditionalGeneration", "VipLlavaForConditionalGeneration",
})  # fmt: skip
"""Architectures whose text has a class of headrace's own, and whose images this serves: chosen for
checkpoints that have a processor. Each was compared with transformers."""
