"""A model for headrace, as a package of its own."""

from __future__ import annotations

from headrace_core.plugins import ModelRegistry


def register() -> None:
    """Called once in every process of headrace. The class is imported when a checkpoint needs it."""
    ModelRegistry.register_model("LanternForCausalLM", "lantern.model:LanternForCausalLM")
