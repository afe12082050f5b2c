"""Taking texts out of a stream of text."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_server.parsing.token_filter import TokenFilter, by_first

TEXTS = ["<a>", "<ab>", "<abc", "[x]", "<<"]
EXPECTED = re.compile("|".join(map(re.escape, sorted(TEXTS, key=len, reverse=True))))


@given(
    st.lists(st.sampled_from([*TEXTS, "<", ">", "a", "b", "<ab", "x", "[", "]", "ü"])), st.data()
)
def test_every_cut_gives_the_same(pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces)
    found = TokenFilter(by_first(TEXTS))
    shown, rest = "", text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        shown += found.feed(rest[:size])
        rest = rest[size:]
    assert shown + found.finish() == EXPECTED.sub("", text)


@pytest.mark.req("SEC-15")
def test_nothing_is_held_longer_than_it_may_match() -> None:
    found = TokenFilter(by_first(TEXTS))
    assert found.feed("abc") == "abc"
    assert found.feed("<a") == ""
    assert found.feed("d") == "<ad"
    assert found.feed("[x") == ""
    assert found.finish() == "[x"
