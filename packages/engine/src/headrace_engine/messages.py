"""Messages between the engine's core and its front end.

The core (scheduler, KV manager, executor) knows token ids only; the front end (input and output
processing) knows text. In one process these objects are handed over as they are; between processes they
travel as msgpack (msgspec), never as pickle.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from headrace_core.arrays import PackedArray
from headrace_core.output import StepTimes
from headrace_core.step import TokenLogprobs


@dataclass(slots=True)
class CoreOutput:
    """One step's output for one request."""

    request_id: str
    new_token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    """One per new token, if the request asked."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """All prompt positions but the first; once, with the first new token."""
    finish_reason: str | None = None
    """``stop``, ``length``, ``abort`` or ``error``; None while it runs."""
    stop_token_id: int | None = None
    """The stop token that ended it (EOS included), if one did."""
    error: str | None = None
    """With finish reason ``error``: what happened."""
    num_cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache at first scheduling."""
    num_preemptions: int = 0
    queued_ts: float = 0.0
    """``time.monotonic()`` of entering the queue and of first being scheduled; 0 = not yet."""
    scheduled_ts: float = 0.0
    pooled: PackedArray | None = None
    """The result of a pooling request, with its only output."""
    num_drafted: int = 0
    """Guesses of this step that were checked; all new tokens but the last were among them."""
    asleep: bool = False
    """With finish reason ``error``: the engine slept."""
    engine_ended: bool = False
    """With finish reason ``error``: one of several engines ended, and others serve."""
    dead_end: str | None = None
    """Reason why the request's own parameters leave it no next token; set with finish reason ``error``,
    in place of :attr:`error`."""
    kv_transfer_params: dict[str, Any] | None = None
    """At the end of a request with ``do_remote_decode``: what another engine needs to find its blocks."""


class TimedStep(NamedTuple):
    """A step's time, and the requests that were part of it, with or without an output."""

    request_ids: list[str]
    times: StepTimes


@dataclass(slots=True)
class CoreOutputs:
    """One step's outputs."""

    outputs: list[CoreOutput]
    timestamp: float
    """``time.monotonic()`` when the step's result arrived."""
    timed: TimedStep | None = None
    """With ``collect_detailed_traces``, and if a step ended; there may be no outputs then."""
    weights_version: str = ""
    """Of the weights that computed these tokens; "": not known."""
    earlier_versions: dict[str, list[str]] | None = None
    """By request, oldest first: those before, where weights changed while its prompt was computed."""
    tokens: dict[str, int] = field(default_factory=dict)
    """By request: its next token, of requests that have an output before and none here."""
