"""Attention backends: ``paged`` (through core's ops) and ``sdpa`` (through torch).

Nothing is imported here; backends are loaded by entry point
(:func:`headrace_core.attention.choose_backend`).
"""

__version__ = "0.1.0"
