"""Videos of requests, decoded in child processes that can be killed: :class:`VideoDecoder`."""

from __future__ import annotations

import importlib.util
import json
import struct
from dataclasses import asdict

import numpy as np

from headrace_core.errors import UnsupportedFeature
from headrace_multimodal.decoder_pool import DecoderPool
from headrace_multimodal.video.clip import Clip
from headrace_multimodal.video.limits import VideoLimits
from headrace_multimodal.video.sampling import FrameSampling

INSTALL = "pip install 'headrace[video]'"
_LENGTH = struct.Struct("<I")


class VideoDecoder:
    """Decodes files in a few processes; one that hangs or crashes is replaced. Thread-safe.

    Args:
        limits: of one file.
        sampling: frames that are taken; no other is kept in memory.
        seconds: of processor time to decode one.
        processes: how many; so many files are decoded at once.
    """

    def __init__(
        self,
        limits: VideoLimits | None = None,
        sampling: FrameSampling | None = None,
        *,
        seconds: float = 60.0,
        processes: int = 1,
    ) -> None:
        self.limits = limits or VideoLimits()
        self._pool = DecoderPool(
            "headrace_multimodal.video.decode_worker",
            json.dumps(asdict(self.limits)),
            json.dumps(asdict(sampling or FrameSampling())),
            str(seconds),
            what="video",
            max_bytes=self.limits.encoded_bytes,
            seconds=seconds,
            processes=processes,
        )

    def __call__(self, data: bytes, where: str) -> Clip:
        """A file's sampled frames.

        Args:
            data: the file.
            where: request field that errors name.

        Raises:
            UnsupportedFeature: PyAV is not installed.
            RequestError: over a limit, of no known format, damaged, cut off or too slow; says which.
            QueueFull: all processes are busy.
        """
        if importlib.util.find_spec("av") is None:
            raise UnsupportedFeature(
                f"{where}: decoding videos needs the library 'av', which is not installed: {INSTALL}",
                param=where,
            )
        answer = self._pool.decode(data, where)
        (length,) = _LENGTH.unpack_from(answer)
        begin = _LENGTH.size + length
        metadata = json.loads(bytes(answer[_LENGTH.size : begin]))
        shape = len(metadata["frames_indices"]), metadata["height"], metadata["width"], 3
        return Clip(np.frombuffer(answer, np.uint8, offset=begin).reshape(shape), metadata)

    def close(self) -> None:
        """End the processes. Idempotent."""
        self._pool.close()
