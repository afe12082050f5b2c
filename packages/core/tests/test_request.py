"""What a request may carry across a process border."""

from __future__ import annotations

import hashlib
import math
import struct
from typing import Any

import msgspec
import pytest

from headrace_core.errors import RequestError
from headrace_core.request import PromptEmbeds
from headrace_core.sampling.params import SamplingParams

PLAIN: dict[str, Any] = {
    "text": "é", "number": 3, "least": -(2**63), "most": 2**64 - 1, "real": 0.5, "yes": True,
    "none": None, "list": [1, [2.0, "x"], {"deep": [None]}], "": "empty key", "nan": math.inf,
}  # fmt: skip


def test_plain_extra_args_are_taken_and_survive_the_wire() -> None:
    params = SamplingParams(extra_args=PLAIN)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert again.extra_args == PLAIN
    assert SamplingParams().extra_args is None


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"f": print}, "extra_args.f"),
        ({"a": {"b": [1, object()]}}, r"extra_args.a.b\[1\]"),
        ({"a": {1: 2}}, "extra_args.a"),
        ({"a": {1}}, "extra_args.a"),
        ({"a": b"bytes"}, "extra_args.a"),
        ({"a": 2**64}, "64 bits"),
        ({"a": -(2**63) - 1}, "64 bits"),
        ({"a": "\ud800"}, "surrogate"),
        ([("a", 1)], "mapping"),
    ],
)
def test_what_is_no_plain_data_is_refused_by_place(value: Any, place: str) -> None:
    with pytest.raises(RequestError, match=place) as caught:
        SamplingParams(extra_args=value)
    assert (caught.value.param or "").startswith("extra_args")


def test_nesting_is_bounded_whatever_refers_to_whatever() -> None:
    endless: dict[str, Any] = {}
    endless["again"] = endless
    with pytest.raises(RequestError, match="nested"):
        SamplingParams(extra_args=endless)


def embeds(rows: int = 3, size: int = 2) -> PromptEmbeds:
    data = struct.pack(f"{rows * size}f", *range(rows * size))
    return PromptEmbeds.of("float32", rows, size, data)


@pytest.mark.req("SEC-01")
def test_embeddings_cross_as_header_and_bytes_that_agree() -> None:
    made = embeds()
    frame = msgspec.msgpack.encode(made)
    assert msgspec.msgpack.decode(frame, type=PromptEmbeds) == made
    fields = msgspec.to_builtins(made, builtin_types=(bytes,))
    for change in (
        {"num_tokens": 4}, {"num_tokens": 0}, {"hidden_size": 3}, {"dtype": "float16"},
        {"dtype": "int8"}, {"data": made.data[:-1]}, {"row_digests": made.row_digests[:-1]},
        {"num_tokens": -3, "hidden_size": -2},
    ):  # fmt: skip
        with pytest.raises((msgspec.ValidationError, ValueError)):
            msgspec.msgpack.decode(msgspec.msgpack.encode({**fields, **change}), type=PromptEmbeds)


def test_the_last_rows_and_names_of_content() -> None:
    made = embeds()
    assert made.last(2) == PromptEmbeds.of("float32", 2, 2, made.data[8:])
    assert made.last(3) is made
    second = hashlib.sha256(made.data[8:16]).hexdigest()
    assert made.digests(1, 2) == second
    assert made.digests(1, 9) == second + hashlib.sha256(made.data[16:]).hexdigest()
    assert made.digests(3, 9) == ""
