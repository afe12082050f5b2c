"""Adapters of the demo models, with random factors."""

from __future__ import annotations

from pathlib import Path

from headrace import demo
from headrace_testing.model.adapters import write_adapter

HIDDEN, INNER, KEYS = 256, 704, 128
MODULES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.v_proj": (KEYS, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER),
}  # fmt: skip
"""Name in a layer of the demo model -> outputs and inputs."""


def demo_adapter(folder: Path, seed: int, rank: int = 8, base: str = "headrace-demo") -> str:
    """Write an adapter that changes the demo model's answers; returns its path."""
    modules = {
        f"model.layers.{layer}.{module}": shape
        for layer in range(5)
        for module, shape in MODULES.items()
    }
    write_adapter(folder, modules, rank, seed, scale=1.0, base_model_name_or_path=base)
    return str(folder)


def vision_demo_adapter(folder: Path, seed: int) -> str:
    """Write an adapter of the language model of the demo model that sees; returns its path."""
    names = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj")
    modules = {
        f"language_model.model.layers.{layer}.{name}": (192, 192)
        for layer in range(4)
        for name in names
    }
    base = "headrace-demo-vision"
    write_adapter(folder, modules, 8, seed, scale=1.0, base_model_name_or_path=base)
    return str(folder)


def demo_folder(which: str = "text") -> str:
    """Path of a demo model."""
    return str(demo.path(which))
