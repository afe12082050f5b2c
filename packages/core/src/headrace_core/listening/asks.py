"""What listening asks of an engine, one thing after the other.

The rules of this package are generators: they yield an ask and are sent its answer. So they are written
once, for a server's asynchronous engine as for the synchronous one of scripts, and whoever drives them
decides what runs side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from headrace_core.output import CompletionOutput
from headrace_core.packed import PackedArray
from headrace_core.request import Prompt
from headrace_core.sampling import SamplingParams

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Generate:
    """Answered by the only completion of a request, a :class:`~headrace_core.output.CompletionOutput`."""

    prompt: Prompt
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Align:
    """Answered by the weights of a sequence, as of :meth:`~headrace_core.engine.EngineClient.align`."""

    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Detokenize:
    """Answered by the tokens' text, special tokens left out."""

    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Compute:
    """Answered by what the call returns. It takes longer than an event loop may be held."""

    call: Callable[[], Any]


Ask: TypeAlias = Generate | Align | Detokenize | Compute
Steps: TypeAlias = Generator[Ask, Any, T]
"""Work that ends in a ``T``."""


def generated(prompt: Prompt, params: SamplingParams) -> Steps[CompletionOutput]:
    """A request's completion."""
    answer: CompletionOutput = yield Generate(prompt, params)
    return answer


def aligned(prompt: Prompt) -> Steps[PackedArray]:
    """Which part of its clip each token of a sequence comes from."""
    answer: PackedArray = yield Align(prompt)
    return answer


def text_of(token_ids: Sequence[int]) -> Steps[str]:
    """Tokens' text."""
    answer: str = yield Detokenize(token_ids)
    return answer


def computed(call: Callable[[], T]) -> Steps[T]:
    """What a call returns."""
    answer: T = yield Compute(call)
    return answer
