"""Vectors of an item as the bytes of a safetensors file with one tensor, and back. No part of it is code."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping

from headrace_core.arrays import PackedArray

TENSOR = "ec_cache"
_LENGTH = struct.Struct("<Q")
_MAX_HEADER = 1 << 12
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_KEY = re.compile("[0-9a-f]{64}")


def check_key(key: str) -> str:
    """Raises: ValueError: it is not 64 hex digits, so that it may be no name of a file."""
    if not _KEY.fullmatch(key):
        raise ValueError(f"key = {key!r:.100}: must be 64 hex digits")
    return key


def to_file(vectors: PackedArray) -> bytes:
    """
    Args:
        vectors: [num_vectors, W], of floats.
    """
    entry = {
        "dtype": _DTYPES[vectors.dtype],
        "shape": list(vectors.shape),
        "data_offsets": [0, len(vectors.data)],
    }
    header = json.dumps({TENSOR: entry}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return _LENGTH.pack(len(header)) + header + vectors.data


def from_file(data: bytes) -> PackedArray:
    """Raises: OSError: the bytes are none of :func:`to_file`'s."""
    try:
        (size,) = _LENGTH.unpack_from(data)
        if size > _MAX_HEADER:
            raise ValueError(f"a header of {size} bytes")
        start = _LENGTH.size + size
        return _array(json.loads(data[_LENGTH.size : start]), data[start:])
    except (ValueError, KeyError, TypeError, RecursionError, struct.error) as error:
        raise OSError(f"no file of vectors: {error}") from error


def _array(header: Mapping[str, Mapping[str, object]], data: bytes) -> PackedArray:
    entry = header[TENSOR]
    names = {stored: name for name, stored in _DTYPES.items()}
    shape = entry["shape"]
    if not isinstance(shape, list) or not all(type(one) is int for one in shape):
        raise ValueError(f"shape = {shape!r:.100}")
    if entry["data_offsets"] != [0, len(data)]:
        raise ValueError(f"data_offsets = {entry['data_offsets']!r:.100} of {len(data)} bytes")
    return PackedArray(names[str(entry["dtype"])], tuple(shape), data)
