"""Damaged and hostile files in place of pictures: each is refused, and the next request is answered."""

from __future__ import annotations

import base64
import io
import os
import random
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from image_checkpoints import data_url, picture, save_qwen2_vl
from PIL import Image
from servers import RunningServer, serving

KINDS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
NUM_DAMAGED = 60 if os.environ.get("HEADRACE_TESTS") == "full" else 12
"""Files of each kind."""


def whole(kind: str) -> bytes:
    buffer = io.BytesIO()
    picture(5, 48, 48).save(buffer, kind)
    return buffer.getvalue()


def damaged(kind: str, draw: random.Random) -> bytes:
    """A file that was cut, or of which bytes were changed, dropped or repeated."""
    data = bytearray(whole(kind))
    for _ in range(draw.randrange(1, 6)):
        at = draw.randrange(len(data))
        match draw.randrange(4):
            case 0:
                data[at] ^= 1 << draw.randrange(8)
            case 1:
                del data[at : at + draw.randrange(1, 40)]
            case 2:
                data[at:at] = data[at : at + draw.randrange(1, 40)]
            case _:
                data = data[: max(1, at)]
    return bytes(data)


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def bomb(side: int) -> bytes:
    """A PNG of a few kilobytes that says it is so large, and is."""
    head = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    rows = zlib.compressobj(9)
    body = b"".join(rows.compress(bytes(1 + side // 8)) for _ in range(side)) + rows.flush()
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def texts(count: int) -> bytes:
    """A PNG with megabytes of compressed text."""
    data = whole("PNG")
    note = b"x\0\0" + zlib.compress(bytes(50 << 20), 9)
    return data[:33] + b"".join(chunk(b"zTXt", note) for _ in range(count)) + data[33:]


def others() -> dict[str, bytes]:
    """Files that are hostile without being damaged; they take a second to compress."""
    return {
        "bomb": bomb(60_000),
        "large": bomb(14_000),
        "texts": texts(3),
        "pdf": b"%PDF-1.4\n" + whole("PNG"),
        "svg": b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>",
        "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n",
        "zip": b"PK\x03\x04" + bytes(100),
        "empty": b"",
        "one byte": b"\x89",
        "tiff": b"II*\0" + bytes(200),
        "head alone": whole("JPEG")[:20],
    }


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder: Path = tmp_path_factory.mktemp("seer")
    save_qwen2_vl(folder)
    words = ("--dtype", "float32", "--max-model-len", "256", "--kv-cache-memory-bytes", "16777216")
    with serving(
        str(folder), *words, "--max-image-pixels", "1000000", "--served-model-name", "seer"
    ) as running:
        yield running


def asked(server: RunningServer, url: str) -> httpx2.Response:
    part = {"type": "image_url", "image_url": {"url": url}}
    body: dict[str, Any] = {
        "model": "seer", "max_tokens": 2, "messages": [{"role": "user", "content": [part]}],
    }  # fmt: skip
    return httpx2.post(f"{server.url}/v1/chat/completions", json=body, timeout=30)


@pytest.mark.req("SEC-07")
@pytest.mark.req("SEC-08")
def test_hostile_files_are_refused_and_harm_nobody(server: RunningServer) -> None:
    """Damage that leaves a readable picture is answered; all else is a 400 that names the part."""
    assert asked(server, data_url(picture(1))).status_code == 200
    draw, answered = random.Random(20261127), 0
    files = [(kind, damaged(kind, draw)) for kind in KINDS for _ in range(NUM_DAMAGED)]
    for name, data in [*files, *others().items()]:
        url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        answer = asked(server, url)
        if answer.status_code == 200:
            with Image.open(io.BytesIO(data)) as image:
                image.load()
            answered += 1
            continue
        assert answer.status_code == 400, (name, answer.text)
        assert "messages[0].content[0].image_url.url" in answer.json()["error"]["message"]
    assert answered < len(files) / 2
    assert asked(server, data_url(picture(1))).status_code == 200
