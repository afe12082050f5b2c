"""Requests to servers, and the reading of their answers."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

from headrace.bench.datasets import SampleRequest
from headrace.bench.http import HttpResponse, events
from headrace.bench.metrics import Outcome
from headrace_core.errors import ConfigError


class StreamEvent(NamedTuple):
    """Contents of one event."""

    text: str
    has_token: bool
    """Even where its text is empty: the server says so."""
    is_choice: bool
    """It belongs to the output, if only by ending it."""


class Backend(ABC):
    """One route: its bodies and its events."""

    endpoint: str
    """Path where it is served, unless ``--endpoint`` says otherwise."""
    streams = True

    @abstractmethod
    def body(self, sample: SampleRequest, model: str, options: Mapping[str, Any]) -> bytes:
        """The request's JSON.

        Args:
            options: further fields, which win over those made here.

        Raises:
            ConfigError: the route takes no such prompt.
        """

    def outcome(self, answer: HttpResponse, sample: SampleRequest, begin: float) -> Outcome:
        """Measures of an answer.

        Args:
            begin: ``time.perf_counter`` of the run's start.
        """
        outcome = Outcome(answer.started - begin, num_prompt_tokens=sample.num_prompt_tokens or 0)
        if answer.status != 200:
            outcome.error = f"HTTP {answer.status}: {answer.body[:300].decode('utf-8', 'replace')}"
            return outcome
        try:
            self._read(answer, outcome)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            outcome.error = f"the answer cannot be read: {error!r}"
        return outcome

    @abstractmethod
    def _read(self, answer: HttpResponse, outcome: Outcome) -> None: ...


class Streaming(Backend):
    """Server-sent events with choices and, at the end, the usage."""

    def _read(self, answer: HttpResponse, outcome: Outcome) -> None:
        last: float | None = None
        texts: list[str] = []
        usage: Mapping[str, Any] = {}
        counted = 0
        for at, content in events(answer.pieces):
            event = json.loads(content)
            if event.get("error"):
                outcome.error = f"the server failed: {event['error']}"
                return
            before, usage = usage, event.get("usage") or usage
            delta = self._delta(event)
            if not delta.is_choice:
                continue
            outcome.e2el = at - answer.started
            if not delta.text and not delta.has_token:
                continue  # a role, or the reason for the end
            texts.append(delta.text)
            # With usage in every event, the tokens that this one brought; else every event is one token.
            num_tokens = usage.get("completion_tokens", 0) - counted if usage is not before else 1
            counted += num_tokens
            if last is None:
                outcome.ttft = at - answer.started
            elif num_tokens > 0:
                outcome.itls += [(at - last) / num_tokens] * num_tokens
            last = at
            outcome.num_chunks += 1
        if last is None:
            outcome.error = "no token arrived"
            return
        self._settle(outcome, usage, "".join(texts))

    @abstractmethod
    def _delta(self, event: Mapping[str, Any]) -> StreamEvent: ...

    def _settle(self, outcome: Outcome, usage: Mapping[str, Any], text: str) -> None:
        outcome.text = text
        # Without usage the events are all there is to count.
        outcome.num_output_tokens = usage.get("completion_tokens", outcome.num_chunks)
        outcome.num_prompt_tokens = usage.get("prompt_tokens", outcome.num_prompt_tokens)
        details = usage.get("prompt_tokens_details") or {}
        outcome.num_cached_tokens = details.get("cached_tokens") or 0


class Completions(Streaming):
    """``/v1/completions``: prompts as text or token ids."""

    endpoint = "/v1/completions"

    def body(self, sample: SampleRequest, model: str, options: Mapping[str, Any]) -> bytes:
        return _encoded(
            {
                "model": model,
                "prompt": sample.prompt,
                "max_tokens": sample.num_output_tokens,
                "stream": True,
                "stream_options": {"include_usage": True},
                **options,
            }
        )

    def _delta(self, event: Mapping[str, Any]) -> StreamEvent:
        choices = event.get("choices")
        if not choices:
            return StreamEvent("", False, False)
        # A token may be no text yet (part of a character); the event that only tells the end is no token.
        has_token = bool(choices[0].get("token_ids")) or choices[0].get("finish_reason") is None
        return StreamEvent(choices[0].get("text") or "", has_token, True)


class Chat(Streaming):
    """``/v1/chat/completions``: the prompt is a user's message."""

    endpoint = "/v1/chat/completions"

    def body(self, sample: SampleRequest, model: str, options: Mapping[str, Any]) -> bytes:
        if not isinstance(sample.prompt, str):
            raise ConfigError(
                "backend 'openai-chat': messages are text, and the dataset drew token ids; name the model's "
                "folder with --tokenizer",
                field="tokenizer",
            )
        return _encoded(
            {
                "model": model,
                "messages": [{"role": "user", "content": sample.prompt}],
                "max_completion_tokens": sample.num_output_tokens,
                "stream": True,
                "stream_options": {"include_usage": True},
                **options,
            }
        )

    def _delta(self, event: Mapping[str, Any]) -> StreamEvent:
        choices = event.get("choices")
        if not choices:
            return StreamEvent("", False, False)
        delta = choices[0].get("delta") or {}
        text = (
            delta.get("content") or delta.get("reasoning") or delta.get("reasoning_content") or ""
        )
        # The event that opens the message has a role, and comes before any token.
        unseen = delta.get("content") == "" and "role" not in delta
        unseen = unseen and choices[0].get("finish_reason") is None
        has_token = bool(choices[0].get("token_ids") or delta.get("tool_calls")) or unseen
        return StreamEvent(text, has_token, True)


class Embeddings(Backend):
    """``/v1/embeddings``: one text a request; only the end-to-end latency means something."""

    endpoint = "/v1/embeddings"
    streams = False

    def body(self, sample: SampleRequest, model: str, options: Mapping[str, Any]) -> bytes:
        return _encoded({"model": model, "input": sample.prompt, **options})

    def _read(self, answer: HttpResponse, outcome: Outcome) -> None:
        content = answer.json()
        if not content["data"]:
            raise ValueError("no embedding in it")
        usage = content.get("usage") or {}
        outcome.e2el = answer.ended - answer.started
        outcome.num_prompt_tokens = usage.get("prompt_tokens", outcome.num_prompt_tokens)


BACKENDS: Mapping[str, type[Backend]] = {
    "openai": Completions,
    "headrace": Completions,
    "vllm": Completions,
    "openai-chat": Chat,
    "openai-embeddings": Embeddings,
}
"""Name -> route; the first three are the same."""


def _encoded(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
