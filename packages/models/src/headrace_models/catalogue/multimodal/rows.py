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
REFUSED: Mapping[str, str] = {
    "InstructBlipVideoForConditionalGeneration": _NEEDS_IMAGE,
}
"""Class that joins a known language model with towers -> why not even its text is served."""
