"""Mixtures of experts by the keys of ERNIE 4.5's configs, which its models of text and of images share.

Baidu 2025, ERNIE 4.5 technical report.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace_core.model import WeightRule
from headrace_models.config.settings import MAX_EXPERTS, MAX_LAYERS, Settings
from headrace_models.layers.decoders.moe import MOE_RULES
from headrace_models.layers.moe.router import Routing
from headrace_models.loading.rules.moe import router_rules

_CORRECTION = "moe_statics.e_score_correction_bias"

ERNIE_MOE_RULES = (
    *MOE_RULES,
    *router_rules(correction=f"model.layers.{{}}.mlp.{_CORRECTION}"),
    WeightRule(
        f"model.layers.{{}}.mlp.gate.{_CORRECTION}", "layers.{}.mlp.router.correction"
    ),  # as transformers 5 calls it
)
IGNORED_WEIGHTS: Mapping[str, str] = {r"model\.mtp_.*": "predicts several tokens at once"}


def is_dense_by_interval(settings: Settings, index: int) -> bool:
    """True if layer ``index`` has an ordinary MLP: outside of the first and last mixture, and off
    ``moe_layer_interval``."""
    every = settings.integer("moe_layer_interval", 1)
    first = settings.integer("moe_layer_start_index", 1, minimum=0)
    last = settings.integer("moe_layer_end_index", -1, minimum=-1, maximum=MAX_LAYERS)
    return (index + 1) % every != 0 or index < first or (last != -1 and index > last)


def ernie_routing(settings: Settings) -> Routing:
    """The likeliest experts of a softmax, their weights divided by the sum."""
    return Routing(
        num_experts=settings.integer("moe_num_experts", maximum=MAX_EXPERTS),
        top_k=settings.integer("moe_k", 6),
        renormalise=True,
    )


def num_shared_experts(settings: Settings) -> int:
    """Number of experts that all tokens go to."""
    return settings.integer("moe_num_shared_experts", 2, minimum=0)


def corrected_router(settings: Settings) -> Mapping[str, Any]:
    """Arguments of :class:`~headrace_models.layers.moe.sparse_moe.SparseMoE`: the choice of experts, and
    not their weight, has a learned term for each expert, stored as [1, experts]."""
    return {
        "corrected": True,
        "correction_shape": (1, settings.integer("moe_num_experts")),
        "exact_router": True,
    }
