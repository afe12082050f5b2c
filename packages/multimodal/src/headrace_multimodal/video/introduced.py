"""Videos whose frames stand behind texts that say when they were, in place of a text that may be no token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace_core.multimodal import MediaPlacement, ProcessedMedia
from headrace_multimodal.images.words import Words
from headrace_multimodal.video.processor import VideoProcessor

MARK = -1
"""Stands for a video in a prompt's tokens."""


@dataclass(frozen=True, slots=True)
class IntroducedVideo(ProcessedMedia):
    """A video whose tokens begin with a special one; the text in front of it is one with what stands
    before."""

    intro: str = ""


class IntroducedVideos(VideoProcessor):
    """A checkpoint without ``tokenizer.json`` takes images only."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        self._words = Words(path)

    def find_video_placeholder(self) -> int | None:
        return MARK if (self.path / "tokenizer.json").is_file() else None

    def introduced(
        self, inputs: Mapping[str, Any], texts: Sequence[str], frame: Sequence[int]
    ) -> IntroducedVideo:
        """A video's tokens.

        Args:
            texts: in front of each frame.
            frame: its tokens, from a special one to another; vectors have the placeholder of images.
        """
        tokens: list[int] = []
        runs: list[tuple[int, int]] = []
        first, number = frame.index(self.placeholder_id), frame.count(self.placeholder_id)
        for index, text in enumerate(texts):
            tokens += self._words.ids(text) if index else []
            runs.append((len(tokens) + first, number))
            tokens += frame
        return IntroducedVideo(inputs, len(tokens), tuple(tokens), tuple(runs), texts[0])

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """The first text becomes one with what stands before the video."""
        intros = [one.intro for one in media if isinstance(one, IntroducedVideo)]
        if intros:
            token_ids = self._words.replaced(token_ids, self.video_text, MARK)
            token_ids = self._words.with_text_before(token_ids, MARK, intros)
        return super().place(token_ids, media)
