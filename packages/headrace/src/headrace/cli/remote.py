"""A small client of a running OpenAI-compatible server, on the standard library alone."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace_core.errors import RequestError

TIMEOUT = 600.0
"""Longest silence of the server, in seconds."""


@dataclass(frozen=True, slots=True)
class RemoteServer:
    """A server and what it needs to be told.

    Raises (from every method):
        RequestError: the server cannot be reached or refuses; says what to check.
    """

    url: str
    """With the version, e.g. ``http://localhost:8000/v1``."""
    model: str | None = None
    """None: the first that the server lists."""
    api_key: str | None = field(default_factory=lambda: os.environ.get("OPENAI_API_KEY"))

    def model_name(self) -> str:
        """The model to ask for."""
        if self.model is not None:
            return self.model
        with self._open("/models", None) as response:
            models = json.load(response)["data"]
        return str(models[0]["id"])

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Iterator[str]:
        """Stream the answer's text."""
        body = {"model": self.model_name(), "messages": list(messages), "stream": True, **options}
        for event in self._events("/chat/completions", body):
            for choice in event.get("choices", ()):
                delta = choice.get("delta", {})
                yield (delta.get("reasoning") or "") + (delta.get("content") or "")

    def complete(self, prompt: str, **options: Any) -> Iterator[str]:
        """Stream the completion's text."""
        body = {"model": self.model_name(), "prompt": prompt, "stream": True, **options}
        for event in self._events("/completions", body):
            for choice in event.get("choices", ()):
                yield choice.get("text") or ""

    def _events(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        with self._open(path, body) as response:
            for raw in response:
                line = raw.decode("utf-8").strip()
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise RequestError(f"the server failed: {event['error'].get('message')}")
                    yield event

    def _open(self, path: str, body: Mapping[str, Any] | None) -> Any:
        request = urllib.request.Request(self.url.rstrip("/") + path)
        request.add_header("Content-Type", "application/json")
        if self.api_key:
            request.add_header("Authorization", f"Bearer {self.api_key}")
        data = None if body is None else json.dumps(body).encode()
        try:
            return urllib.request.urlopen(request, data, timeout=TIMEOUT)
        except urllib.error.HTTPError as error:
            raise RequestError(f"{self.url}: HTTP {error.code}: {_message(error)}") from error
        except OSError as error:
            raise RequestError(
                f"{self.url} cannot be reached ({error}); is `headrace serve` running there?"
            ) from error


def _message(error: urllib.error.HTTPError) -> str:
    try:
        content = json.loads(error.read())["error"]
    except (ValueError, KeyError):
        return str(error.reason)
    return str(content.get("message") if isinstance(content, dict) else content)
