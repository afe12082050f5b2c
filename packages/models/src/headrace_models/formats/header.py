"""The header of a safetensors file, read with every number taken as hostile. No torch.

A file is: 8 bytes little-endian length n, n bytes of JSON ``{name: {dtype, shape, data_offsets}}``
(and ``__metadata__``), then the tensors' bytes. Source: the format's README,
github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from headrace_core.errors import WeightsError
from headrace_core.reliability import failpoints
from headrace_models.checkpoint.regular_file import open_regular

ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1,
    "U16": 2, "U32": 4, "U64": 8, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS = 8
MAX_EXTENT = 2**48
MAX_TENSORS = 1_000_000


class TensorEntry(NamedTuple):
    """One tensor of a file, and its place."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the file."""
    num_bytes: int


def read_header(path: Path) -> tuple[TensorEntry, ...]:
    """The tensors of a file, by position.

    Raises:
        WeightsError: the file is no safetensors file, is truncated, or its header lies.
    """
    try:
        if failpoints.PLAN is not None:
            failpoints.hit("loader.read")
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size < 8:
                raise _bad(path, f"{size} bytes are too few for a header")
            length = int.from_bytes(file.read(8), "little")
            if length > min(size - 8, MAX_HEADER_BYTES):
                raise _bad(path, f"a header of {length} bytes does not fit: the file has {size}")
            text = file.read(length)
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error}") from error
    return _check(path, _parse(path, text), data_start=8 + length, data_size=size - 8 - length)


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise _bad(path, f"the key {key!r} occurs twice")
            found[key] = value
        return found

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise _bad(path, f"no JSON: {error}") from error
    if not isinstance(header, dict):
        raise _bad(path, "no JSON object")
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise _bad(path, f"{len(header)} tensors; at most {MAX_TENSORS} are read")
    return header


def _check(
    path: Path, header: dict[str, Any], data_start: int, data_size: int
) -> tuple[TensorEntry, ...]:
    entries = [_entry(path, name, value, data_start) for name, value in header.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.num_bytes))  # empty ones take no place
    end = data_start
    for entry in entries:
        if entry.offset != end:
            kind = (
                "overlaps the tensor before it" if entry.offset < end else "leaves a gap before it"
            )
            raise _bad(path, f"tensor {entry.name!r} {kind}")
        end = entry.offset + entry.num_bytes
    if end != data_start + data_size:
        raise _bad(
            path,
            f"the tensors end at byte {end}, the file has {data_start + data_size} (truncated?)",
        )
    return tuple(entries)


def _entry(path: Path, name: str, value: object, data_start: int) -> TensorEntry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise _bad(path, f"tensor {name!r}: must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise _bad(
            path, f"tensor {name!r}: dtype {dtype!r}: must be one of {', '.join(ITEM_BYTES)}"
        )
    if not _naturals(shape) or len(shape) > MAX_DIMENSIONS or any(s >= MAX_EXTENT for s in shape):
        raise _bad(
            path,
            f"tensor {name!r}: shape {shape!r:.200}: must be at most {MAX_DIMENSIONS} sizes from 0, "
            f"each below {MAX_EXTENT}",
        )
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _bad(path, f"tensor {name!r}: data_offsets {offsets!r}: must be a start and an end")
    num_bytes = ITEM_BYTES[dtype]
    for extent in shape:
        num_bytes *= extent
    if offsets[1] - offsets[0] != num_bytes:
        raise _bad(
            path,
            f"tensor {name!r}: {dtype} {shape} takes {num_bytes} bytes, data_offsets span "
            f"{offsets[1] - offsets[0]}",
        )
    return TensorEntry(name, dtype, tuple(shape), data_start + offsets[0], num_bytes)


def _naturals(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _bad(path: Path, why: str) -> WeightsError:
    return WeightsError(f"{path}: not a valid safetensors file: {why}")
