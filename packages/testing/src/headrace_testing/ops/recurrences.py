"""Recurrences as the suite of them takes them: the inputs of each, and how many variants there are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from headrace_testing.ops.inputs import wide


@dataclass
class RecurrentCase:
    """An op's inputs, all but its state."""

    name: str
    by_token: dict[str, Tensor]
    """Arguments with a row for each token."""
    whole: dict[str, Any]
    """The others."""
    state_shape: tuple[int, ...]
    state_dtype: str = "float32"

    def run(self, op: Callable[..., Any], rows: Any, *state: Any) -> Tensor:
        """The op on some rows; ``state`` is its four arguments."""
        names = ("state", "state_in", "state_out", "cu_seqlens_q")
        chosen = {name: x[rows] for name, x in self.by_token.items()}
        out: Tensor = op(**chosen, **self.whole, **dict(zip(names, state)))
        return out

    def widened(self) -> RecurrentCase:
        """For the reference: everything in float64."""
        inputs = {name: wide(x) for name, x in self.by_token.items()}
        others = {name: wide(x) for name, x in self.whole.items()}
        return RecurrentCase(self.name, inputs, others, self.state_shape, "float64")


class Rand(Protocol):
    """:meth:`headrace_testing.ops.suite.OpSuite.rand`."""

    def __call__(self, *shape: int, dtype: str = "float32", seed: int = 0) -> Tensor: ...


def as_they_are(states: Tensor) -> None:
    """Any numbers are a state."""


class Recurrence(NamedTuple):
    """One op, whose module of the suite offers it as ``RECURRENCE``."""

    name: str
    make: Callable[[Rand, str, int, int], RecurrentCase]
    """(rand, dtype, tokens, variant) -> inputs that lie in a fused projection, of sizes that fill no
    vector."""
    variants: int
    cut: tuple[int, ...]
    """Variants whose requests are cut anywhere."""
    make_valid: Callable[[Tensor], None] = as_they_are
    """Changes random states [blocks, 2, ...] in place where not every number is possible."""
