"""Facts that the name of an architecture tells. No torch.

The names of a family are its stem and an ending: ``Qwen3ForCausalLM``, ``Qwen3Model``,
``Qwen3ForSequenceClassification``. Families of decoders register the name that generates; the others
are served by the same class, made to pool (:mod:`headrace_models.convert`).
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

GENERATING = ("ForCausalLM", "LMHeadModel")
"""Ends of the names of language models."""
POOLING = (
    "BidirectionalForSequenceClassification", "BidirectionalModel", "TextForSequenceClassification",
    "TextModel", "ForSequenceClassification", "ForTokenClassification", "ForTextEncoding",
    "EmbeddingModel", "ForRewardModeling", "Model",
)  # fmt: skip
"""Ends of the names of what is made of language models, longest first."""
MASKED = "ForMaskedLM"
"""End of the names of encoders with the head of their pre-training."""


def served_by(architecture: str, known: Container[str]) -> str | None:
    """The registered name whose class serves an architecture; None if there is none."""
    if architecture in known:
        return architecture
    for ending in POOLING:
        if architecture.endswith(ending):
            names = (architecture.removesuffix(ending) + end for end in GENERATING)
            found = next((name for name in names if name in known), None)
            if found is not None:
                return found
    encoder = without_head(architecture)
    return encoder if encoder in known else None


def without_head(architecture: str) -> str:
    """``MPNetForMaskedLM`` -> ``MPNetModel``: many repositories of embedders keep the name of the
    pre-training, whose head nobody needs. Other names stay."""
    stem = architecture.removesuffix(MASKED)
    return architecture if stem == architecture else f"{stem}Model"


def generates(architecture: str) -> bool:
    """True if the name is that of a language model."""
    return architecture.endswith(GENERATING)


def is_bidirectional(architecture: str, config: Mapping[str, Any]) -> bool:
    """True if a decoder's tokens see those after them, too."""
    return (
        "Bidirectional" in architecture
        or config.get("is_causal") is False
        or config.get("use_bidirectional_attention") in (True, "all")
    )
