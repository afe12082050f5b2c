"""The largest item of a modality, which memory is measured with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.assembly import media
from headrace_core.multimodal import ProcessedMedia


def test_tokens_without_vectors_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """An item's rows may end in tokens that take no vector; the model gives none for them."""

    class Processor:
        def modalities(self) -> tuple[str, ...]:
            return ("image",)

        def largest(self, modality: str) -> ProcessedMedia:
            return ProcessedMedia({}, 6, (4, 4, 5, 4, 4, 6), ((0, 2), (3, 2)))

    monkeypatch.setattr(media, "media_processor", lambda info: Processor())
    config = SimpleNamespace(model=SimpleNamespace(limit_mm_per_prompt={}))
    resolved: Any = SimpleNamespace(config=config, info=SimpleNamespace(processor="x"))
    make = media.largest_media(resolved)
    assert make is not None
    (item,) = make()
    assert item.num_tokens == 6
    assert item.num_vectors == 4
