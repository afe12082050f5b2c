"""Weight-name rules of Mamba 2's mixers."""

from __future__ import annotations

from headrace_core.model import WeightRule
from headrace_models.loading.mapping import ALL_PARTS


def scan_rules(mixer: str, target: str = "layers.{}.mixer") -> tuple[WeightRule, ...]:
    """Rules of Mamba 2's mixers, whose scan has tensors without a module of their own."""
    return (
        WeightRule(mixer, target),
        WeightRule(f"{mixer}.in_proj", f"{target}.in_proj", split=ALL_PARTS),
        WeightRule(f"{mixer}.conv1d", f"{target}.conv", split=ALL_PARTS),
        WeightRule(f"{mixer}.A_log", f"{target}.scan.A_log"),
        WeightRule(f"{mixer}.D", f"{target}.scan.D"),
        WeightRule(f"{mixer}.dt_bias", f"{target}.scan.dt_bias"),
    )
