"""A small client of a running OpenAI-compatible server, on the standard library alone."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from headrace.cli.conversation import AnswerReport
from headrace_core.errors import ConfigError, PromptTooLong, RequestError

TIMEOUT = 600.0
"""Longest silence of the server, in seconds."""


class ServerContextFull(PromptTooLong):
    """The messages do not fit into the server's context, as the server says it."""

    def __init__(self, message: str) -> None:
        RequestError.__init__(self, message, param="messages")


@dataclass(slots=True)
class RemoteServer:
    """A server and what it needs to be told.

    Raises:
        ConfigError: the URL or the key cannot be used.

    Raises (from every method):
        RequestError: the server cannot be reached or refuses; says what to check.
    """

    url: str
    """With the version, e.g. ``http://localhost:8000/v1``."""
    model: str | None = None
    """None: the first that the server lists."""
    api_key: str | None = field(default_factory=lambda: os.environ.get("OPENAI_API_KEY"))

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname)
            _ = parts.port
        except ValueError:
            usable = False
        if not usable:
            raise ConfigError(
                f"url = {self.url!r}: must be as http://localhost:8000/v1", field="url"
            )
        if self.api_key and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ConfigError("api_key: must be printable ASCII, as a header is", field="api_key")

    def model_name(self) -> str:
        """The model to ask for."""
        return str(self.model or self.model_card()["id"])

    def model_card(self) -> Mapping[str, Any]:
        """The model's entry in the server's list."""
        with self._open("/models", None) as response:
            try:
                cards = json.load(response)["data"]
                return next(c for c in cards if self.model is None or c["id"] == self.model)
            except StopIteration:
                wanted = "no model" if self.model is None else f"no model {self.model!r}"
                raise RequestError(f"{self.url} serves {wanted}", param="model_name") from None
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise RequestError(
                    f"{self.url}/models is not a list of models; a server's URL ends in /v1, as in "
                    "http://localhost:8000/v1",
                    param="url",
                ) from error

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        report: AnswerReport | None = None,
        **options: Any,
    ) -> Iterator[str]:
        """Stream the answer's text.

        Raises:
            PromptTooLong: the messages do not fit into the context.
        """
        report = report or AnswerReport()
        usage = {"stream_options": {"include_usage": True}}
        body = {"model": self.model_name(), "messages": list(messages), "stream": True}
        for event in self._events("/chat/completions", {**body, **usage, **options}):
            report.num_tokens = (event.get("usage") or {}).get("total_tokens", report.num_tokens)
            for choice in event.get("choices", ()):
                report.finish_reason = choice.get("finish_reason")
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
            for line in self._lines(response):
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise RequestError(f"the server failed: {event['error'].get('message')}")
                    yield event

    def _lines(self, response: Any) -> Iterator[str]:
        try:
            for raw in response:
                yield raw.decode("utf-8").strip()
        except (OSError, http.client.HTTPException) as error:
            raise RequestError(f"{self.url}: the connection broke ({error})") from error

    def _open(self, path: str, body: Mapping[str, Any] | None) -> Any:
        if not self.url.startswith(("http://", "https://")):
            raise RequestError(
                f"--url = {self.url!r}: must be a URL such as http://localhost:8000/v1", param="url"
            )
        request = urllib.request.Request(self.url.rstrip("/") + path)
        request.add_header("Content-Type", "application/json")
        if self.api_key:
            request.add_header("Authorization", f"Bearer {self.api_key}")
        data = None if body is None else json.dumps(body).encode()
        try:
            return urllib.request.urlopen(request, data, timeout=TIMEOUT)
        except urllib.error.HTTPError as error:
            content = _error_of(error)
            message = f"{self.url}: HTTP {error.code}: {content.get('message') or error.reason}"
            if error.code == 404 and not self.url.rstrip("/").endswith("/v1"):
                message += "; a server's URL ends in /v1, as in http://localhost:8000/v1"
            kind = ServerContextFull if _is_too_long(content) else RequestError
            raise kind(message) from error
        except (OSError, http.client.HTTPException) as error:
            raise RequestError(
                f"{self.url} cannot be reached ({error}); is `headrace serve` running there?"
            ) from error


class ConnectedServer(RemoteServer):
    """A server whose model is known, as the terminal uses it."""

    def __init__(self, server: RemoteServer) -> None:
        card = server.model_card()
        super().__init__(server.url, str(card["id"]), server.api_key)
        context = card.get("max_model_len")
        self.context = context if isinstance(context, int) else None

    @property
    def name(self) -> str:
        """The model's name."""
        return self.model_name()

    @property
    def place(self) -> str:
        """The place where it runs, for the user."""
        return f"served at {self.url}"

    def close(self) -> None:
        """Do nothing: no connection is kept between requests."""


def connect_server(url: str, model: str | None, api_key: str | None) -> ConnectedServer:
    """Ask a server for its model.

    Args:
        model: None: the first that it lists.
        api_key: None: that of the environment.

    Raises:
        RequestError: the server cannot be reached, or does not serve the model.
    """
    key = {"api_key": api_key} if api_key else {}
    return ConnectedServer(RemoteServer(url, model, **key))


def _error_of(error: urllib.error.HTTPError) -> Mapping[str, Any]:
    """The error of an answer's body; {} if it has none."""
    try:
        content = json.loads(error.read())["error"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return content if isinstance(content, dict) else {"message": str(content)}


def _is_too_long(content: Mapping[str, Any]) -> bool:
    """True if an error is about the context, by headrace's own code or OpenAI's."""
    return (
        content.get("headrace_code") == "HR-REQ-003"
        or content.get("code") == "context_length_exceeded"
        or "maximum context length" in str(content.get("message"))
    )
