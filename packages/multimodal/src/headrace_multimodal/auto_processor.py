"""Images of models that headrace has no processor for, by the checkpoint's own of transformers.

An item is processed alone, in a prompt that is its placeholder and nothing else, and what the processor
makes of that is put in place of the placeholder of any prompt. So that this is what it would have made of
the whole prompt, two pictures of other sizes are tried together and alone when a checkpoint is loaded: a
processor that pads images to a common size, or numbers them, is refused.

No code of the checkpoint runs. It is the entry ``transformers`` of ``headrace.multimodal_processors``.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from headrace_core.arrays import PackedArray
from headrace_core.errors import MissingDependency, RequestError, UnsupportedModel
from headrace_core.multimodal import MediaItem, MediaPlacement, Modality, ProcessedMedia
from headrace_multimodal.embeds_facts import IMAGE_SIZES, check_facts, stated_size
from headrace_multimodal.placeholders import expanded

INSTALL = "pip install 'headrace-multimodal[transformers]'"
_WITHOUT = "Its text alone is served with --limit-mm-per-prompt '{\"image\": 0}'"
_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "labels")
"""What processors give beside the tensors of images."""
_OURS = frozenset({
    "return_tensors", "device", "input_data_format", "data_format", "disable_grouping", "backend",
    "return_metadata", "return_row_col_info",
})  # fmt: skip
"""Options of image processors that are about the form of their results."""
_TRIED = ((72, 100), (130, 60))
"""Height and width of the pictures that are tried together."""
_LARGE = ((224, 224), (512, 512), (1024, 1024), (2048, 2048), (2048, 256), (256, 2048))
"""Sizes among which the largest item is looked for."""


def _is_flag(value: object) -> bool:
    return type(value) is bool


def _are_colours(value: object) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) == 3
        and all(type(number) in (int, float) and 1e-3 <= number <= 1e3 for number in value)
    )


_HARMLESS: Mapping[str, Callable[[object], bool]] = {
    "do_normalize": _is_flag, "do_rescale": _is_flag, "do_convert_rgb": _is_flag,
    "image_mean": _are_colours, "image_std": _are_colours,
}  # fmt: skip
"""Options that change numbers and no shape -> whether a value is good."""


class _Made(NamedTuple):
    """A processor's result for one prompt."""

    ids: list[int]
    arrays: dict[str, npt.NDArray[Any]]


class AutoMediaProcessor:
    """See the module, and :class:`headrace_core.multimodal.MediaProcessor`.

    Args:
        config: ``config.json``, whole.
        path: the checkpoint's folder.

    Raises:
        MissingDependency: transformers is not installed.
        UnsupportedModel: the folder has no processor that transformers can load without running the
            checkpoint's code, or items cannot be processed one by one.
    """

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        self._name = str((config.get("architectures") or ["?"])[0])
        self._processor = _load(path)
        self._one_at_a_time = threading.Lock()  # its tokenizer sets padding before each call
        self._text, self._mark = self._placeholder(config)
        self._vector = _stated(config, self._mark)
        around = self._tokens(self._text)
        if around.count(self._mark) != 1:
            raise self._refused(f"the placeholder {self._text!r} is not one token of its tokenizer")
        at = around.index(self._mark)
        self._front, self._behind = around[:at], around[at + 1 :]
        self._check_alone()

    embeds_width = 1

    def modalities(self) -> Sequence[Modality]:
        return ("image",)

    def process(
        self, items: Sequence[MediaItem], options: Mapping[str, Any]
    ) -> list[ProcessedMedia]:
        """Raises: RequestError: an option is unknown, or the processor does not take it or the image."""
        known = self._options()
        unknown = sorted(set(options) - known)
        if unknown:
            raise RequestError(
                f"mm_processor_kwargs.{unknown[0]}: no such option; this model's are "
                f"{', '.join(sorted(known)) or 'none'}",
                param="mm_processor_kwargs",
            )
        for name, value in options.items():
            self._check_option(name, value)
        return [self._one(Image.fromarray(item.data), options) for item in items]

    def largest(self, modality: Modality, sizes: Mapping[str, int]) -> ProcessedMedia:
        """A blank image of the stated ``height`` and ``width``; or of some sizes the one of most
        tokens, or else of most memory."""
        stated = {"height", "width"} <= sizes.keys()
        tried = [(sizes["height"], sizes["width"])] if stated else _LARGE
        made = [self._one(Image.new("RGB", (width, height)), {}) for height, width in tried]
        most = sizes.get("num_tokens", sys.maxsize)
        fitting = [item for item in made if item.num_tokens <= most] or made[:1]
        return max(fitting, key=lambda item: (item.num_tokens, _size(item)))

    def embedded(
        self, modality: Modality, num_vectors: int, facts: Mapping[str, Any]
    ) -> ProcessedMedia:
        """A blank image of the stated ``image_sizes``, height and width, without its numbers in floating
        point; see :class:`headrace_core.multimodal.TakesEmbeds`."""
        check_facts(facts, (IMAGE_SIZES,))
        height, width = stated_size(facts)
        whole = self._one(Image.new("RGB", (width, height)), {})
        kept = {name: a for name, a in whole.inputs.items() if not a.dtype.startswith("float")}
        return replace(whole, inputs=kept)

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        """See :class:`headrace_core.multimodal.MediaProcessor`."""
        return (self._mark, self._vector)

    def placeholder(self, modality: Modality, index: int) -> str:
        return self._text

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """See :func:`headrace_multimodal.placeholders.expanded`."""
        return expanded(token_ids, media, self._mark)

    def _placeholder(self, config: Mapping[str, Any]) -> tuple[str, int]:
        tokenizer = getattr(self._processor, "tokenizer", None)
        if tokenizer is None or getattr(self._processor, "image_processor", None) is None:
            raise self._refused("it does not have a tokenizer and an image processor")
        text = (
            getattr(self._processor, "image_placeholder_token", None)
            or getattr(self._processor, "image_token", None)
            or getattr(tokenizer, "image_token", None)
        )
        text = getattr(text, "content", text)
        number = tokenizer.convert_tokens_to_ids(str(text)) if text else None
        if number is None:
            raise self._refused(
                f"its image_token is {text!r}, not a token that stands for an image in prompts"
            )
        return str(text), int(number)

    def _tokens(self, text: str) -> list[int]:
        with self._one_at_a_time:
            return [int(token) for token in self._processor.tokenizer(text)["input_ids"]]

    def _options(self) -> frozenset[str]:
        """Names of the options of its image processor."""
        stated = getattr(self._processor.image_processor, "valid_kwargs", None)
        found: set[str] = set()
        for kind in getattr(stated, "__mro__", (stated,)):
            found |= set(getattr(kind, "__annotations__", None) or ())
        return frozenset(found) - _OURS

    def _check_option(self, name: str, value: object) -> None:
        """No option may ask for more than the checkpoint's own value, nor for other steps: a tower takes what
        it was made for, and clients choose no amount of memory.

        Raises: RequestError: it does.
        """
        own = getattr(self._processor.image_processor, name, None)
        good = _HARMLESS.get(name)
        if _is_within(value, own) or (good is not None and good(value)):
            return
        accepted = f"the checkpoint's own, {_plain(own)!r:.100}, or whole numbers from 1 up to it"
        if good is not None:
            accepted = "true or false" if good is _is_flag else "three numbers from 0.001 to 1000"
        raise RequestError(
            f"mm_processor_kwargs.{name} = {value!r:.100}: must be {accepted}",
            param="mm_processor_kwargs",
        )

    def _one(self, picture: Image.Image, options: Mapping[str, Any]) -> ProcessedMedia:
        try:
            made = self._call(self._text, [picture], options)
        except Exception as error:  # the library raises what it likes
            raise RequestError(
                f"{type(self._processor).__name__} does not take an image of {picture.width} x "
                f"{picture.height} pixels with mm_processor_kwargs {dict(options)!r:.200}: {error}",
                param="mm_processor_kwargs" if options else "multi_modal_data",
            ) from error
        ids = self._own_ids(made.ids)
        inputs = {name: _packed(array) for name, array in made.arrays.items()}
        return ProcessedMedia(inputs, len(ids), tuple(ids), self._runs(ids))

    def _call(
        self, text: str, pictures: Sequence[Image.Image], options: Mapping[str, Any]
    ) -> _Made:
        with self._one_at_a_time:
            made = self._processor(text=text, images=list(pictures), return_tensors="pt", **options)
        tensors = {
            name: value
            for name, value in made.items()
            if name not in _TEXT and hasattr(value, "shape")
        }
        return _Made(
            made["input_ids"][0].tolist(),
            {name: _numbers(value) for name, value in tensors.items()},
        )

    def _own_ids(self, ids: list[int]) -> list[int]:
        """A prompt's tokens without those that stand around every prompt."""
        front, behind = self._front, self._behind
        end = len(ids) - len(behind)
        if ids[: len(front)] != front or ids[end:] != behind or end <= len(front):
            raise self._refused(
                "it changes a prompt elsewhere than in the place of an image's placeholder"
            )
        return ids[len(front) : end]

    def _runs(self, ids: Sequence[int]) -> tuple[tuple[int, int], ...]:
        runs: list[tuple[int, int]] = []
        done = 0
        for is_vector, group in itertools.groupby(ids, key=self._vector.__eq__):
            number = len(list(group))
            if is_vector:
                runs.append((done, number))
            done += number
        if not runs:
            raise self._refused(
                f"none of an image's tokens is {self._vector}, which is image_token_id in config.json"
            )
        return tuple(runs)

    def _check_alone(self) -> None:
        """Two pictures alone give what they give in one prompt."""
        draw = np.random.default_rng(0)
        pictures = [
            Image.fromarray(draw.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in _TRIED
        ]
        text = f"a {self._text} b {self._text}"
        try:
            alone = [self._one(picture, {}) for picture in pictures]
            whole = self._call(text, pictures, {})
        except UnsupportedModel:
            raise
        except RequestError as error:
            raise self._refused(_told(error.__cause__ or error)) from error
        except Exception as error:  # the library raises what it likes
            raise self._refused(f"two images in a prompt: {_told(error)}") from error
        if self.place(self._tokens(text), alone).token_ids != whole.ids:
            raise self._refused("two images have other tokens together than alone")
        for name, array in whole.arrays.items():
            parts = [item.inputs.get(name) for item in alone]
            if not _joins([_array(part) for part in parts if part is not None], array):
                raise self._refused(
                    f"{name} of two images of unequal sizes is not that of each alone: it pads or numbers "
                    "them"
                )

    def _refused(self, why: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"{self._name}: images cannot be processed one by one by {type(self._processor).__name__}: "
            f"{why}. {_WITHOUT}"
        )


def _load(path: Path) -> Any:
    try:
        from transformers import AutoProcessor
    except ImportError as error:
        raise MissingDependency(
            "transformers", needed_for="images of this model", install=INSTALL
        ) from error
    library: Any = AutoProcessor  # without types
    try:
        return library.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the library raises what it likes
        raise UnsupportedModel(
            f"{path}: transformers loads no processor of it (code of the checkpoint is never run): "
            f"{_told(error)}. {_WITHOUT}"
        ) from error


def _is_within(value: object, own: object) -> bool:
    """True if a setting is the own one, or numbers of pixels or of parts that are not above it."""
    own = _plain(own)
    if value == own and type(value) is type(own):
        return True
    if isinstance(value, Mapping) and isinstance(own, Mapping):
        # A shortest edge alone, or height and width, are of towers that take images of one size.
        return (
            {"longest_edge"} <= value.keys() == own.keys()
            and all(_is_within(value[key], own[key]) for key in own)
        )  # fmt: skip
    return type(value) is int and type(own) is int and 1 <= value <= own


def _plain(own: object) -> object:
    """A setting without the library's own class for sizes."""
    if is_dataclass(own) and not isinstance(own, type):
        return {key: size for key, size in asdict(own).items() if size is not None}
    return own


def _told(error: BaseException) -> str:
    """First line of a message that may be long."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]:.300}"


def _stated(config: Mapping[str, Any], default: int) -> int:
    """The token whose places take vectors."""
    for key in ("image_token_id", "image_token_index"):
        value = config.get(key)
        if type(value) is int and value >= 0:
            return value
    return default


def _numbers(value: Any) -> npt.NDArray[Any]:
    """A tensor as an array, which has no bfloat16."""
    if str(getattr(value, "dtype", "")) == "torch.bfloat16":
        value = value.float()
    return np.asarray(value)


def _packed(array: npt.NDArray[Any]) -> PackedArray:
    array = np.ascontiguousarray(array)
    return PackedArray(str(array.dtype), array.shape, array.tobytes())


def _array(packed: PackedArray) -> npt.NDArray[Any]:
    return np.frombuffer(packed.data, dtype=packed.dtype).reshape(packed.shape)


def _joins(parts: Sequence[npt.NDArray[Any]], whole: npt.NDArray[Any]) -> bool:
    """True if the parts, one behind the other by images, or by tiles in a batch of one, are the whole."""
    for axis in (0, 1):
        shapes = {(*part.shape[:axis], *part.shape[axis + 1 :]) for part in parts}
        if len(shapes) != 1 or any(part.ndim <= axis for part in parts):
            continue
        joined = np.concatenate(parts, axis)
        if joined.shape == whole.shape and np.allclose(joined, whole, atol=1e-5):
            return True
    return False


def _size(item: ProcessedMedia) -> int:
    return sum(len(array.data) for array in item.inputs.values())
