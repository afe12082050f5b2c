"""Layers that attend to a window, as configs state them."""

from __future__ import annotations

from headrace_core.errors import UnsupportedModel
from headrace_models.config.settings import Settings


def upper_layer_window(settings: Settings, index: int) -> int | None:
    """The window of layer ``index``, as Qwen's configs state it."""
    window = settings.optional_integer("sliding_window")
    if window is None or not settings.flag("use_sliding_window", False):
        return None
    kinds = settings.layer_types()
    if kinds is not None:
        return window if kinds[index] == "sliding_attention" else None
    return window if index >= settings.integer("max_window_layers", 28, minimum=0) else None


def has_window_by_pattern(settings: Settings, index: int) -> bool:
    """True if layer ``index`` has a window, as EXAONE's configs state it: ``sliding_window_pattern`` is a
    period, or letters, L for a layer with a window."""
    kinds = settings.layer_types()
    if kinds is not None:
        return kinds[index] == "sliding_attention"
    if settings.config.get("sliding_window") is None:
        return False
    pattern = settings.config.get("sliding_window_pattern")
    if not isinstance(pattern, str):
        return (index + 1) % settings.integer("sliding_window_pattern", 4) != 0
    if not pattern or set(pattern) - {"L", "G"}:
        raise UnsupportedModel(
            f"config.json: sliding_window_pattern = {pattern!r:.200}: must be an integer, or "
            "letters L and G"
        )
    return pattern[index % len(pattern)] == "L"
