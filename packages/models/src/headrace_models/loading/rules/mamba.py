"""Weight-name rules of Mamba's module tree."""

from __future__ import annotations

from headrace_core.model import WeightRule
from headrace_models.loading.mapping import ALL_PARTS

BACKBONE_RULES = (
    WeightRule("backbone.embeddings", "embed"),
    WeightRule("backbone.embedding", "embed"),
    WeightRule("backbone.layers.{}.norm", "layers.{}.norm"),
    WeightRule("backbone.norm_f", "final_norm"),
    WeightRule("lm_head", "head"),
)
"""The embedding's second name is that of the first checkpoints."""


def scan_rules(mixer: str, target: str = "layers.{}.mixer") -> tuple[WeightRule, ...]:
    """Rules of Mamba's mixers, whose scan has tensors without a module of their own."""
    return (
        WeightRule(mixer, target),
        WeightRule(f"{mixer}.conv1d", f"{target}.conv"),
        WeightRule(f"{mixer}.in_proj", f"{target}.in_proj", split=ALL_PARTS),
        WeightRule(f"{mixer}.A_log", f"{target}.scan.A_log"),
        WeightRule(f"{mixer}.D", f"{target}.scan.D"),
        WeightRule(f"{mixer}.dt_proj.bias", f"{target}.scan.dt_bias"),
    )
