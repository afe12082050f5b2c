"""Images of requests, decoded in child processes that can be killed: :class:`ImageDecoder`."""

from __future__ import annotations

import json

import numpy as np

from headrace_multimodal.decoder_pool import DecoderPool
from headrace_multimodal.images.decode_worker import SIZE
from headrace_multimodal.images.pixels import WHITE, Colour, ImageLimits, Pixels


class ImageDecoder:
    """Decodes files in a few processes; one that hangs or crashes is replaced. Thread-safe.

    Args:
        limits: of one file.
        seconds: of processor time to decode one.
        processes: how many; so many files are decoded at once.
        background: what transparent pixels are laid on.
    """

    def __init__(
        self,
        limits: ImageLimits | None = None,
        *,
        seconds: float = 10.0,
        processes: int = 2,
        background: Colour = WHITE,
    ) -> None:
        self.limits = limits or ImageLimits()
        self._pool = DecoderPool(
            "headrace_multimodal.images.decode_worker",
            str(self.limits.encoded_bytes),
            str(self.limits.pixels),
            str(seconds),
            json.dumps(background),
            what="image",
            max_bytes=self.limits.encoded_bytes,
            seconds=seconds,
            processes=processes,
        )

    def __call__(self, data: bytes, where: str) -> Pixels:
        """A file's pixels.

        Args:
            data: the file.
            where: request field that errors name.

        Raises:
            RequestError: over a limit, of no known format, damaged, or too slow.
            QueueFull: all processes are busy.
        """
        answer = self._pool.decode(data, where)
        height, width = SIZE.unpack_from(answer)
        return np.frombuffer(answer, np.uint8, offset=SIZE.size).reshape(height, width, 3)

    def close(self) -> None:
        """End the processes. Idempotent."""
        self._pool.close()
