"""Media as callers give them -> items with their content and its hash."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_core.multimodal import MediaItem
from headrace_core.speech.model import AudioClip

if TYPE_CHECKING:
    import numpy.typing as npt

AudioDecode = Callable[[bytes, str], AudioClip]
"""(a file's bytes, its name for messages) -> sound. Blocks; raises RequestError."""
ImageDecode = Callable[[bytes, str], "npt.NDArray[Any]"]
"""(a file's bytes, where it stands for messages) -> [height, width, 3] uint8. Blocks; raises RequestError."""
ImagePixels = Callable[[object, str], "npt.NDArray[Any]"]
"""The same of an image that is an object: PIL's, an array or a tensor."""
VideoFrames = tuple["npt.NDArray[Any]", Mapping[str, Any]]
"""Frames [frames, height, width, 3] uint8 of a video, and what is known of them."""
VideoDecode = Callable[[bytes, str], VideoFrames]
"""(a file's bytes, where it stands for messages) -> sampled frames. Blocks; raises RequestError."""
Videos = Callable[[object, str], Sequence[VideoFrames]]
"""(one video or several as objects, where they stand) -> each of them. Raises RequestError."""
Fetch = Callable[[str, str, str], bytes]
"""(URL, modality, where it stands) -> a file's bytes. Blocks; raises RequestError."""
ContentHash = Callable[[str, "npt.NDArray[Any]", Mapping[str, Any]], str]
"""(modality, decoded content, options) -> 256 bits in hex."""
During = Callable[["Future[None]", Callable[[], object]], AbstractContextManager[None]]
"""(done once nobody waits for the item, called when it is decoded) -> what holds while this
thread reads it. Readers end with CancelledError then."""
FIELD = "multi_modal_data"


class FileReading(NamedTuple):
    """Readers of the files and objects that requests bring; None: the engine takes none of the kind."""

    audio: AudioDecode | None = None
    image: ImageDecode | None = None
    pixels: ImagePixels | None = None
    video: VideoDecode | None = None
    videos: Videos | None = None
    fetch: Fetch | None = None
    during: During = lambda abandoned, admit: nullcontext()
    close: Callable[[], None] = lambda: None
    """Ends the processes and threads that they hold."""


NO_FILES = FileReading()


class Later:
    """An item that is fetched and decoded when its content is needed.

    Args:
        get: gives its file, or the object itself. Blocks; raises RequestError.
        decode: makes of that what ``multi_modal_data`` has. Blocks; raises RequestError.
    """

    def __init__(self, get: Callable[[], object], decode: Callable[[object], object]) -> None:
        self._get, self._decode = get, decode
        self._fetched: object = None

    def fetch(self) -> None:
        """Have its file."""
        if self._fetched is None:
            self._fetched = self._get()

    def __call__(self) -> object:
        """The item."""
        self.fetch()
        return self._decode(self._fetched)


class ItemReader:
    """Reads items of each modality.

    Args:
        files: reads what objects need more for than numpy.
        content_hash: names an item's content.
    """

    def __init__(self, files: FileReading, content_hash: ContentHash) -> None:
        self._files, self._hash = files, content_hash

    def split(self, modality: str, given: object) -> Sequence[object]:
        """The items of a modality: one, or a list. A list of pictures is one video.

        Raises: UnsupportedFeature: the engine reads no videos.
        """
        listed = given if isinstance(given, list) else [given]
        alone = all(one is None or isinstance(one, Later) for one in listed)
        if modality != "video" or alone:
            return listed
        if any(one is None for one in listed):
            return [one if one is None else self._clips(one)[0] for one in listed]
        return self._clips(given)

    def decoded(self, modality: str, given: Later) -> object:
        """A file's content, as :meth:`read` takes it. Blocks.

        Raises: RequestError: it cannot be fetched or decoded.
        """
        given.fetch()
        found = given()
        return self._clips(found)[0] if modality == "video" else found

    def read(self, modality: str, given: object, options: Mapping[str, Any]) -> MediaItem:
        """One item.

        Args:
            given: of :meth:`split`, decoded.
            options: the processor's, which the hash covers.

        Raises:
            RequestError: it is none of the modality.
        """
        read = {"audio": self._audio, "image": self._image, "video": self._video}[modality]
        return read(given, options)

    def _clips(self, given: object) -> Sequence[VideoFrames]:
        """One video or several; a list of pictures is one."""
        if self._files.videos is None:
            raise UnsupportedFeature(
                f"{FIELD}.video: this engine reads no videos", param=f"{FIELD}.video"
            )
        return self._files.videos(given, f"{FIELD}.video")

    def _video(self, given: Any, options: Mapping[str, Any]) -> MediaItem:
        """An item from frames and their metadata, which may change what stands in the prompt."""
        frames, metadata = given
        name = self._hash("video", frames, {**options, "metadata": dict(metadata)})
        return MediaItem("video", frames, name, metadata)

    def _image(self, given: object, options: Mapping[str, Any]) -> MediaItem:
        """An item from PIL's image, an array or a tensor."""
        if self._files.pixels is None:
            raise UnsupportedFeature(
                f"{FIELD}.image: this engine reads no images", param=f"{FIELD}.image"
            )
        pixels = self._files.pixels(given, f"{FIELD}.image")
        return MediaItem("image", pixels, self._hash("image", pixels, options), {})

    def _audio(self, given: object, options: Mapping[str, Any]) -> MediaItem:
        """An item from a waveform, or from a waveform and its rate."""
        import numpy as np  # not before there is a waveform: a server starts without

        metadata: dict[str, Any] = {}
        if isinstance(given, tuple) and len(given) == 2:
            given, rate = given
            if isinstance(rate, bool) or not isinstance(rate, int | float) or not rate > 0:
                raise RequestError(
                    f"{FIELD}.audio = {rate!r:.100}: must be (waveform, samples a second)",
                    param=f"{FIELD}.audio",
                )
            metadata["sample_rate"] = rate
        try:
            samples = np.asarray(given)
        except (TypeError, ValueError, RuntimeError) as error:
            # Ragged lists, or a tensor that numpy cannot read.
            raise RequestError(
                f"{FIELD}.audio: {type(given).__name__} is not an array ({error}); must be a "
                "waveform, or (waveform, samples a second)",
                param=f"{FIELD}.audio",
            ) from error
        if samples.dtype.kind != "f" or samples.ndim not in (1, 2) or not samples.size:
            raise RequestError(
                f"{FIELD}.audio: an array of shape {list(samples.shape)} and dtype {samples.dtype}; "
                "must be [samples] or [channels, samples] of floats from -1 to 1, and not empty",
                param=f"{FIELD}.audio",
            )
        mono = samples if samples.ndim == 1 else samples.mean(axis=0)
        mono = np.ascontiguousarray(mono, np.float32)
        name = self._hash("audio", mono, {**options, **metadata})
        return MediaItem("audio", mono, name, metadata)
