"""What a caller says of a swap of weights: :class:`SwapOrder`. No torch; all of it may come from a socket."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace_core.errors import RequestError
from headrace_engine.weights.version import checked_version

DRAIN_SECONDS = 60.0
"""Time that requests under way have to end, if nothing is said."""
MAX_DRAIN_SECONDS = 86_400.0
MAX_PROBES = 256
MAX_PROBE_TOKENS = 1 << 20
"""Of all probes of an order together."""
FIELDS = ("path", "weights_version", "drain_timeout", "probe", "max_perplexity")


@dataclass(frozen=True, slots=True)
class Probe:
    """A prompt that new weights must continue as is said, before they serve anybody."""

    prompt_token_ids: list[int]
    expected_token_ids: list[int]
    """Its greedy continuation; empty: the prompt counts for the perplexity only."""


@dataclass(frozen=True, slots=True)
class SwapOrder:
    """Weights to be read, and what they have to pass."""

    path: str
    """Folder or file of a checkpoint on the machine of the workers."""
    version: str | None = None
    """The weights' name; None: the next number."""
    drain_seconds: float = DRAIN_SECONDS
    """Requests that still run so long after the weights are ready end the swap, not the other way round."""
    probes: tuple[Probe, ...] = ()
    max_perplexity: float | None = None
    """Of all probes' prompts: exp of the mean negative log-probability of all tokens but the first ones."""

    @classmethod
    def of(cls, options: object) -> SwapOrder:
        """An order out of plain data.

        Raises:
            RequestError: names the field.
        """
        if not isinstance(options, Mapping) or not all(key in FIELDS for key in options):
            raise RequestError(
                f"args: {options!r:.200}: must be one mapping with the keys {', '.join(FIELDS)}",
                param="args",
            )
        path = options.get("path")
        if not isinstance(path, str) or not path or "\0" in path:
            raise RequestError(
                f"path = {path!r:.200}: must name the folder or file of a checkpoint", param="path"
            )
        version = options.get("weights_version")
        probes = _probes(options.get("probe"))
        return cls(
            path,
            None if version is None else checked_version(version),
            _drain_seconds(options.get("drain_timeout")),
            probes,
            _perplexity(options.get("max_perplexity"), probes),
        )


def _drain_seconds(value: Any) -> float:
    if value is None:
        return DRAIN_SECONDS
    if not _is_number(value) or not 0 <= value <= MAX_DRAIN_SECONDS:
        raise RequestError(
            f"drain_timeout = {value!r:.100}: must be a number of seconds from 0 to "
            f"{MAX_DRAIN_SECONDS:g}",
            param="drain_timeout",
        )
    return float(value)


def _perplexity(value: Any, probes: Sequence[Probe]) -> float | None:
    if value is None:
        return None
    if not _is_number(value) or not value >= 1:
        raise RequestError(
            f"max_perplexity = {value!r:.100}: must be a number from 1 on", param="max_perplexity"
        )
    if not any(len(probe.prompt_token_ids) > 1 for probe in probes):
        raise RequestError(
            "max_perplexity: must be left out without a probe of two tokens or more",
            param="max_perplexity",
        )
    return float(value)


def _probes(value: Any) -> tuple[Probe, ...]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)) or not 0 < len(value) <= MAX_PROBES:
        raise RequestError(
            f"probe = {value!r:.200}: must be a list of 1 to {MAX_PROBES} probes", param="probe"
        )
    probes = tuple(_probe(one, f"probe[{index}]") for index, one in enumerate(value))
    size = sum(len(one.prompt_token_ids) + len(one.expected_token_ids) for one in probes)
    if size > MAX_PROBE_TOKENS:
        raise RequestError(
            f"probe: {size} tokens: must be at most {MAX_PROBE_TOKENS} in all", param="probe"
        )
    return probes


def _probe(value: Any, where: str) -> Probe:
    keys = ("prompt_token_ids", "expected_token_ids")
    if not isinstance(value, Mapping) or not all(key in keys for key in value):
        raise RequestError(
            f"{where} = {value!r:.200}: must be a mapping with the keys {' and '.join(keys)}",
            param=where,
        )
    prompt = _tokens(value.get(keys[0]), f"{where}.{keys[0]}")
    if not prompt:
        raise RequestError(f"{where}.{keys[0]}: must hold at least one token", param=where)
    expected = value.get(keys[1])
    return Probe(prompt, [] if expected is None else _tokens(expected, f"{where}.{keys[1]}"))


def _tokens(value: Any, where: str) -> list[int]:
    if not isinstance(value, (list, tuple)) or not all(
        isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in value
    ):
        raise RequestError(f"{where} = {value!r:.200}: must be a list of token ids", param=where)
    return list(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)
