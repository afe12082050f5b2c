from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from headrace_core.errors import RequestError
from headrace_multimodal import ImageLimits, content_hash, decode_image


def _encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "BMP", "GIF", "WEBP", "JPEG"])
def test_formats_decode_to_rgb(kind):
    item = decode_image(_encoded(Image.new("RGB", (4, 3), (255, 0, 0)), kind), ImageLimits())
    assert item.data.shape == (3, 4, 3)
    assert abs(int(item.data[0, 0, 0]) - 255) < 4
    assert item.metadata == {"width": 4, "height": 3}


def test_transparency_is_laid_on_white():
    item = decode_image(_encoded(Image.new("RGBA", (2, 2), (0, 0, 0, 0))), ImageLimits())
    assert item.data.min() == 255


@pytest.mark.req("SEC-08")
@pytest.mark.parametrize("data", [b"", b"hello", b"%PDF-1.4", b"<svg/>", b"%!PS-Adobe"])
def test_other_formats_are_refused(data):
    with pytest.raises(RequestError, match="PNG"):
        decode_image(data, ImageLimits())


@pytest.mark.req("SEC-07")
def test_pixels_are_counted_before_they_are_expanded():
    data = _encoded(Image.new("1", (30_000, 10_000)))
    assert len(data) < 100_000
    with pytest.raises(RequestError, match=r"30000 x 10000|too large"):
        decode_image(data, ImageLimits(pixels=1_000_000))


@pytest.mark.req("SEC-07")
def test_encoded_size_is_bounded():
    with pytest.raises(RequestError, match="at most 10"):
        decode_image(b"x" * 11, ImageLimits(encoded_bytes=10))


@pytest.mark.req("SEC-08")
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_damaged_files_are_refused_as_requests(data):
    noise = np.random.default_rng(0).integers(0, 255, (24, 24, 3), dtype=np.uint8)
    whole = bytearray(_encoded(Image.fromarray(noise)))
    for _ in range(data.draw(st.integers(1, 8))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(whole)))
    try:
        item = decode_image(bytes(whole[:cut]), ImageLimits(pixels=10_000))
    except RequestError:
        return
    assert item.data.ndim == 3


@pytest.mark.req("SEC-23")
def test_hashes_tell_shape_type_options_and_modality_apart():
    data = np.arange(16, dtype=np.uint8)
    hashes = [
        content_hash("image", data),
        content_hash("image", data.reshape(4, 4)),
        content_hash("image", data.reshape(2, 8)),
        content_hash("image", data.view(np.int8)),
        content_hash("audio", data),
        content_hash("image", data, {"crop": True}),
    ]
    assert len(set(hashes)) == len(hashes)
    assert content_hash("image", data) == hashes[0]
    assert len(hashes[0]) == 64


def test_hash_does_not_depend_on_memory_order():
    data = np.arange(12).reshape(3, 4)
    assert content_hash("image", data) == content_hash("image", np.asfortranarray(data))
