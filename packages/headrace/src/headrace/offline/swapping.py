"""Options of a swap of weights, as the offline API takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from typing import Any, NamedTuple

from headrace_core.errors import RequestError
from headrace_core.request import Prompt

SWAP_TIMEOUT = 7200.0
"""Longest wait for other weights to serve, in seconds; the swap itself goes on."""


class WeightsProbe(NamedTuple):
    """A prompt that new weights must continue as said, before they serve anybody."""

    prompt: str | Sequence[int]
    """Text, or token ids."""
    expected_token_ids: Sequence[int] = ()
    """Its greedy continuation; empty: the prompt counts for ``max_perplexity`` only."""


def as_path(path: object) -> str:
    """The path as text.

    Raises:
        RequestError: it is none.
    """
    if not isinstance(path, (str, PathLike)):
        raise RequestError(f"path = {path!r:.100}: must be a path", param="path")
    found = fspath(path)
    return found if isinstance(found, str) else found.decode()


def probe_prompts(probe: object) -> list[Prompt]:
    """The prompts of a caller's probes, to be tokenized.

    Raises:
        RequestError: names the probe that is none.
    """
    if isinstance(probe, (str, bytes, Mapping)) or not isinstance(probe, Sequence):
        raise RequestError(
            f"probe = {probe!r:.200}: must be a list of pairs (prompt, token ids)", param="probe"
        )
    for index, one in enumerate(probe):
        if (
            isinstance(one, (str, bytes))
            or not isinstance(one, Sequence)
            or len(one) not in (1, 2)
            or not isinstance(one[0], (str, Sequence))
        ):
            raise RequestError(
                f"probe[{index}] = {one!r:.200}: must be a pair (prompt, token ids)", param="probe"
            )
    return [_prompt(one[0]) for one in probe]


def swap_options(
    path: object,
    probe: Sequence[Sequence[Any]],
    tokens: Sequence[list[int]],
    **others: Any,
) -> dict[str, Any]:
    """What the engine takes.

    Args:
        probe: as it was given.
        tokens: of its prompts.
        others: values of further keys; None: left out.
    """
    options: dict[str, Any] = {"path": as_path(path)}
    options |= {name: value for name, value in others.items() if value is not None}
    if tokens:
        expected = [list(one[1]) if len(one) > 1 else [] for one in probe]
        options["probe"] = [
            {"prompt_token_ids": ids, "expected_token_ids": follow}
            for ids, follow in zip(tokens, expected, strict=True)
        ]
    return options


def _prompt(given: Any) -> Prompt:
    return given if isinstance(given, str) else {"prompt_token_ids": [int(i) for i in given]}
