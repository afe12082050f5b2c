"""Architectures that pool by themselves, and how. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from headrace_core import plugins
from headrace_core.errors import PluginError, UnsupportedModel
from headrace_core.pooling import PoolingTraits
from headrace_models.architectures import generates
from headrace_models.catalogue.multimodal import WRAPPERS
from headrace_models.pooling.sentence_transformers import SentenceModules

_ENCODER = PoolingTraits("embed", "CLS", pooling_types=("CLS", "MEAN", "LAST", "ALL"))
_BERT = dataclasses.replace(_ENCODER, token_types=True)
_ROBERTA = dataclasses.replace(_ENCODER, token_types=True, positions_follow_padding=True)
_MPNET = dataclasses.replace(_ENCODER, positions_follow_padding=True)


def _classifier(encoder: PoolingTraits) -> PoolingTraits:
    """Their heads were trained on the first token."""
    return dataclasses.replace(
        encoder, purpose="classify", pooling_type="CLS", pooling_types=("CLS",)
    )


def _token_classifier(encoder: PoolingTraits) -> PoolingTraits:
    return dataclasses.replace(
        encoder, purpose="token_classify", pooling_type="ALL", pooling_types=("ALL", "STEP")
    )


def _line(prefix: str, encoder: PoolingTraits) -> dict[str, PoolingTraits]:
    return {
        f"{prefix}Model": encoder,
        f"{prefix}ForSequenceClassification": _classifier(encoder),
        f"{prefix}ForTokenClassification": _token_classifier(encoder),
    }


_MEAN = dataclasses.replace(_BERT, pooling_type="MEAN")
_MODERN_CLASSIFIER = dataclasses.replace(_classifier(_ENCODER), pooling_types=("CLS", "MEAN"))
_SPLADE = dataclasses.replace(
    _BERT,
    pooling_type="ALL",
    pooling_types=("ALL",),
    tasks=("embed",),
    normalize=False,
    sparse=True,
)
_CLIP = PoolingTraits("embed", "ALL", ("ALL",), causal=True, tasks=("embed",))
_SIGLIP = PoolingTraits("embed", "LAST", ("LAST",), tasks=("embed",))
_REWARD = PoolingTraits(
    "classify",
    "ALL",
    ("ALL", "LAST", "STEP"),
    causal=True,
    num_labels=1,
    activation="identity",
)
_PROCESS_REWARD = PoolingTraits(
    "token_classify",
    "STEP",
    ("STEP", "ALL"),
    causal=True,
    num_labels=2,
    activation="softmax",
    step_tag_id=151_651,
)
"""Qwen2.5-Math-PRM ends a step with ``<extra_0>``."""

TRAITS: Mapping[str, PoolingTraits] = {
    **_line("Bert", _BERT),
    **_line("Camembert", _ROBERTA),
    **_line("DistilBert", _ENCODER),
    **_line("Electra", _BERT),
    **_line("MPNet", _MPNET),
    **_line("Roberta", _ROBERTA),
    **_line("XLMRoberta", _ROBERTA),
    **_line("Gte", _BERT),
    **_line("GteNew", _BERT),
    **_line("JinaEmbeddingsV3", _MEAN),
    **_line("ModernBert", _ENCODER),
    "BertForMaskedLM": _SPLADE,
    "BertSpladeSparseEmbeddingModel": _SPLADE,
    "DistilBertForMaskedLM": dataclasses.replace(_SPLADE, token_types=False),
    "BgeM3EmbeddingModel": dataclasses.replace(
        _ROBERTA, tasks=("embed", "token_embed", "token_classify")
    ),
    "CLIPModel": _CLIP,
    "CLIPTextModelWithProjection": _CLIP,
    "GritLM": PoolingTraits("embed", "MEAN", ("MEAN",), tasks=("embed",)),
    "HF_ColBERT": _BERT,
    "ModernBertForSequenceClassification": _MODERN_CLASSIFIER,
    "NomicBertModel": _MEAN,
    "Qwen2ForProcessRewardModel": _PROCESS_REWARD,
    "Qwen2ForRewardModel": _REWARD,
    "RobertaForMaskedLM": _ROBERTA,
    "Siglip2Model": _SIGLIP,
    "SiglipModel": _SIGLIP,
    "SiglipTextModel": _SIGLIP,
    "RobertaSpladeSparseEmbeddingModel": dataclasses.replace(
        _SPLADE,
        token_types=_ROBERTA.token_types,
        positions_follow_padding=_ROBERTA.positions_follow_padding,
    ),
}
"""Architecture -> traits, of headrace's own classes."""
SIZE_KEYS: Mapping[str, str] = {
    "CLIPModel": "projection_dim",
    "CLIPTextModelWithProjection": "projection_dim",
    "Siglip2Model": "projection_size",
    "SiglipModel": "projection_size",
    "SiglipTextModel": "projection_size",
}
"""Architecture -> key of its config that says how long an embedding is, of those that project it."""


_CONFIGURED: Mapping[str, str] = {"avg": "MEAN", "mean": "MEAN", "cls": "CLS", "last": "LAST"}
_CONFIG_KEYS = ("classifier_pooling", "pooling")
"""Config keys of ModernBERT's classifiers, and of NVIDIA's bidirectional Llamas."""


def configured(traits: PoolingTraits, config: Mapping[str, Any]) -> PoolingTraits:
    """The traits with the pooling type that ``config.json`` names, if it names one.

    Raises:
        UnsupportedModel: the class cannot do it.
    """
    for key in _CONFIG_KEYS:
        stated = config.get(key)
        if stated is None or (key == "classifier_pooling" and traits.purpose != "classify"):
            continue
        kind = _CONFIGURED.get(str(stated))
        if kind not in traits.pooling_types:
            accepted = [name for name, k in _CONFIGURED.items() if k in traits.pooling_types]
            raise UnsupportedModel(
                f"config.json: {key} = {stated!r}: must be one of {', '.join(accepted)}"
            )
        return dataclasses.replace(traits, pooling_type=kind)
    return traits


def said_by_files(
    architecture: str, traits: PoolingTraits, sentence: SentenceModules
) -> PoolingTraits:
    """The traits as Sentence Transformers' modules change them.

    Raises:
        UnsupportedModel: a head that guesses words would be pooled without their saying so.
    """
    if traits.sparse and architecture.endswith("ForMaskedLM") and not sentence.sparse:
        raise UnsupportedModel(
            f"{architecture} pools only as SPLADE, and no SpladePooling in modules.json says that it was "
            "trained so. If it was, hf_overrides can say it of a BERT: "
            '{"architectures": ["BertSpladeSparseEmbeddingModel"]}; if the encoder alone is wanted: '
            f'{{"architectures": ["{architecture.removesuffix("ForMaskedLM")}Model"]}}'
        )
    if sentence.sparse and not traits.sparse:
        raise UnsupportedModel(
            f"SpladePooling of {architecture}: must be that of BertForMaskedLM, "
            "DistilBertForMaskedLM or RobertaForMaskedLM"
        )
    if sentence.score_tokens and not generates(architecture) and architecture not in WRAPPERS:
        raise UnsupportedModel(
            f"LogitScore of {architecture}: must be that of a language model (...ForCausalLM), or of one "
            "with towers"
        )
    if not sentence.multi_vector:
        return traits
    return dataclasses.replace(
        traits, pooling_type="ALL", pooling_types=("ALL",), tasks=("token_embed",)
    )


def pooling_traits(architecture: str) -> PoolingTraits | None:
    """None: it generates, or is not known to pool.

    Raises:
        PluginError: a class of another distribution says it with an object of another type.
    """
    known = TRAITS.get(architecture)
    plugin = plugins.installed("headrace.models").get(architecture)
    if known is not None or plugin is None or plugin.distribution.startswith("headrace-models "):
        return known
    traits = getattr(plugin.load(), "pooling_traits", None)
    if traits is not None and not isinstance(traits, PoolingTraits):
        raise PluginError(f"{plugin.target}.pooling_traits = {traits!r}: must be a PoolingTraits")
    return traits
