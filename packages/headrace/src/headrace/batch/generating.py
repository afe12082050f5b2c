"""Answers prompts through the offline engine, each kept as soon as it is there."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from headrace.batch.prompts import Prompt
from headrace_core.errors import GenerateError, RequestError, entry_of
from headrace_core.output import RequestOutput
from headrace_core.request import ChatPrompt
from headrace_core.sampling.params import SamplingParams

if TYPE_CHECKING:
    from headrace.batch.journal import Journal
    from headrace_engine.offline import OfflineEngine


class Answers(Protocol):
    """Keeps answers, by the prompt's number from 1."""

    def __contains__(self, number: object) -> bool: ...

    def add(self, number: int, prompt: Prompt, answer: RequestOutput | Exception) -> None:
        """Keep what a prompt came to: a final output, or why it failed."""
        ...


class JournalWriter:
    """Answers as JSON lines in a journal."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def __contains__(self, number: object) -> bool:
        return number in self._journal

    def add(self, number: int, prompt: Prompt, answer: RequestOutput | Exception) -> None:
        """Append it."""
        self._journal.add(number, json_line(prompt, answer).encode("utf-8", "replace"))


class PromptOrderPrinter:
    """Answers printed in the prompts' order: each once all before it are there.

    Args:
        show: prints the text of one.
        as_json: JSON lines; else the bare texts, of which a failed prompt has none.
    """

    def __init__(self, show: Callable[[str], None], *, as_json: bool) -> None:
        self._show, self._as_json = show, as_json
        self._next = 1
        self._held: dict[int, str | None] = {}

    def __contains__(self, number: object) -> bool:
        return False

    def add(self, number: int, prompt: Prompt, answer: RequestOutput | Exception) -> None:
        """Print it, and what waited for it."""
        if self._as_json:
            self._held[number] = json_line(prompt, answer)
        elif isinstance(answer, Exception):
            self._held[number] = None
        else:
            self._held[number] = "\n".join(one.text for one in answer.outputs)
        while self._next in self._held:
            text = self._held.pop(self._next)
            self._next += 1
            if text is not None:
                self._show(text)


def json_line(prompt: Prompt, answer: RequestOutput | Exception) -> str:
    """One line of the output: ``prompt`` and ``outputs``, or ``error`` in their place."""
    record: dict[str, Any] = {}
    if prompt.custom_id is not None:
        record["custom_id"] = prompt.custom_id
    record["prompt"] = prompt.text
    if isinstance(answer, Exception):
        record["error"] = {"code": entry_of(answer).code, "message": str(answer)}
        if prompt.line is not None:
            record["error"]["line"] = prompt.line
    else:
        record["outputs"] = [
            {"text": c.text, "finish_reason": c.finish_reason, "num_tokens": len(c.token_ids)}
            for c in answer.outputs
        ]
    return json.dumps(record, ensure_ascii=False)


class GenerateRun:
    """One run over a list of prompts.

    Args:
        engine: computes.
        params: of every prompt.
        answers: where they go; prompts whose answers are in it are left out.
        at_once: prompts under way together.
        chat: each prompt is a user's message.
        done: called after each prompt, with its number from 1 and its output, or None if it failed.
    """

    def __init__(
        self,
        engine: OfflineEngine,
        params: SamplingParams,
        answers: Answers,
        *,
        at_once: int,
        chat: bool = False,
        done: Callable[[int, RequestOutput | None], None],
    ) -> None:
        self._engine, self._params, self._answers = engine, params, answers
        self._at_once, self._chat, self._done = at_once, chat, done
        self.failed: list[tuple[Prompt, Exception]] = []
        """Prompts of this run that failed, in the order in which they did."""

    def run(self, prompts: Sequence[Prompt]) -> None:
        """Answer every prompt that has no answer yet. One that is refused, or fails, fails alone.

        Raises:
            EngineDead: the engine stopped; what was answered until then is kept.
            OSError: an answer could not be kept.
        """
        left = ((n, p) for n, p in enumerate(prompts, 1) if n not in self._answers)
        running: dict[str, tuple[int, Prompt]] = {}
        with self._engine.open_call() as call:
            while True:
                self._feed(left, running, call)
                if not running:
                    return
                for update in call.wait():
                    if update.finished:
                        number, prompt = running.pop(update.request_id)
                        self._take(number, prompt, _answer_of(update))

    def _feed(
        self, left: Iterator[tuple[int, Prompt]], running: dict[str, tuple[int, Prompt]], call: Any
    ) -> None:
        while len(running) < self._at_once and (item := next(left, None)) is not None:
            number, prompt = item
            if prompt.text is None:
                self._take(number, prompt, RequestError(f"{prompt.place}: {prompt.fault}"))
                continue
            request_id = uuid.uuid4().hex
            asked: Any = prompt.text
            if self._chat:
                asked = ChatPrompt(messages=[{"role": "user", "content": prompt.text}])
            try:
                self._engine.add_request(request_id, asked, self._params, call=call)
            except RequestError as error:
                self._take(number, prompt, error)
            else:
                running[request_id] = item

    def _take(self, number: int, prompt: Prompt, answer: RequestOutput | Exception) -> None:
        self._answers.add(number, prompt, answer)
        if isinstance(answer, Exception):
            self.failed.append((prompt, answer))
        self._done(number, None if isinstance(answer, Exception) else answer)


def _answer_of(update: Any) -> RequestOutput | Exception:
    output = update.output
    if output is not None and (reasons := [each.error for each in output.outputs if each.error]):
        return RequestError(reasons[0])
    if output is None or any(each.finish_reason in ("error", "abort") for each in output.outputs):
        why = update.error or GenerateError("the engine failed on this prompt; the log says why")
        return why if isinstance(why, Exception) else GenerateError(str(why))
    assert isinstance(output, RequestOutput)
    return output
