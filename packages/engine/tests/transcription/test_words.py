"""Words out of tokens, segments out of times, texts out of clips."""

from __future__ import annotations

import pytest

from headrace_engine.transcription.joining import joined
from headrace_engine.transcription.times import TokenWord, spans, words_of


def pieces(*texts: str) -> list[TokenWord]:
    return [TokenWord(text, index, index + 1) for index, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("texts", "language", "words"),
    [
        ((" run", "ning", " wa", "ter"), "en", [" running", " water"]),
        ((" one", ",", " (", "two", ")"), "en", [" one,", " (two)"]),
        (("は", "い", "。"), "ja", ["は", "い。"]),
        ((" a", "  "), "en", [" a"]),
    ],
)
def test_words(texts: tuple[str, ...], language: str, words: list[str]) -> None:
    assert [word.text for word in words_of(pieces(*texts), language)] == words


def test_spans_lie_between_times() -> None:
    times = {100: 0.0, 101: 1.0, 102: 9.0}
    found = spans([100, 1, 2, 101, 3, 102, 4], times.get, 5.0)
    assert [(s.start, s.end, s.text_tokens) for s in found] == [
        (0.0, 1.0, [1, 2]), (1.0, 5.0, [3]), (5.0, 5.0, [4]),
    ]  # fmt: skip


@pytest.mark.parametrize(("language", "text"), [("en", "a b"), ("ja", "ab"), (None, "a b")])
def test_texts_are_joined(language: str | None, text: str) -> None:
    assert joined([" a ", "", " b"], language) == text
