"""Settings of how files of media are read: ``multimodal.media_io_kwargs``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headrace_core.config import require
from headrace_core.errors import ConfigError

_FIELD = "multimodal.media_io_kwargs"
_Check = tuple[Callable[[object], bool], str]
"""Whether a value is good, and what is."""


def _is_count(value: object) -> bool:
    return type(value) is int and (value == -1 or value > 0)


def _is_rate(value: object) -> bool:
    return type(value) in (int, float) and 0 < value <= 1000  # type: ignore[operator]


def _is_colour(value: object) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) == 3
        and all(type(number) is int and 0 <= number <= 255 for number in value)
    )


_KNOWN: Mapping[str, Mapping[str, _Check]] = {
    "video": {
        "num_frames": (_is_count, "a number of frames, or -1 for all"),
        "fps": (_is_rate, "frames a second, above 0"),
    },
    "image": {"rgba_background_color": (_is_colour, "three numbers from 0 to 255")},
}


def check_media_io(stated: Mapping[str, object]) -> None:
    """
    Args:
        stated: modality -> options.

    Raises:
        ConfigError: a modality or option is unknown, or a value is not accepted; names it.
    """
    for modality, options in stated.items():
        name, known = f"{_FIELD}.{modality}", _KNOWN.get(modality, {})
        require(bool(known), name, options,
               f"left out: modalities with options are {', '.join(_KNOWN)}")  # fmt: skip
        if not isinstance(options, Mapping):
            raise ConfigError(f"{name} = {options!r}: must be an object of options", field=name)
        for key, value in options.items():
            require(key in known, f"{name}.{key}", value,
                   f"left out: options are {', '.join(known)}")  # fmt: skip
            good, accepted = known[key]
            require(good(value), f"{name}.{key}", value, accepted)
        require(not {"num_frames", "fps"} <= set(options), name, options,
               "num_frames or fps, not both")  # fmt: skip
