"""The largest item of a modality, which memory is measured with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.assembly import media
from headrace_core.errors import ConfigError, RequestError
from headrace_core.multimodal import ProcessedMedia
from headrace_core.platform import CpuPlatform
from headrace_engine.config import MultiModalConfig


def test_tokens_without_vectors_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """An item's rows may end in tokens that take no vector; the model gives none for them."""

    asked: list[tuple[str, dict[str, int]]] = []

    class Processor:
        def modalities(self) -> tuple[str, ...]:
            return ("image", "video")

        def largest(self, modality: str, sizes: dict[str, int]) -> ProcessedMedia:
            if sizes.get("width") == 1:
                raise RequestError("too narrow")
            asked.append((modality, sizes))
            return ProcessedMedia({}, 6, (4, 4, 5, 4, 4, 6), ((0, 2), (3, 2)))

    monkeypatch.setattr(media, "media_processor", lambda info: Processor())
    limits = {"image": {"width": 7, "height": None}, "video": {"count": 2, "height": 8}}
    config = SimpleNamespace(
        model=SimpleNamespace(limit_mm_per_prompt=limits),
        scheduler=SimpleNamespace(max_num_batched_tokens=40),
        multimodal=MultiModalConfig(media_io_kwargs={"video": {"num_frames": 9}}),
    )
    info, platform = SimpleNamespace(processor="x", max_model_len=50), CpuPlatform()
    resolved: Any = SimpleNamespace(config=config, info=info, platform=platform)
    make = media.largest_media(resolved)
    assert make is not None
    item = make()[0].item
    assert asked == [
        ("image", {"num_tokens": 50, "width": 7}),
        ("video", {"num_tokens": 40, "num_frames": 9, "height": 8}),
    ]
    for wide in ({"width": 1 << 40}, {"width": 60_000, "height": 60_000}):
        config.model.limit_mm_per_prompt = {"image": wide}
        with pytest.raises(ConfigError, match=r"limit_mm_per_prompt\.image = .*max_image_pixels"):
            media.largest_media(resolved)
    config.model.limit_mm_per_prompt = {"image": {"width": 1}}
    make = media.largest_media(resolved)
    assert make is not None
    with pytest.raises(ConfigError, match=r"limit_mm_per_prompt\.image: too narrow"):
        make()
    vouched = MultiModalConfig(skip_mm_profiling=True)
    config.multimodal = vouched
    assert media.largest_media(resolved) is None
    assert item.num_tokens == 6
    assert item.num_vectors == 4


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_large_item_is_reckoned_from_a_small_one_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    class Processor:
        def modalities(self) -> tuple[str, ...]:
            return ("image",)

        def largest(self, modality: str, sizes: dict[str, int]) -> ProcessedMedia:
            return ProcessedMedia({}, min(3000, sizes["num_tokens"]) // 200 * 200)

    monkeypatch.setattr(media, "media_processor", lambda info: Processor())
    config = SimpleNamespace(
        model=SimpleNamespace(limit_mm_per_prompt={}),
        scheduler=SimpleNamespace(max_num_batched_tokens=512), multimodal=MultiModalConfig(),
    )  # fmt: skip
    resolved: Any = SimpleNamespace(
        config=config, info=SimpleNamespace(processor="x", max_model_len=1200),
        platform=SimpleNamespace(device=device),
    )  # fmt: skip
    make = media.largest_media(resolved)
    assert make is not None
    [found] = make()
    assert (found.item.num_tokens, found.factor) == ((200, 6.0) if device == "cpu" else (1200, 1.0))
