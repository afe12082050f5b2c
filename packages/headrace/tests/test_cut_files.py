"""Weights are read without headrace-kernels as well."""

from __future__ import annotations

import sys

import pytest

from headrace.assembly.worker.model import cut_files_raise


def test_without_the_kernels_nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "headrace_kernels.mapped.cut_files", None)
    with cut_files_raise():
        read = True
    assert read


def test_with_them_errors_are_what_they_were() -> None:
    with pytest.raises(ValueError, match="a weight"), cut_files_raise():
        raise ValueError("a weight")
