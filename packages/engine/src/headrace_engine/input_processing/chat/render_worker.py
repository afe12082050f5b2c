"""Rendering in a process that can be killed, for templates or inputs that could take long.

Parent's half: :class:`RenderWorker`; child's half: :func:`main`. The process is a
:class:`~headrace_core.reliability.sandbox_process.SandboxProcess`. The parent imports jinja2 when a template
is rendered, not before.
"""

from __future__ import annotations

import json
import resource
import threading
from collections.abc import Mapping
from typing import Any

from headrace_core.reliability.sandbox_process import (
    ProcessEnded,
    SandboxProcess,
    TookTooLong,
    serve_json,
)

RENDER_SECONDS = 1.0
"""Wall-clock limit of one rendering."""
MEMORY_BYTES = 1 << 30
"""Address-space limit of the process."""


class RenderTimeout(Exception):
    """Rendering took longer than its limit; the process was killed."""


class RenderFailed(Exception):
    """The template failed; the message says how, in words fit for whoever sent it."""


class RenderWorker:
    """One child process that renders, replaced when it had to be killed. Thread-safe.

    Args:
        seconds: limit of one rendering.
    """

    def __init__(self, seconds: float = RENDER_SECONDS) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process = SandboxProcess("headrace_engine.input_processing.chat.render_worker")

    def render(self, source: str, variables: Mapping[str, Any], max_chars: int) -> str:
        """Like :func:`~headrace_engine.input_processing.chat.sandbox.render_template`, with limits that hold.

        Raises:
            RenderFailed: the template failed.
            OutputTooLong: its output is longer than ``max_chars``.
            RenderTimeout: it took too long.
        """
        return self._asked({"source": source, "variables": variables, "max_chars": max_chars})

    def content_format(self, source: str) -> str:
        """Like :func:`~headrace_engine.input_processing.chat.content_format.detect_content_format`, with
        limits that hold. Raises: as :meth:`render`.
        """
        return self._asked({"source": source})

    def _asked(self, job: Mapping[str, Any]) -> str:
        from headrace_engine.input_processing.chat.sandbox import OutputTooLong

        try:
            line = json.dumps(job).encode()
        except (TypeError, ValueError, RecursionError):
            raise RenderFailed("its variables must be plain data (JSON)") from None
        try:
            with self._lock:
                answer = self._process.ask_json(line, self._seconds)
        except TookTooLong as error:
            raise RenderTimeout(f"rendering {error}") from None
        except ProcessEnded as error:
            raise RenderFailed(f"rendering {error}") from None
        if "too_long" in answer:
            raise OutputTooLong(answer["too_long"])
        if "error" in answer:
            raise RenderFailed(answer["error"])
        text: str = answer["text"]
        return text

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._process.kill()


def describe_error(error: BaseException) -> str:
    """A template's error in words, without what Python would add of its own."""
    import jinja2

    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"line {error.lineno}: {error.message}"
    if isinstance(error, jinja2.TemplateError):
        return str(error) or type(error).__name__
    if isinstance(error, (MemoryError, RecursionError, OverflowError)):
        return "rendering needed more memory than it may have"
    return "an expression of it cannot be evaluated for these values"


def main() -> None:
    """The child: answer until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    # Before a message comes, whose time counts.
    import headrace_engine.input_processing.chat.content_format  # noqa: F401

    serve_json(_answer)


def _answer(job: Mapping[str, Any]) -> dict[str, Any]:
    from headrace_engine.input_processing.chat.content_format import detect_content_format
    from headrace_engine.input_processing.chat.sandbox import OutputTooLong, render_template

    try:
        if "variables" not in job:
            return {"text": detect_content_format(job["source"])}
        return {"text": render_template(job["source"], job["variables"], job["max_chars"])}
    except OutputTooLong as error:
        return {"too_long": str(error)}
    except Exception as error:
        return {"error": describe_error(error)}


if __name__ == "__main__":
    main()
