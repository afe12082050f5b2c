"""Tokens of prompts are divided over ranks: each to one of them, evenly, whole cache blocks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace_attention.prompt_division import NewTokens, Piece, PromptDivision

requests = st.lists(
    st.builds(NewTokens, first=st.integers(0, 300), count=st.integers(1, 900)),
    min_size=1,
    max_size=6,
)


@given(requests, st.integers(2, 5), st.sampled_from([1, 8, 16, 128]))
def test_every_token_is_one_ranks_and_every_block(
    news: list[NewTokens], ranks: int, size: int
) -> None:
    division = PromptDivision(ranks, size, least_tokens=40)
    pieces = division.pieces(news)
    if max(new.count for new in news) < max(40, 2 * ranks * size):
        assert pieces is None
        return
    assert pieces is not None
    owner: dict[tuple[int, int], int] = {}
    written: dict[tuple[int, int], int] = {}
    for rank, own in enumerate(pieces):
        assert own == sorted(own), "in the order of the batch"
        for request, start, end in own:
            assert 0 <= start < end <= news[request].count
            for token in range(start, end):
                assert owner.setdefault((request, token), rank) == rank
                block = (news[request].first + token) // size
                assert written.setdefault((request, block), rank) == rank
    assert len(owner) == sum(new.count for new in news)
    for rank in range(ranks):
        later = [p for p in pieces[rank] if news[p.request].first + p.start > 0]
        assert later, "no rank has beginnings of prompts only"


def test_ranks_attend_to_about_as_much() -> None:
    pieces = PromptDivision(4, 16).pieces([NewTokens(0, 4096)])
    assert pieces is not None
    seen = [sum(sum(range(start + 1, end + 1)) for _, start, end in own) for own in pieces]
    assert max(seen) == min(seen)
    assert pieces[0] == [Piece(0, 0, 512), Piece(0, 3584, 4096)]
    assert pieces[3] == [Piece(0, 1536, 2560)], "neighbours are one piece"


def test_a_part_of_a_prompt_is_cut_at_blocks_of_the_whole() -> None:
    pieces = PromptDivision(2, 16).pieces([NewTokens(21, 128)])
    assert pieces == [[Piece(0, 0, 27), Piece(0, 91, 128)], [Piece(0, 27, 91)]]


def test_short_requests_stay_whole_where_least_is_to_do() -> None:
    news = [
        NewTokens(50, 1),
        NewTokens(0, 128),
        NewTokens(7, 30),
        NewTokens(9, 20),
        NewTokens(3, 1),
    ]
    # 64 tokens each; then the first to rank 0, 30 to rank 1, 20 to rank 0, and the last to rank 0.
    assert PromptDivision(2, 16).pieces(news) == [
        [Piece(0, 0, 1), Piece(1, 0, 32), Piece(1, 96, 128), Piece(3, 0, 20), Piece(4, 0, 1)],
        [Piece(1, 32, 96), Piece(2, 0, 30)],
    ]


def test_steps_without_long_prompts_are_not_divided() -> None:
    division = PromptDivision(2, 16)
    assert division.pieces([NewTokens(9, 127), NewTokens(0, 100)]) is None
    assert PromptDivision(2, 64).pieces([NewTokens(0, 255)]) is None, "fewer blocks than pieces"
    assert PromptDivision(2, 64).pieces([NewTokens(0, 256)]) is not None
