"""Which architectures pool by themselves, and how. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from headrace_core import plugins
from headrace_core.errors import PluginError
from headrace_core.pooling import PoolingTraits

_ENCODER = PoolingTraits("embed", "CLS", pooling_types=("CLS", "MEAN", "LAST", "ALL"))
_BERT = dataclasses.replace(_ENCODER, token_types=True)
_ROBERTA = dataclasses.replace(_ENCODER, token_types=True, positions_follow_padding=True)
_MPNET = dataclasses.replace(_ENCODER, positions_follow_padding=True)


def _classifier(encoder: PoolingTraits) -> PoolingTraits:
    """Their heads were trained on the first token."""
    return dataclasses.replace(encoder, purpose="classify", pooling_types=("CLS",))


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


TRAITS: Mapping[str, PoolingTraits] = {
    **_line("Bert", _BERT),
    **_line("Camembert", _ROBERTA),
    **_line("DistilBert", _ENCODER),
    **_line("Electra", _BERT),
    **_line("MPNet", _MPNET),
    **_line("Roberta", _ROBERTA),
    **_line("XLMRoberta", _ROBERTA),
    "RobertaForMaskedLM": _ROBERTA,
}
"""Architecture -> traits, of headrace's own classes."""


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
