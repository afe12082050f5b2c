"""Families whose checkpoints carry layers for predicting further tokens. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace_core.errors import ConfigError

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "deepseek_mtp": ("DeepseekV3ForCausalLM",),
    "glm4_moe_mtp": ("Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM"),
    "mimo_mtp": ("MiMoForCausalLM",),
    "qwen3_next_mtp": (
        "Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForCausalLM",
    ),
    "ernie_mtp": ("Ernie4_5_MoeForCausalLM",),
    "longcat_flash_mtp": ("LongcatFlashForCausalLM",),
    "pangu_ultra_moe_mtp": ("PanguUltraMoEForCausalLM",),
}
"""Name of the method -> architectures that have it."""
_COUNT = "num_nextn_predict_layers"
_COUNTS: Mapping[str, tuple[tuple[str, ...], int | None]] = {
    "qwen3_next_mtp": (("mtp_num_hidden_layers",), 1),
    "longcat_flash_mtp": ((_COUNT,), 1),
    "pangu_ultra_moe_mtp": ((_COUNT, "num_mtp_layers"), None),
}
MTP_NAMES = frozenset(("mtp", *FAMILIES))


def num_mtp_layers(family: str, config: Mapping[str, Any]) -> tuple[str, Any]:
    """The key with which a config says how many such layers there are, and its value, unchecked: None if it
    says nothing, and the family means none then."""
    keys, default = _COUNTS.get(family, ((_COUNT,), None))
    key = next((key for key in keys if config.get(key) is not None), keys[0])
    return key, config.get(key, default)


def mtp_of(name: str, architecture: str) -> str:
    """The family of an architecture.

    Args:
        name: of the method, as the user typed it.

    Raises:
        ConfigError: the architecture has no such layers, or others than the name says.
    """
    family = next((f for f, known in FAMILIES.items() if architecture in known), None)
    if family is not None and name in ("mtp", family):
        return family
    field = "speculative_config.method"
    served = sorted(FAMILIES.get(name) or (a for known in FAMILIES.values() for a in known))
    raise ConfigError(
        f"{field} = {name!r}: must be left out for {architecture}; it is for {', '.join(served)}",
        field=field,
    )
