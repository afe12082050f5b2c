"""Arguments of calls that were cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_engine.input_processing.chat.arguments import arguments_object

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=12,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, {}), ("", {}), (" ", {}), ("{", {}), ('{"a', {}), ('{"a"', {}), ('{"a":', {}),
        ('{"a": 1, "b', {"a": 1}), ('{"a": "x', {"a": "x"}), ('{"a": "x\\', {"a": "x"}),
        ('{"a": "x\\u00', {"a": "x"}), ('{"a": [1, {"b": tr', {"a": [1, {}]}),
        ('{"a": [1, 2', {"a": [1, 2]}), ("ls -l", {"input": "ls -l"}), ("[1", {"input": "[1"}),
        ('{"a": 1}}', {"input": '{"a": 1}}'}),
    ],
)  # fmt: skip
def test_what_was_said_so_far(text: str | None, expected: Any) -> None:
    assert arguments_object(text) == expected


@given(st.dictionaries(st.text(max_size=4), VALUES, max_size=4), st.data())
def test_every_beginning_is_an_object(value: dict[str, Any], data: st.DataObject) -> None:
    text = json.dumps(value)
    assert arguments_object(text) == value
    cut = text[: data.draw(st.integers(1, len(text)))]
    found = arguments_object(cut)
    assert isinstance(found, dict)
    assert list(found) == list(value)[: len(found)]
