"""Traits of a class that generates, once it is converted to pool. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace_core.errors import ConfigError
from headrace_core.pooling import PoolerConfig, PoolingTraits
from headrace_models.architectures import generates, is_bidirectional
from headrace_models.config.settings import Settings
from headrace_models.generating import generating_traits
from headrace_models.pooling.pair_forms import PAIR_FORMS
from headrace_models.reranker import token_classifier

_WHOLE = ("LAST", "MEAN", "CLS", "ALL")


def converted_traits(
    architecture: str, config: Mapping[str, Any], convert: str, user: PoolerConfig
) -> PoolingTraits:
    """Traits of a decoder that pools.

    Args:
        config: the text part of ``config.json``.
        convert: ``embed`` or ``classify``.

    Raises:
        ConfigError: the conversion does not fit; names the field.
    """
    if generating_traits(architecture).is_encoder_decoder:
        raise ConfigError(
            f"model.runner = 'pooling': {architecture} is an encoder-decoder, which cannot be made to "
            "pool; must be generate or auto",
            field="model.runner",
        )
    causal = not is_bidirectional(architecture, config)
    if architecture in PAIR_FORMS and convert == "classify":
        return PoolingTraits(
            "classify", "LAST", ("LAST",), causal=causal, num_labels=1, activation="sigmoid"
        )
    if user.pooling_type == "STEP" and generates(architecture):
        vocab = Settings(config).integer("vocab_size")
        return PoolingTraits(
            "token_classify",
            "STEP",
            ("STEP",),
            causal=causal,
            num_labels=vocab,
            activation="softmax",
        )
    if convert == "embed":
        return PoolingTraits("embed", "LAST", _WHOLE, causal=causal)
    if convert != "classify":
        raise ConfigError(
            f"model.convert = {convert!r}: {architecture} pools only if it is converted: must be "
            "auto, embed or classify",
            field="model.convert",
        )
    if architecture.endswith("ForTokenClassification"):
        return PoolingTraits("token_classify", "ALL", ("ALL", "STEP"), causal=causal)
    if generates(architecture) and token_classifier(config) is None:
        raise ConfigError(
            f"model.convert = 'classify': {architecture} has no classifier. hf_overrides can make one "
            'of rows of its head: {"classifier_from_token": ["no", "yes"], "method": '
            '"from_2_way_softmax"}',
            field="model.convert",
        )
    return PoolingTraits("classify", "LAST", (*_WHOLE, "STEP"), causal=causal)
