"""Models that score or embed with a model that answers: its class, with another head; and second spellings of
classes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from headrace_models.catalogue.multimodal.wrapper import IMAGES, Wrapper

_SCORERS = (
    ("JinaVLForRanking", "Qwen2VLForConditionalGeneration", "jina-reranker-m0"),
    ("JinaVLForSequenceClassification", "Qwen2VLForConditionalGeneration", "jina-reranker-m0"),
    ("Qwen3VLForSequenceClassification", "Qwen3VLForConditionalGeneration", "Qwen3-VL-Reranker"),
)
"""(class, the class that it is with labels for a head, models)."""
_SPELLINGS = (("LightOnOCRForConditionalGeneration", "LightOnOcrForConditionalGeneration"),)
"""(class as first published, the same in transformers)."""
_RETRIEVERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "ColPaliForRetrieval": (
        "PaliGemmaForConditionalGeneration",
        {"models": "ColPali", "needs_media": "", "processor": "", "fixed": {"is_causal": False}},
    ),
    "ColQwen2ForRetrieval": (
        "Qwen2VLForConditionalGeneration",
        {"models": "ColQwen2", "takes": IMAGES},
    ),
}
"""Class -> the class that is in it under the name ``vlm``, and fields that differ from that one's."""
_IN_RETRIEVERS = ((r"^vlm\.", ""), (r"^embedding_proj_layer\.", "linear."))


def derived(wrappers: Mapping[str, Wrapper]) -> Iterable[Wrapper]:
    """Rows that differ in little from others.

    Args:
        wrappers: those, by name.
    """
    for name, base, models in _SCORERS:
        yield replace(wrappers[base], name=name, models=models, processor=base)
    for name, base in _SPELLINGS:
        yield replace(wrappers[base], name=name, processor=base)
    for name, (base, differences) in _RETRIEVERS.items():
        renames = (*_IN_RETRIEVERS, *wrappers[base].renames)
        yield replace(wrappers[base], name=name, renames=renames, task="pool", **differences)
