"""Models that transformers offers and its interfaces do not say enough of to run over a paged cache."""

from __future__ import annotations

from collections.abc import Mapping

REFUSED: Mapping[str, str] = {}
"""``model_type`` of the language model -> why it is refused."""
