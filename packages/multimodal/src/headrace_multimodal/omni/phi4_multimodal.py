"""Phi-4-multimodal's media processor: images and recordings, marked by numbers in a prompt's text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace_core.errors import RequestError
from headrace_core.multimodal import MediaPlacement, ProcessedMedia
from headrace_multimodal.audio.features import INPUT_FEATURES
from headrace_multimodal.audio.phi4_multimodal import BESIDE_IMAGES, Phi4Recordings
from headrace_multimodal.images.processor import PIXEL_VALUES
from headrace_multimodal.omni.by_modality import ByModality, Part
from headrace_multimodal.tiles.phi4_multimodal import CROPS, Phi4Images
from headrace_multimodal.tiles.pieces import PromptPieces


class Phi4MultimodalProcessor(ByModality):
    """Prompts have ``<|image_1|>`` and ``<|audio_1|>``, which are text and no tokens, for the next image
    and the next recording, whatever the number; or the tokens of vectors. A tower that the config leaves
    out takes nothing.

    Args:
        config: ``config.json``, whole.
        path: the checkpoint's folder.
    """

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        parts, self._tokens = [], dict[str, int]()
        if "vision_config" in config or "embd_layer" in config:
            images = Phi4Images(config, path)
            parts.append(Part(images, (CROPS,), {PIXEL_VALUES: images.placeholder_id}))
            self._tokens["image"] = images.placeholder_id
        if "audio_config" in config or "audio_processor" in config:
            heard = Phi4Recordings(config, path)
            parts.append(Part(heard, (BESIDE_IMAGES,), {INPUT_FEATURES: heard.audio_token}))
            self._tokens["audio"] = heard.audio_token
        super().__init__(parts, {})
        self._pieces = PromptPieces(path)
        self._mark = re.compile(rf"<\|({'|'.join(self._tokens)})_\d+\|>")

    def options_for_numbers(
        self, numbers: Mapping[str, int], options: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Recordings are projected otherwise beside images.

        Raises: RequestError: a request sets that itself.
        """
        if BESIDE_IMAGES in options:
            raise RequestError(
                f"mm_processor_kwargs.{BESIDE_IMAGES}: no such option; this model's are {CROPS}",
                param="mm_processor_kwargs",
            )
        if numbers.get("image") and numbers.get("audio"):
            return {**options, BESIDE_IMAGES: True}
        return options

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """Raises: RequestError: items and their marks are not as many."""
        marks = set(self._tokens.values())
        if media and sum(token in marks for token in token_ids) < len(media):
            token_ids = self._with_tokens(token_ids)
        return super().place(token_ids, media)

    def _with_tokens(self, token_ids: Sequence[int]) -> list[int]:
        """With a token in place of each mark that is text."""
        texts, kinds = self._pieces.around(token_ids, self._mark)
        found = list(texts[0])
        for kind, text in zip(kinds, texts[1:], strict=True):
            assert kind is not None
            found += [self._tokens[kind], *text]
        return found
