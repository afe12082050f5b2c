"""Salts of prefixes whose tokens see what lies behind them."""

from __future__ import annotations

import pytest

from headrace_core.multimodal import MediaInput
from headrace_engine.input_processing.media import PlacedMedia
from headrace_engine.input_processing.prompts import _salted

IDS = [1, 7, 7, 2, 3, 7, 7, 4]


def _placed(
    names: str, spans: list[tuple[int, ...]], token_ids: list[int] | None = None
) -> PlacedMedia:
    media = [MediaInput("image", {}, name, 2, at) for name, at in zip(names, (1, 5), strict=True)]
    return PlacedMedia(token_ids or IDS, media, 0, spans)


def test_none_for_what_lies_within_an_item() -> None:
    placed = _placed("ab", [(1, 3), (5, 7)])
    assert (_salted(None, placed), _salted("s", placed)) == (None, "s")


@pytest.mark.parametrize(
    ("names", "spans", "token_ids"),
    [
        ("ac", [(1, 3, 5, 7)], None),
        ("cb", [(1, 3, 5, 7)], None),
        ("ab", [(1, 3, 5, 7)], [1, 7, 7, 2, 9, 7, 7, 4]),
        ("ab", [(1, 3)], None),
    ],
)
def test_one_for_items_that_see_each_other(
    names: str, spans: list[tuple[int, ...]], token_ids: list[int] | None
) -> None:
    salt = _salted("s", _placed("ab", [(1, 3, 5, 7)]))
    assert salt is not None
    assert salt.startswith("s:")
    assert salt == _salted("s", _placed("ab", [(1, 3, 5, 7)]))
    assert salt != _salted("s", _placed(names, spans, token_ids))


def test_what_follows_the_span_does_not_matter() -> None:
    salt = _salted(None, _placed("ab", [(1, 3, 5, 7)]))
    assert salt == _salted(None, _placed("ab", [(1, 3, 5, 7)], [*IDS[:-1], 5]))
