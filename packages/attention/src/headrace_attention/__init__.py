"""Attention backends: ``paged``, ``latent`` and, without a cache, ``varlen`` (through core's ops),
``sdpa`` (through torch).

Nothing is imported here; backends are loaded by entry point
(:func:`headrace_attention.selection.choose_backend`).
"""

__version__ = "0.1.0"
