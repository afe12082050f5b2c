"""Stop strings, however the text is cut."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_engine.output_processing.stop import StopFinder

ALPHABET = st.text("ab", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=6), max_size=4)


def first_match(text: str, stops: list[str]) -> tuple[int, str] | None:
    """(start, stop) of the match that is complete first, the longest of those; by trying all."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            stop = max(found, key=len)
            return end - len(stop), stop
    return None


def run(finder: StopFinder, pieces: list[str]) -> tuple[str, str | None, list[str]]:
    shown = []
    for piece in pieces:
        text, stop = finder.feed(piece)
        shown.append(text)
        if stop is not None:
            return "".join(shown), stop, shown
    return "".join(shown) + finder.finish(), None, shown


@settings(max_examples=200, deadline=None)
@given(
    text=ALPHABET, stops=STOPS, cuts=st.lists(st.integers(0, 30), max_size=6), keep=st.booleans()
)
def test_first_match_wins_for_every_cut(
    text: str, stops: list[str], cuts: list[int], keep: bool
) -> None:
    borders = sorted({0, len(text), *(c for c in cuts if c <= len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(borders)]
    shown, stop, _ = run(StopFinder(stops, keep), pieces)
    match = first_match(text, stops)
    if match is None:
        assert (shown, stop) == (text, None)
    else:
        start, expected = match
        assert stop == expected
        assert shown == text[: start + len(expected) * keep]


@settings(max_examples=150, deadline=None)
@given(text=ALPHABET, stops=STOPS)
def test_nothing_is_held_back_that_cannot_become_a_match(text: str, stops: list[str]) -> None:
    finder, shown = StopFinder(stops), ""
    for end, character in enumerate(text, 1):
        piece, stop = finder.feed(character)
        shown += piece
        if stop is not None:
            return
        held = text[len(shown) : end]
        assert text[:end] == shown + held
        assert not held or any(s.startswith(held) for s in stops)
        longest = max(
            (n for s in stops for n in range(1, len(s)) if text[:end].endswith(s[:n])), default=0
        )
        assert len(held) == longest


def test_matches_may_be_let_pass() -> None:
    finder = StopFinder(["END"])
    assert finder.feed("xEN") == ("x", None)
    assert finder.feed("D", may_stop=False) == ("END", None)
    assert finder.feed(" END") == (" ", "END")


def test_a_match_across_pieces() -> None:
    finder = StopFinder(["</answer>", "STOP"])
    assert finder.feed("yes</ans") == ("yes", None)
    assert finder.feed("wex") == ("</answex"[:5] + "wex", None)
    assert finder.feed("</answ") == ("", None)
    assert finder.feed("er> more") == ("", "</answer>")
    kept = StopFinder(["STOP"], include_stop=True)
    assert kept.feed("a ST") == ("a ", None)
    assert kept.feed("OP b") == ("STOP", "STOP")
