from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from headrace_core.errors import RequestError
from headrace_multimodal import ImageLimits, content_hash, decode_image
from headrace_multimodal.images.decoding import ImageDecoder
from headrace_multimodal.images.pixels import pixels_of


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
    with pytest.raises(RequestError, match=r"30000 x 10000|too many pixels"):
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


def _shades() -> Image.Image:
    """Red above, blue below; [6, 4]."""
    pixels = np.zeros((6, 4, 3), np.uint8)
    pixels[:3, :, 0] = pixels[3:, :, 2] = 200
    return Image.fromarray(pixels)


def test_an_image_is_turned_as_the_camera_says():
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    buffer = io.BytesIO()
    _shades().save(buffer, "PNG", exif=exif)
    data = decode_image(buffer.getvalue(), ImageLimits()).data
    assert data.shape == (4, 6, 3)
    assert data[0, 0].tolist() == [0, 0, 200]
    assert data[0, -1].tolist() == [200, 0, 0]


@pytest.mark.parametrize("mode", ["CMYK", "L", "1", "P", "LA", "RGBA", "I;16"])
def test_every_mode_becomes_rgb(mode):
    """A grey stays the grey that it is, whatever the depth."""
    wanted = 255 if mode == "1" else 200
    if mode == "I;16":
        image = Image.fromarray(np.full((3, 5), 200 << 8, np.uint16))
    else:
        image = Image.new("L", (5, 3), wanted).convert(mode)
    kind = "JPEG" if mode == "CMYK" else "PNG"
    data = decode_image(_encoded(image, kind), ImageLimits()).data
    assert data.shape == (3, 5, 3)
    assert np.abs(data.astype(int) - wanted).max() < 4


def test_of_an_animation_the_first_frame_is_taken():
    frames = [Image.new("RGB", (4, 4), shade) for shade in ("red", "blue")]
    for kind in ("GIF", "WEBP"):
        buffer = io.BytesIO()
        frames[0].save(buffer, kind, save_all=True, append_images=frames[1:], lossless=True)
        assert decode_image(buffer.getvalue(), ImageLimits()).data[0, 0, 0] > 200


@pytest.mark.parametrize(
    "form",
    [
        lambda image: image,
        np.asarray,
        lambda image: np.asarray(image).transpose(2, 0, 1),
        lambda image: image.convert("RGBA"),
    ],
)
def test_objects_are_the_pixels_that_they_show(form):
    found = pixels_of(form(_shades()), "image")
    assert found.tolist() == np.asarray(_shades()).tolist()


@pytest.mark.parametrize(
    "given", ["picture.png", 3, np.zeros((2, 2, 3)), np.zeros((0, 4, 3), np.uint8), [[1], [2, 3]]]
)
def test_other_objects_are_refused_by_name(given):
    with pytest.raises(RequestError, match=r"image: .*PIL's image"):
        pixels_of(given, "image")


def test_a_decoder_of_processes_gives_the_same_pixels_and_survives_damage():
    decode = ImageDecoder(ImageLimits(pixels=100), processes=1)
    try:
        data = _encoded(_shades())
        assert decode(data, "here").tolist() == np.asarray(_shades()).tolist()
        for bad, message in (
            (data[: len(data) * 2 // 3], "here: image is damaged"),
            (b"nothing", "here: image is not one of PNG"),
            (_encoded(Image.new("L", (20, 20))), "here: image of 20 x 20 pixels"),
        ):
            with pytest.raises(RequestError, match=message):
                decode(bad, "here")
        assert decode(data, "here").shape == (6, 4, 3)
    finally:
        decode.close()
