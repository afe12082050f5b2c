"""Costs of the largest step between starts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_engine.execution.measuring import kept_costs
from headrace_engine.execution.measuring.kept_costs import KeptCosts, StepCost

COST = StepCost(activations=3 << 20, seconds=0.5, media=7, media_seconds=0.25)


def file_of(folder: Path) -> Path:
    [file] = folder.iterdir()
    return file


def test_what_one_start_keeps_the_next_finds(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    assert KeptCosts(folder, {"a": 1}).find() is None
    KeptCosts(folder, {"a": 1, "b": Path("x")}).keep(COST)
    assert KeptCosts(folder, {"b": Path("x"), "a": 1}).find() == COST
    assert KeptCosts(folder, {"a": 2, "b": Path("x")}).find() is None
    assert file_of(folder).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "changes",
    [
        {"activations": -1}, {"activations": 1.5}, {"activations": 2**60}, {"activations": True},
        {"seconds": -0.1}, {"seconds": float("nan")}, {"seconds": float("inf")}, {"seconds": "1"},
        {"media": None}, {"more": 1},
    ],
)  # fmt: skip
def test_a_file_with_other_values_is_not_used(tmp_path: Path, changes: dict[str, Any]) -> None:
    kept = KeptCosts(tmp_path, {})
    kept.keep(COST)
    file = file_of(tmp_path)
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    assert kept.find() is None


@given(st.one_of(st.binary(max_size=60), st.recursive(
    st.none() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
).map(lambda value: json.dumps(value).encode())))  # fmt: skip
def test_whatever_a_file_holds_is_a_cost_or_nothing(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    folder = tmp_path_factory.mktemp("costs")
    kept = KeptCosts(folder, {})
    kept.keep(COST)
    file_of(folder).write_bytes(content)
    assert kept.find() is None
    kept.keep(COST)
    assert kept.find() == COST


def test_a_large_or_deep_file_is_not_used(tmp_path: Path) -> None:
    kept = KeptCosts(tmp_path, {})
    kept.keep(COST)
    for content in (b" " * 10_000, b"[" * 1000, file_of(tmp_path).read_bytes() + b" " * 5000):
        file_of(tmp_path).write_bytes(content)
        assert kept.find() is None


def test_a_folder_that_cannot_be_made_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kept = KeptCosts(tmp_path / "file" / "folder", {})
    kept.keep(COST)
    assert kept.find() is None


def test_those_used_last_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_costs, "MAX_FILES", 3)
    for number in range(3):
        KeptCosts(tmp_path, {"n": number}).keep(COST)
    for time, file in enumerate(sorted(tmp_path.iterdir())):
        os.utime(file, (time, time))
    oldest = min(tmp_path.iterdir(), key=lambda file: file.stat().st_mtime)
    [number] = [n for n in range(3) if KeptCosts(tmp_path, {"n": n})._file == oldest]
    assert KeptCosts(tmp_path, {"n": number}).find() == COST  # used: no longer the oldest
    KeptCosts(tmp_path, {"n": 3}).keep(COST)
    assert len(list(tmp_path.iterdir())) == 3
    assert KeptCosts(tmp_path, {"n": number}).find() == COST
