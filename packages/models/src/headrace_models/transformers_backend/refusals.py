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

RENAMED_INPUTS: Mapping[str, str] = {"pixel_values_images": "pixel_values"}
"""Tensor of a processor -> argument of ``get_image_features`` that it is."""

_PILLOW, _TORCHVISION = False, True
IMAGES_SERVED: Mapping[str, bool] = {
    "AriaForConditionalGeneration": _PILLOW,
    "DeepseekVLForConditionalGeneration": _PILLOW,
    "DeepseekVLHybridForConditionalGeneration": _PILLOW,
    "Exaone4_5_ForConditionalGeneration": _TORCHVISION,
    "Glm46VForConditionalGeneration": _TORCHVISION,
    "Glm4vForConditionalGeneration": _TORCHVISION,
    "Glm4vMoeForConditionalGeneration": _TORCHVISION,
    "GlmOcrForConditionalGeneration": _TORCHVISION,
    "GotOcr2ForConditionalGeneration": _PILLOW,
    "HyperCLOVAXVisionV2ForConditionalGeneration": _TORCHVISION,
    "JanusForConditionalGeneration": _PILLOW,
    "Kimi_K25ForConditionalGeneration": _TORCHVISION,
    "Llama4ForConditionalGeneration": _TORCHVISION,
    "LlavaNextVideoForConditionalGeneration": _TORCHVISION,
    "PaddleOCRVLForConditionalGeneration": _PILLOW,
    "QianfanOCRForConditionalGeneration": _PILLOW,
    "VideoLlama3ForConditionalGeneration": _TORCHVISION,
    "VideoLlavaForConditionalGeneration": _TORCHVISION,
    "VipLlavaForConditionalGeneration": _PILLOW,
}
"""Architectures whose text has a class of headrace's own, and whose images this serves: chosen for
checkpoints that have a processor. Each was compared with transformers. True: the processor needs
torchvision."""

MIXTURES = frozenset({
    "AriaForConditionalGeneration", "Glm4vMoeForConditionalGeneration",
    "Kimi_K25ForConditionalGeneration", "Llama4ForConditionalGeneration",
})  # fmt: skip
"""Those of :data:`IMAGES_SERVED` with experts, which the backend does not quantize."""
