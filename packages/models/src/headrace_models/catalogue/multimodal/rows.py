"""Every architecture that joins a language model with towers, by name."""

from __future__ import annotations

from collections.abc import Mapping

from headrace_models.catalogue.multimodal import (
    audio,
    intern_line,
    llava_line,
    omni,
    other_vision,
    qwen_line,
    retrieval,
)
from headrace_models.catalogue.multimodal.derived import derived
from headrace_models.catalogue.multimodal.wrapper import Wrapper

_KINDS = (audio, intern_line, llava_line, omni, other_vision, qwen_line, retrieval)
_WHOLE: Mapping[str, Wrapper] = {
    row.name: row for row in sorted((r for kind in _KINDS for r in kind.ROWS), key=lambda r: r.name)
}
WRAPPERS: Mapping[str, Wrapper] = {**_WHOLE, **{row.name: row for row in derived(_WHOLE)}}
"""Name of the class -> wrapper."""
_NEEDS_IMAGE = (
    "its class takes no prompt without an image, and headrace does not serve its images yet"
)
_MAKES_MAPS = (
    "it makes maps of satellite images, by the library terratorch, and no text or vectors; headrace has no "
    "task for that yet"
)
REFUSED: Mapping[str, str] = {
    "InstructBlipVideoForConditionalGeneration": _NEEDS_IMAGE,
    "InternLM2VEForCausalLM": (
        "it is Mono-InternVL's decoder, whose layers have weights of their own for tokens of images; "
        "headrace has no such layers yet"
    ),
    "PrithviGeoSpatialMAE": _MAKES_MAPS,
    "Terratorch": _MAKES_MAPS,
}
"""Class of a whole, or of the language model in it -> why not even its text is served."""
