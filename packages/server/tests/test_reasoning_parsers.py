"""Reasoning formats."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_server.reasoning_parsers.qwen3 import Qwen3ReasoningParser


def read(pieces: list[str]) -> tuple[str, str]:
    parser = Qwen3ReasoningParser()
    deltas = [parser.feed(piece) for piece in pieces] + [parser.finish()]
    return "".join(d.reasoning for d in deltas), "".join(d.content for d in deltas)


@pytest.mark.spec("API-CHAT-REASONING")
@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>why</think>so", "why", "so"),
        ("\n<think>\nwhy\n</think>\n\nso", "\nwhy\n", "\n\nso"),
        ("<think></think>so", "", "so"),
        ("so", "", "so"),
        ("<thin", "", "<thin"),
        ("so <think>late</think>", "", "so <think>late</think>"),
        ("<think>cut", "cut", ""),
        ("<think>cut</thi", "cut</thi", ""),
        ("<think>a</think>b</think>c", "a", "b</think>c"),
        ("  ", "", "  "),
    ],
)
def test_split(text: str, reasoning: str, content: str) -> None:
    assert read([text]) == (reasoning, content)
    assert read(list(text)) == (reasoning, content)


@settings(max_examples=500, deadline=None)
@given(
    parts=st.lists(st.sampled_from(["<think>", "</think>", "<", "/", "th", " ", "a", "é"])),
    cuts=st.lists(st.integers(0, 60), max_size=6),
)
def test_pieces_do_not_matter(parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    places = sorted(min(cut, len(text)) for cut in cuts)
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)])]
    assert read(pieces) == read([text])
