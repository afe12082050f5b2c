"""Names of layers that guess, beside those of the model in one KV cache."""

from __future__ import annotations

DRAFT_PREFIX = "draft."
"""Begins the name of each attention layer of a draft model or head."""
