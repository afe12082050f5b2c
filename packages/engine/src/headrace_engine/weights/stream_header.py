"""The header of a safetensors file that comes over a stream: every number of it is checked. No torch.

See https://huggingface.co/docs/safetensors, "Format".
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace_core.errors import RequestError
from headrace_engine.weights.messages import (
    MAX_BYTES,
    MAX_TENSORS,
    TensorPlace,
    checked_name,
    checked_shape,
)

DTYPES: Mapping[str, str] = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
    "BOOL": "bool",
}  # fmt: skip
"""Names of dtypes in safetensors files."""
MAX_HEADER = 16 << 20
"""Longest header of a part, in bytes."""


def read_header(header: bytes) -> Sequence[TensorPlace]:
    """The tensors of a safetensors header, in the order of their bytes, which leave no gap.

    Raises:
        RequestError: it is something else.
    """
    try:
        entries = json.loads(header.decode(), object_pairs_hook=_unique, parse_constant=_refused)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise RequestError(f"header: not valid JSON: {error}", param="weights") from error
    if not isinstance(entries, dict) or len(entries) > MAX_TENSORS:
        raise RequestError(
            f"header: must be an object of at most {MAX_TENSORS} tensors", param="weights"
        )
    entries.pop("__metadata__", None)
    tensors, end = [], 0
    places = sorted((_place(name, entry) for name, entry in entries.items()), key=lambda p: p[1:])
    for tensor, start, stop in places:
        if start != end or stop - start != tensor.num_bytes:
            raise RequestError(
                f"header: tensor {tensor.name!r:.200}: data_offsets = [{start}, {stop}]: must be "
                f"[{end}, {end + tensor.num_bytes}]",
                param="weights",
            )
        tensors.append(tensor)
        end = stop
    return tensors


def _place(name: str, entry: object) -> tuple[TensorPlace, int, int]:
    ours = isinstance(entry, dict) and set(entry) == {"dtype", "shape", "data_offsets"}
    offsets = entry["data_offsets"] if ours else None  # type: ignore[index]
    if (
        not ours
        or not isinstance(entry["dtype"], str)  # type: ignore[index]
        or entry["dtype"] not in DTYPES  # type: ignore[index]
        or not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(
            isinstance(o, int) and not isinstance(o, bool) and 0 <= o <= MAX_BYTES for o in offsets
        )
    ):
        raise RequestError(
            f"header: tensor {name!r:.200}: must have dtype ({', '.join(DTYPES)}), shape and data_offsets",
            param="weights",
        )
    assert isinstance(entry, dict)
    name = checked_name(name)
    shape = checked_shape(name, entry["shape"])
    return TensorPlace(name, DTYPES[entry["dtype"]], shape), offsets[0], offsets[1]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key comes twice")
    return found


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is not a number")
