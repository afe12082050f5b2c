"""Rows of tokens say what mappings by step say."""

from __future__ import annotations

import random

import pytest

from headrace_engine.token_rows import NO_TOKEN, TokenRows


def test_a_request_has_its_tokens_of_the_last_steps() -> None:
    rows, draw = TokenRows(5), random.Random(0)
    columns: dict[str, int] = {}
    steps: list[dict[str, int]] = []
    since: dict[str, int] = {}
    for number in range(400):
        name = f"r{draw.randrange(90)}"
        if name in columns and draw.random() < 0.4:
            rows.remove(name)
            del columns[name]
        elif name not in columns:
            columns[name], since[name] = rows.add(name), number
        names = [f"r{i}" for i in range(90) if draw.random() < 0.8]
        draw.shuffle(names)
        steps.append({one: draw.randrange(1 << 20) for one in names})
        others = rows.put(steps[-1], finds_others=True)
        assert others == [one for one in names if one not in columns]
        by_count: dict[int, list[str]] = {}
        for one, column in columns.items():
            count = min(5, number + 1 - since[one])
            expected = [step.get(one, NO_TOKEN) for step in steps[len(steps) - count :]]
            assert rows.read(column, count) == expected
            by_count.setdefault(count, []).append(one)
        for count, several in by_count.items():
            found = rows.read_each([columns[one] for one in several], count)
            assert list(map(list, found)) == [rows.read(columns[one], count) for one in several]
        assert len(rows) == len(columns)


def test_a_column_is_given_again() -> None:
    rows = TokenRows(3)
    first = rows.add("a")
    rows.put({"a": 7})
    rows.remove("a")
    assert rows.add("b") == first
    assert rows.put({"a": 8}, finds_others=True) == ["a"]
    assert rows.read(first, 1) == [NO_TOKEN]


def test_an_unknown_request_cannot_be_removed() -> None:
    with pytest.raises(KeyError):
        TokenRows(3).remove("a")


def test_a_step_without_tokens_counts() -> None:
    rows = TokenRows(3)
    column = rows.add("a")
    rows.put({"a": 7})
    rows.put({})
    assert rows.read(column, 2) == [7, NO_TOKEN]
