"""Audio files of chats, decoded in child processes that can be killed: :class:`ChatAudioDecoder`.

They take turns, as images and videos do. Uploads to be transcribed have decoders of their own
(:mod:`headrace_multimodal.audio.decoding`).
"""

from __future__ import annotations

import numpy as np

from headrace_core.errors import MissingDependency, UnsupportedFeature
from headrace_core.speech.model import AudioClip
from headrace_multimodal.audio.decoded_limit import HeldAudio
from headrace_multimodal.audio.decoding import GOOD, AudioDecodeJob, AudioLimits, check_libraries
from headrace_multimodal.decoder_pool import GOOD as FIRST_BYTE
from headrace_multimodal.decoder_pool import DecoderPool


class ChatAudioDecoder:
    """Decodes files in a few processes; one that hangs or crashes is replaced. Thread-safe.

    Args:
        limits: of one file.
        sample_rate: of the result.
        processes: how many; so many files are decoded at once. They start with the first file.
    """

    def __init__(
        self, limits: AudioLimits | None = None, *, sample_rate: int = 16_000, processes: int = 1
    ) -> None:
        self.limits = limits or AudioLimits()
        self._sample_rate = sample_rate
        self._held = HeldAudio(max(self.limits.held_seconds, self.limits.seconds))
        self._pool = DecoderPool(
            "headrace_multimodal.audio.decode_worker",
            str(self.limits.file_bytes),
            str(self.limits.seconds),
            str(self.limits.decode_seconds),
            what="audio file",
            max_bytes=self.limits.file_bytes,
            seconds=self.limits.decode_seconds,
            processes=processes,
        )

    def __call__(self, data: bytes, where: str) -> AudioClip:
        """A file as one channel.

        Args:
            data: the file.
            where: request field that errors name.

        Raises:
            UnsupportedFeature: a library is not installed; names it, and the extra.
            RequestError: over a limit, of no known format, damaged, cut off or too slow; says which.
            QueueFull: all processes are busy, or too much sound is in use.
        """
        try:
            check_libraries()
        except MissingDependency as error:
            raise UnsupportedFeature(f"{where}: {error}", param=where) from error
        answer = self._pool.decode(
            AudioDecodeJob(data, self._sample_rate).packed(), where, size=len(data)
        )
        rest = len(GOOD) - len(FIRST_BYTE)  # of the head that keeps samples aligned
        clip = AudioClip(np.frombuffer(answer, np.float32, offset=rest), self._sample_rate)
        self._held.add(clip)
        return clip

    def close(self) -> None:
        """End the processes. Idempotent."""
        self._pool.close()
