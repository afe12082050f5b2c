"""Conformance suite of reasoning parsers. Inherit, and give texts with what is in them::

class TestQwen3(ReasoningParserConformance):
    parser = Qwen3ReasoningParser
    golden = [("<think>why</think>so", "why", "so")]
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

import pytest

from headrace_core.text import AnswerContext, ReasoningParser
from headrace_testing.guards.linear_time import assert_linear
from headrace_testing.sampling import turns

NUM_SPLITS = int(os.environ.get("HEADRACE_TEST_SPLITS", "1000"))
"""Random texts in random pieces per format."""


class ReasoningParserConformance:
    """Inherit as ``Test...`` and set :attr:`parser` and :attr:`golden`."""

    parser: type[ReasoningParser]
    golden: ClassVar[Sequence[tuple[str, str, str]]] = ()
    """(text, its reasoning, its answer)."""
    alphabet: ClassVar[Sequence[str]] = ("<think>", "</think>", "<", "</", "think>")
    """Fragments of the format, of which random texts are made."""
    context: ClassVar[AnswerContext] = AnswerContext()

    def read(self, pieces: Iterable[str], context: AnswerContext | None = None) -> tuple[str, str]:
        """Feed pieces and finish: (reasoning, answer)."""
        parser = self.parser(context or self.context)
        deltas = [parser.feed(piece) for piece in pieces]
        deltas.append(parser.finish())
        assert not any(delta.tool_calls for delta in deltas)
        return "".join(d.reasoning for d in deltas), "".join(d.content for d in deltas)

    def split_everywhere(self, text: str) -> None:
        """The whole text, its characters, and its cut at each place give one answer."""
        whole = self.read([text])
        assert self.read(list(text)) == whole
        for at in range(len(text) + 1):
            assert self.read([text[:at], text[at:]]) == whole, f"cut at {at}: {text[at:]!r}"

    def test_golden_texts(self) -> None:
        """One piece holds both parts: neither is lost."""
        assert self.golden, "give texts, and what is in them"
        for text, reasoning, answer in self.golden:
            assert self.read([text]) == (reasoning, answer), text

    def test_every_split_equals_the_whole(self) -> None:
        for text, _, _ in self.golden:
            self.split_everywhere(text)
            for end in range(len(text)):
                assert self.read([text[:end]]) == self.read(text[:end])

    def test_an_empty_answer_is_empty(self) -> None:
        assert self.read([]) == ("", "")
        assert self.read(["", ""]) == ("", "")

    def test_it_can_be_made_without_a_context(self) -> None:
        self.parser().feed("text")

    def test_the_end_marker_ends_reasoning(self) -> None:
        """Up to the tag all is reasoning, behind it all is the answer."""
        marker = self.parser.end_marker
        if not marker:
            pytest.skip("the format has no end tag for constraints")
        for text, reasoning, answer in self.golden:
            if reasoning and answer and text.count(marker) == 1:
                assert self.read([text.partition(marker)[0] + marker]) == (reasoning, "")

    def test_the_start_marker_begins_reasoning(self) -> None:
        """An answer that the format reads as reasoning is so from its tag on, if it has one."""
        marker = self.parser.start_marker
        begun = [(t, r) for t, r, _ in self.golden if r and marker and t.startswith(marker)]
        if not begun:
            pytest.skip("no answer begins with a tag")
        for text, reasoning in begun:
            cut = text[: text.index(reasoning) + len(reasoning)]
            assert self.read([cut]) == (reasoning, "")

    def test_objects_are_independent(self) -> None:
        first = self.parser(self.context)
        first.feed(self.golden[0][0][:5])
        assert self.read([self.golden[0][0]]) == self.golden[0][1:]

    @turns(3)
    def test_time_is_linear(self) -> None:
        """Eight times the text takes about eight times as long, whatever the text."""
        for unit in (*self.alphabet, "".join(self.alphabet), " ", "\n", "x"):
            assert_linear(self._read_both, _repeated(unit))

    def _read_both(self, text: str) -> None:
        """In pieces, and in one."""
        self.read(text[at : at + 11] for at in range(0, len(text), 11))
        self.read([text])

    @turns(3)
    def test_random_texts_in_random_pieces(self) -> None:
        """Cuts do not matter."""
        seeded = random.Random(self.parser.__name__)
        parts = [*self.alphabet, " ", "\n", "text", "é東", self.golden[0][0]]
        for _ in range(NUM_SPLITS):
            text = "".join(seeded.choices(parts, k=seeded.randint(0, 9)))
            cuts = sorted(seeded.randint(0, len(text)) for _ in range(seeded.randint(1, 12)))
            pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
            assert self.read(pieces) == self.read([text]), pieces


def _repeated(unit: str) -> Callable[[int], str]:
    return lambda size: unit * (size // len(unit))
