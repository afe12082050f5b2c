"""The provider against headrace's suites."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from snake_kernels.provider import PROVIDER
from snake_kernels.snake import SNAKE, definition, snake

from headrace_core.ops import KernelNeed, KernelProvider, bind_ops
from headrace_testing.ops import call_wide
from headrace_testing.ops.optional.xielu import XIELUConformance
from headrace_testing.ops.suite import OpSuite


class Ours(OpSuite):
    @pytest.fixture
    def provider(self) -> KernelProvider:
        return PROVIDER


class TestXIELU(Ours, XIELUConformance):
    """Headrace's own suite of the op: numbers, its whole range, row invariance. A provider of many ops
    inherits ``headrace_testing.ops.OpConformance``, which has all of them."""


class TestSnake(Ours):
    """The suite of an op that headrace does not know."""

    def test_snake(self, op: Callable[[str], Any], dtype: str) -> None:
        frequencies = self.rand(257, seed=1).abs() + 0.1
        for rows in (0, 1, 3, 33):
            x = self.rand(rows, 257, dtype=dtype) * 4
            expected = call_wide(definition, x, frequencies)
            self.check(op("snake")(x, frequencies), expected, dtype)

    def test_snake_is_row_invariant(self, invariant_op: Callable[[str], Any], dtype: str) -> None:
        run, frequencies = invariant_op("snake"), self.rand(100, seed=1).abs() + 0.1
        self.check_rows(self.rand(70, 100, dtype=dtype), lambda rows: run(rows, frequencies))


def test_a_family_finds_it() -> None:
    ops = bind_ops(KernelNeed("cpu", "float32"), choose={"xielu": "snake", "snake": "snake"})
    assert ops.optional(SNAKE) is snake
    assert {ops.providers["xielu"], ops.providers["snake"]} == {"snake"}
