"""The argument of ``update_weights``, as it comes from a socket or a caller. No torch.

Plain data only: names, types, shapes and places of tensors. Nothing here says how an object is to be made.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace_core.errors import RequestError
from headrace_engine.weights.version import checked_version

BROADCAST = "broadcast"
SOURCES = ("process", "shared_memory", BROADCAST, "stream")
MODEL, DRAFT = "model", "draft"
TARGETS = (MODEL, DRAFT)
"""The model; the model or head of ``speculative_config.model``, which guesses for it."""
ITEM_BYTES: Mapping[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Bytes of a number, by dtype."""
MAX_TENSORS = 1 << 20
MAX_NAME = 1000
"""Characters of a tensor's name."""
MAX_DIMS = 8
MAX_BYTES = 1 << 44
NamedTensors = Mapping[str, Any] | Iterable[tuple[str, Any]]
"""Tensors by the checkpoint's names."""
_NAME = re.compile(r"[\w.][\w.-]{0,254}", re.ASCII)


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor of a part, and where in its part it is."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0
    """In bytes, from the part's beginning."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class WeightsMessage:
    """One call of ``update_weights``."""

    source: str | None = None
    """One of :data:`SOURCES`; None: no tensors come with it."""
    target: str = MODEL
    """One of :data:`TARGETS`: gets the tensors of this part."""
    tensors: tuple[TensorPlace, ...] = ()
    """Of shared memory and a broadcast, in the order of sending."""
    given: Sequence[tuple[str, Any]] = ()
    """Name and tensor, of a caller in this process."""
    shared_memory: str = ""
    """Name of the segment."""
    finish: bool = True
    """Put the weights into the model after this part."""
    prepare: bool = False
    """Check that the update is whole and pack what waits, so that finishing takes a moment."""
    keep_requests: bool = False
    """Requests may run: they go on with the new weights, their contexts computed again."""
    cancel: bool = False
    """Drop what has come; the old weights stand."""
    version: str | None = None
    """Of the new weights; None: the old one, counted up."""

    @classmethod
    def parse(cls, data: object) -> WeightsMessage:
        """The message in plain data.

        Raises:
            RequestError: a field is unknown, or has a value that it cannot have.
        """
        if not isinstance(data, Mapping):
            raise _wrong("update_weights", data, "an object")
        unknown = [key for key in data if key not in cls.__dataclass_fields__]
        if unknown:
            known = ", ".join(cls.__dataclass_fields__)
            raise _wrong("update_weights", unknown[0], f"one of the fields {known}")
        source = data.get("source")
        if source is not None and source not in SOURCES:
            raise _wrong("source", source, f"one of {', '.join(SOURCES)}, or null")
        if (target := data.get("target", MODEL)) not in TARGETS:
            raise _wrong("target", target, f"one of {', '.join(TARGETS)}")
        for key in ("finish", "prepare", "keep_requests", "cancel"):
            if not isinstance(data.get(key, False), bool):
                raise _wrong(key, data[key], "true or false")
        version = data.get("version")
        version = None if version is None else checked_version(version)
        segment = data.get("shared_memory", "")
        if source == "shared_memory" and not (
            isinstance(segment, str) and _NAME.fullmatch(segment) and segment not in (".", "..")
        ):
            raise _wrong("shared_memory", segment, "the name of a shared memory segment")
        return cls(
            source=source,
            target=target,
            tensors=places(data.get("tensors", ()))
            if source in ("shared_memory", "broadcast")
            else (),
            given=_given(data.get("given", ())) if source == "process" else (),
            shared_memory=segment if source == "shared_memory" else "",
            finish=data.get("finish", True),
            prepare=data.get("prepare", False),
            keep_requests=data.get("keep_requests", False),
            cancel=data.get("cancel", False),
            version=version,
        )


def places(tensors: object) -> tuple[TensorPlace, ...]:
    """Tensors out of ``[{"name": "lm_head.weight", "dtype": "bfloat16", "shape": [64, 32], "offset": 0}]``.

    Raises:
        RequestError: they are something else; a number is out of bounds.
    """
    if not isinstance(tensors, list | tuple) or len(tensors) > MAX_TENSORS:
        raise _wrong("tensors", tensors, f"a list of at most {MAX_TENSORS} tensors")
    return tuple(_place(tensor) for tensor in tensors)


def _place(tensor: object) -> TensorPlace:
    if not isinstance(tensor, Mapping) or set(tensor) - {"name", "dtype", "shape", "offset"}:
        raise _wrong("tensors", tensor, "objects with name, dtype, shape and offset")
    name, dtype, offset = tensor.get("name"), tensor.get("dtype"), tensor.get("offset", 0)
    name = checked_name(name)
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise _wrong(f"dtype of tensor {name!r:.200}", dtype, f"one of {', '.join(ITEM_BYTES)}")
    shape = checked_shape(name, tensor.get("shape"))
    if not isinstance(offset, int) or isinstance(offset, bool) or not 0 <= offset <= MAX_BYTES:
        raise _wrong(f"offset of tensor {name!r:.200}", offset, "a number of bytes")
    return TensorPlace(name, dtype, shape, offset)


def checked_name(name: object) -> str:
    """The name of a tensor: it is part of errors and log lines, so that it may not end one.

    Raises:
        RequestError: it is no text of 1 to :data:`MAX_NAME` printable characters.
    """
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise _wrong("tensors", name, f"named by 1 to {MAX_NAME} printable characters")
    return name


def checked_shape(name: str, shape: object) -> tuple[int, ...]:
    """A shape of at most :data:`MAX_BYTES` of the largest numbers.

    Raises:
        RequestError: it is something else.
    """
    sizes = list(shape) if isinstance(shape, list | tuple) and len(shape) <= MAX_DIMS else [-1]
    if not all(
        isinstance(s, int) and not isinstance(s, bool) and 0 <= s <= MAX_BYTES for s in sizes
    ):
        raise _wrong(f"shape of tensor {name!r:.200}", shape, f"a list of at most {MAX_DIMS} sizes")
    # An empty tensor has strides, too, which must not overflow.
    if math.prod(max(size, 1) for size in sizes) > MAX_BYTES // 8:
        raise _wrong(
            f"shape of tensor {name!r:.200}", shape, f"of at most {MAX_BYTES // 8} numbers"
        )
    return tuple(sizes)


def by_name(weights: NamedTensors) -> Iterable[tuple[str, Any]]:
    """Names and tensors, out of a mapping or pairs."""
    return weights.items() if isinstance(weights, Mapping) else weights


def _given(given: object) -> Sequence[tuple[str, Any]]:
    """Names and tensors: of objects that only a caller in this process can have."""
    pairs: list[Any] = list(given) if isinstance(given, list | tuple) else [None]
    for pair in pairs:
        ours = isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)
        if not ours or not hasattr(pair[1], "detach"):
            raise _wrong("given", pair, "(name, torch tensor) of a caller in the engine's process")
    return pairs


def _wrong(name: str, value: object, accepted: str) -> RequestError:
    return RequestError(
        f"update_weights: {name} = {value!r:.200}: must be {accepted}", param=name.partition(" ")[0]
    )
