"""Decoding images: ``python -m headrace_multimodal.images.decode_worker MAX_BYTES MAX_PIXELS SECONDS
BACKGROUND``.

The child of :class:`~headrace_multimodal.images.decoding.ImageDecoder`: with limits on memory and processor
time, and without leave to write files. Answers height and width, then the pixels; or what is wrong.
"""

from __future__ import annotations

import json
import resource
import struct
import sys

from headrace_core.errors import RequestError
from headrace_core.reliability.sandbox_process import address_space, limit_time, serve
from headrace_multimodal.decoder_pool import DAMAGED, GOOD
from headrace_multimodal.images.pixels import ImageLimits, Pixels, decode_image
from headrace_multimodal.memory_limit import limit_memory

SPARE_BYTES = 256 << 20
"""Memory beyond what the process has when it is ready, the file and its pixels."""
SIZE = struct.Struct("<II")
"""Height and width."""


def main() -> None:
    """Answer until the input ends."""
    limits = ImageLimits(encoded_bytes=int(sys.argv[1]), pixels=int(sys.argv[2]))
    seconds, background = float(sys.argv[3]), tuple(json.loads(sys.argv[4]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    most = address_space() + SPARE_BYTES + 2 * limits.encoded_bytes + 16 * limits.pixels
    limit_memory(most)

    def answer(message: bytes) -> bytes:
        limit_time(seconds)
        try:
            pixels: Pixels = decode_image(message, limits, background=background).data
        except RequestError as error:
            return DAMAGED + str(error).encode()
        except MemoryError:
            return DAMAGED + b"image: it needs too much memory"
        return GOOD + SIZE.pack(*pixels.shape[:2]) + pixels.tobytes()

    serve(answer)


if __name__ == "__main__":
    main()
