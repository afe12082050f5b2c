"""InstructBLIP's images: BLIP-2's, each with the prompt's text in tokens of the Q-Former.

Dai et al. 2023, arXiv:2305.06500.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import ProcessedMedia
from headrace_multimodal.images.blip2 import Blip2Processor
from headrace_multimodal.images.pixels import Pixels
from headrace_multimodal.images.processor import packed, part
from headrace_multimodal.images.words import Words

QFORMER_IDS = "qformer_input_ids"
"""Model input: int64 [tokens of the text]."""
FOLDER = "qformer_tokenizer"
"""Where the tokenizer of the Q-Former lies, below the checkpoint's folder."""
_TEXT = "text"
"""The option in which the prompt's text comes; none that a request may set."""
_BERT: Mapping[str, int] = {"vocab_size": 30522, "max_position_embeddings": 512}
"""Where configs leave them out."""


class _PromptText(str):
    """A text that :meth:`InstructBlipProcessor.options_for_text` has put into options."""


class InstructBlipProcessor(Blip2Processor):
    """What becomes of an image depends on the text that it stands beside."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        stated = {**_BERT, **part(config, "qformer_config")}
        for key in _BERT:
            if type(stated[key]) is not int or stated[key] < 1:
                raise UnsupportedModel(
                    f"config.json: qformer_config.{key} = {stated[key]!r}: must be a number from 1"
                )
        self._words, self._longest = stated["vocab_size"], stated["max_position_embeddings"]
        self._tokenizer = Words(path / FOLDER)
        self._ids("")

    def options_for_text(self, text: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Options for images of a prompt that has this text.

        Raises: RequestError: the Q-Former takes no text of that length.
        """
        text = _PromptText(text.replace(self.text, "").strip())
        self._ids(text)
        return {_TEXT: text, **options}

    def accepted(self) -> Sequence[str]:
        return (_TEXT,)

    def one(self, pixels: Pixels, options: Mapping[str, Any]) -> ProcessedMedia:
        """An image beside the longest text, where options have none."""
        text, made = options.get(_TEXT), super().one(pixels, options)
        if text is not None and not isinstance(text, _PromptText):
            raise RequestError(
                f"mm_processor_kwargs.{_TEXT}: no such option; this model's are none",
                param="mm_processor_kwargs",
            )
        ids = [0] * self._longest if text is None else self._ids(text)
        inputs = {**made.inputs, QFORMER_IDS: packed(np.array(ids, np.int64))}
        return ProcessedMedia(inputs, made.num_tokens)

    def _ids(self, text: str) -> list[int]:
        found = self._tokenizer.whole(text)
        if len(found) > self._longest:
            raise RequestError(
                f"prompt: its text has {len(found)} tokens of the Q-Former; it reads at most "
                f"{self._longest} (config.json: qformer_config.max_position_embeddings)",
                param="prompt",
            )
        if max(found, default=0) >= self._words:
            raise RequestError(
                f"prompt: its text has the token {max(found)} of {FOLDER}, and the Q-Former has "
                f"{self._words} (config.json: qformer_config.vocab_size)",
                param="prompt",
            )
        return found
