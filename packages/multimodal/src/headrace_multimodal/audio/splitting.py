"""Long audio is cut where it is quietest, so that no word is; no sample is lost or in two clips."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace_core.errors import RequestError
from headrace_core.speech.model import AudioClip, SpeechToTextConfig


def split(audio: AudioClip, config: SpeechToTextConfig) -> list[AudioClip]:
    """Clips that a model takes, in order; views of the audio, which they make up together.

    Each clip is as long as it may be but for at most ``overlap_chunk_second``: the cut lies in the
    middle of the quietest stretch of ``min_energy_split_window_size`` samples in there, the last one
    of several.

    Raises:
        RequestError: it is too long and may not be cut.
    """
    limit, window = config.max_audio_clip_s, config.min_energy_split_window_size
    if limit is None or audio.seconds <= limit:
        return [audio]
    if window is None:
        raise RequestError(
            f"file: {audio.seconds:.1f} seconds of audio; at most {limit:g} are taken by this model, "
            "which wants longer audio whole",
            param="file",
        )
    samples, rate = audio.samples, audio.sample_rate
    longest, search = int(limit * rate), int(config.overlap_chunk_second * rate)
    clips, start = list[AudioClip](), 0
    while len(samples) - start > longest:
        end = start + longest
        first = max(start + 1, end - search)
        cut = first + quietest(samples[first:end], window)
        clips.append(AudioClip(samples[start:cut], rate))
        start = cut
    return [*clips, AudioClip(samples[start:], rate)]


def quietest(samples: npt.NDArray[np.float32], window: int) -> int:
    """The middle of the stretch with the least energy, the last of several.

    Args:
        samples: [n], n > 0.
        window: samples of the stretch; all of them, if that are fewer.
    """
    window = min(window, len(samples))
    # Sums of squares up to each sample: a stretch's energy is the difference of two.
    sums = np.concatenate([[0.0], np.cumsum(np.square(samples, dtype=np.float64))])
    energies = sums[window:] - sums[:-window]
    last = len(energies) - 1 - int(energies[::-1].argmin())
    return last + window // 2
