"""A row of the catalogue: an architecture that joins a language model with towers for media."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace_core.multimodal import MODALITIES, media_limit

IMAGES: Mapping[str, tuple[str, ...]] = {"vision_config": ("image",)}
VIDEOS: Mapping[str, tuple[str, ...]] = {"vision_config": ("image", "video")}
AUDIO: Mapping[str, tuple[str, ...]] = {"audio_config": ("audio",)}
"""Values of :attr:`Wrapper.takes`."""
_THINKER_KEY = "thinker_config"
_NESTED = ("text_config", "llm_config", "language_config")
"""Keys of a config that hold the language model's settings: of transformers, and of remote code."""
PREFIXES: Mapping[str, str] = {
    "language_model.": "",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "text_model.": "",
    "thinker.model.": "model.",
    "thinker.lm_head.": "lm_head.",
}
"""Beginning of a tensor's name in a wrapper -> in the language model's own class: before transformers 4.52,
and since; in the Idefics line; in Emu3; in Qwen's omni models."""


@dataclass(frozen=True, slots=True)
class Wrapper:
    """An architecture that has a language model in it. Plain data."""

    name: str
    """The class, as ``architectures`` in ``config.json`` spells it."""
    texts: Mapping[str, str]
    """``model_type`` of the language model's config (or :attr:`text_key`) -> the architecture that serves
    it."""
    models: str
    """Name of the models, as people know them."""
    passed_over: tuple[str, ...] = ("vision_tower", "multi_modal_projector")
    """Modules beside the language model, as names of tensors begin, perhaps after ``model.``."""
    renames: tuple[tuple[str, str | None], ...] = ()
    """Spellings of the published files, in this order: a regular expression of names of tensors -> what
    takes its place before anything else is looked at; None: the tensor is passed over."""
    settings_of_towers: tuple[str, ...] = ()
    """Keys of the whole's config that mean a tower, though a language model's config has them too."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the language model that the class fixes, whatever ``config.json`` says of them."""
    text_key: str = "model_type"
    """The key of the config by which :attr:`texts` are told apart."""
    known_by: Mapping[str, str] = field(default_factory=dict)
    """Key that a config has -> what :attr:`text_key` is where the config leaves it out."""
    towers: Mapping[str, str] = field(default_factory=dict)
    """``model_type`` of the first part in :attr:`takes` ("": any) -> the class that joins towers of that
    kind with the language model, as ``module:Class`` below ``headrace_models.families``."""
    takes: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: IMAGES)
    """Key of a tower's part of the config -> the modalities that the tower takes."""
    needs_media: str = ""
    """Why every prompt must bring an image; "": text alone is served, too."""
    processor: str = ""
    """Entry of ``headrace.multimodal_processors``; "": the class's own name."""
    transposes_experts: bool = False
    """All experts' matrices may be in one tensor with its last two dimensions exchanged."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the language model that configs may leave out."""
    shared: tuple[str, ...] = ()
    """Settings of the whole's config that hold for the language model, whatever its own part says."""
    companions: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Key of the config that names another checkpoint, which has a part -> the part's key, and what its
    tensors' names begin with in the whole."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Modality, or several joined by ``+`` -> the folder, below the checkpoint's, of the low-rank adapter for
    prompts that bring media of it."""
    more_tokens: int = 0
    """Tokens behind the head's that prompts may have and answers may not (they mark media), where
    ``vocab_size`` leaves them out."""
    task: str = "generate"
    """``generate`` or ``pool``, as in :class:`~headrace_models.catalogue.row.Architecture`."""

    @property
    def media(self) -> tuple[str, ...]:
        """Modalities that prompts may bring, with towers of the kinds that are served."""
        taken = {modality for part in self.takes.values() for modality in part}
        return tuple(m for m in MODALITIES if self.towers and m in taken)

    def media_of(self, whole: Mapping[str, Any]) -> tuple[str, ...]:
        """Those of :attr:`media` that go into towers which a config has; all, where it says none.

        Args:
            whole: ``config.json``.
        """
        thinker = thinker_of(whole)
        stated = {key for key in self.takes if thinker.get(key) is not None} or set(self.takes)
        return tuple(m for m in self.media if any(m in self.takes[key] for key in stated))

    def tower_of(self, whole: Mapping[str, Any]) -> str | None:
        """The entry of :attr:`towers` for a config; None: its media are not served."""
        part = thinker_of(whole).get(next(iter(self.takes)))
        kind = str(part.get("model_type", "")) if isinstance(part, Mapping) else ""
        return self.towers.get(kind, self.towers.get(""))

    def text_kind(self, stated: Mapping[str, Any]) -> str:
        """The key of :attr:`texts` for a config.

        Args:
            stated: the language model's part of it, or the whole where that is no part.
        """
        found = stated.get(self.text_key)
        if found is None:
            found = next((kind for key, kind in self.known_by.items() if key in stated), None)
        return str(found)

    def without_towers(self, whole: Mapping[str, Any], limits: Mapping[str, Any]) -> dict[str, Any]:
        """A config without the parts of towers all of whose modalities are limited to 0; they are neither
        built nor loaded then.

        Args:
            whole: ``config.json``.
            limits: see :func:`headrace_core.multimodal.media_limit`.
        """
        unused = {
            part
            for part, modalities in self.takes.items()
            if self.towers and not any(media_limit(limits, modality) for modality in modalities)
        }
        kept = {key: value for key, value in whole.items() if key not in unused}
        thinker = thinker_of(whole)
        if thinker is not whole:
            kept[_THINKER_KEY] = {k: v for k, v in thinker.items() if k not in unused}
        return kept

    def tower_name(self, tensor: str) -> str | None:
        """A tensor's name below its tower's; None: it belongs to the language model, or to nothing."""
        for pattern, replaced in self.renames:
            if replaced is not None:
                tensor = re.sub(pattern, replaced, tensor)
            elif re.search(pattern, tensor):
                return None
        plain = tensor.removeprefix("thinker.").removeprefix("model.")
        mine = any(f"{plain}.".startswith(f"{module}.") for module in self.passed_over)
        return plain if mine else None

    def own_name(self, tensor: str) -> str | None:
        """A tensor's name in the language model's own class; None if it belongs to another module."""
        for pattern, replaced in self.renames:
            if replaced is not None:
                tensor = re.sub(pattern, replaced, tensor)
            elif re.search(pattern, tensor):
                return None
        plain = tensor.removeprefix("thinker.").removeprefix("model.") + "."
        if any(plain.startswith(f"{module}.") for module in self.passed_over):
            return None
        for prefix, own in PREFIXES.items():
            if tensor.startswith(prefix):
                return own + tensor.removeprefix(prefix)
        return tensor


def nested_settings(whole: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The language model's part of a config; None: it is the whole.

    Args:
        whole: ``config.json``.
    """
    around = thinker_of(whole)
    return next((around[key] for key in _NESTED if isinstance(around.get(key), Mapping)), None)


def thinker_of(whole: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of an omni model's config that reads and writes text; any other config is that part.

    Args:
        whole: ``config.json``.
    """
    thinker = whole.get(_THINKER_KEY)
    return thinker if isinstance(thinker, Mapping) else whole
