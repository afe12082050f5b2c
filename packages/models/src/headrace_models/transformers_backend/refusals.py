"""Facts of some models that transformers' interfaces do not tell."""

from __future__ import annotations

from collections.abc import Mapping

REFUSED: Mapping[str, str] = {}
"""``model_type`` of the language model -> why it is refused before it is built."""

KEPT: Mapping[str, tuple[str, ...]] = {"longcat_flash": ("router.classifier",)}
"""``model_type`` -> ends of the names of linear layers whose weight the code reads by itself."""

IMAGES_REFUSED: Mapping[str, str] = {}
"""``model_type`` of a checkpoint -> why its images are refused, though nothing else shows it."""
