"""Readers of media, as configuration and environment have them."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.assembly.media_files import fetch_seconds, file_reading, follows_redirects
from headrace_core.config import ModelConfig
from headrace_core.errors import ConfigError
from headrace_engine.config import EngineConfig, MultiModalConfig


def test_times_of_transfers_are_variables() -> None:
    environ = {"HEADRACE_VIDEO_FETCH_TIMEOUT": "7.5", "HEADRACE_AUDIO_FETCH_TIMEOUT": ""}
    assert fetch_seconds(environ) == {"video": 7.5}
    for given in ("0", "-1", "soon", "nan", "inf"):
        with pytest.raises(ConfigError, match="HEADRACE_IMAGE_FETCH_TIMEOUT"):
            fetch_seconds({"HEADRACE_IMAGE_FETCH_TIMEOUT": given})


def test_redirects_are_a_variable() -> None:
    assert [follows_redirects({}), follows_redirects({"HEADRACE_MEDIA_URL_ALLOW_REDIRECTS": "0"})] == [
        True, False,
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="ALLOW_REDIRECTS = 'no'"):
        follows_redirects({"HEADRACE_MEDIA_URL_ALLOW_REDIRECTS": "no"})


def test_a_model_of_images_alone_reads_no_videos() -> None:
    reading = file_reading(_config(), None, ("image",))
    assert reading.audio is None
    assert reading.video is None
    assert reading.videos is None
    assert reading.image is not None
    reading.close()


def test_transparent_pixels_are_laid_on_the_stated_colour() -> None:
    from PIL import Image

    io = {"image": {"rgba_background_color": [10, 20, 30]}}
    clear = Image.new("RGBA", (2, 2), (200, 200, 200, 0))
    whole = Image.new("RGB", (2, 2), (200, 200, 200))
    reading = file_reading(_config(media_io_kwargs=io), None, ("image",))
    try:
        assert reading.pixels is not None
        assert reading.pixels(clear, "image")[0, 0].tolist() == [10, 20, 30]
        assert reading.pixels(whole, "image")[0, 0].tolist() == [200, 200, 200]
        assert reading.image is not None
        assert reading.image(_png(clear), "image")[0, 0].tolist() == [10, 20, 30]
    finally:
        reading.close()


def _config(**multimodal: Any) -> EngineConfig:
    return EngineConfig(model=ModelConfig(model="m"), multimodal=MultiModalConfig(**multimodal))


def _png(image: object) -> bytes:
    import io

    buffer = io.BytesIO()
    image.save(buffer, "PNG")  # type: ignore[attr-defined]
    return buffer.getvalue()
