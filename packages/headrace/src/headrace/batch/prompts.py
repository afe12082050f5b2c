"""The prompts of ``headrace generate``: of the command line, of text files, of JSON lines.

Every line is checked before a model is loaded. A line that is not a prompt has an :attr:`Prompt.fault`:
it fails alone, and the others are answered.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from headrace.batch.lines import BOM, BatchInput
from headrace.suggestions import near_names
from headrace_core.errors import RequestError

FORMATS = ("auto", "text", "jsonl")
FIELDS = ("prompt", "custom_id")
"""Fields of a JSON line; the first is required."""
JSON_LINES = (".jsonl", ".ndjson")
"""Suffixes of files that ``auto`` reads as JSON lines."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, or what kept a line from being one."""

    text: str | None
    line: int | None = None
    """Number of its line in the file, from 1; None: it was typed on the command line."""
    custom_id: str | int | None = None
    """Identifier that the line gives; comes back with the answer."""
    fault: str | None = None
    """Reason why the line cannot be used."""

    @property
    def place(self) -> str:
        """The place that it comes from, for messages."""
        return "--prompt" if self.line is None else f"line {self.line}"


class Prompts(NamedTuple):
    """All prompts of a command, in order."""

    every: Sequence[Prompt]
    source: BatchInput
    """Their number and digest."""

    @property
    def faulty(self) -> list[Prompt]:
        """Prompts that cannot be used."""
        return [prompt for prompt in self.every if prompt.fault is not None]


def read_prompts(typed: Sequence[str], file: str | None, form: str = "auto") -> Prompts:
    """The prompts that were typed, then those of a file.

    Args:
        typed: texts of the command line.
        file: a path; ``-``: standard input.
        form: one of :data:`FORMATS`. ``auto`` reads files that end in :data:`JSON_LINES` as JSON lines
            and others as text, where a line that looks like JSON is refused, not guessed at.

    Raises:
        RequestError: there are no prompts, no line can be used, the format must be said, or a typed
            prompt is not UTF-8.
        OSError: the file cannot be read.
    """
    every = [Prompt(check_text("--prompt", text)) for text in typed]
    content = b""
    if file is not None:
        content = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        as_json = form == "jsonl" or (form == "auto" and file.lower().endswith(JSON_LINES))
        for number, raw in enumerate(content.removeprefix(BOM).split(b"\n"), 1):
            if not raw.strip():
                continue
            if not as_json and form == "auto":
                _refuse_json(file, number, raw)
            every.append(_of_json(number, raw) if as_json else _of_text(number, raw))
        every = _with_different_ids(every)
    if not every:
        if file is not None:
            raise RequestError(f"{file}: holds no prompts", param="input")
        raise RequestError("no prompts: give --prompt TEXT or --input FILE", param="prompt")
    if all(prompt.fault is not None for prompt in every):
        first = every[0]
        raise RequestError(
            f"{file}: no line can be used; {first.place}: {first.fault}", param="input"
        )
    digest = hashlib.sha256(json.dumps(list(typed)).encode() + b"\n" + content).hexdigest()
    return Prompts(every, BatchInput(len(every), digest))


def _with_different_ids(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts; of those with equal custom_ids, all but the first have a fault."""
    first: dict[str | int, int | None] = {}
    found = []
    for prompt in prompts:
        name = prompt.custom_id
        if name is not None and first.setdefault(name, prompt.line) != prompt.line:
            fault = f"custom_id = {name!r:.100}: must differ from that of line {first[name]}"
            prompt = replace(prompt, text=None, fault=prompt.fault or fault)
        found.append(prompt)
    return found


def check_text(place: str, text: str) -> str:
    """The text, if it is one: bytes that are not UTF-8 reach Python as halves of surrogate pairs.

    Raises:
        RequestError: it is not UTF-8; names the place.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{place}: character {error.start + 1} is not UTF-8; must be text in UTF-8",
            param=place.removeprefix("--"),
        ) from None
    return text


def _refuse_json(file: str, number: int, raw: bytes) -> None:
    begins = raw.lstrip()[:1].decode("latin-1")
    if begins == "{" or (begins == "[" and file.lower().endswith(".json")):
        raise RequestError(
            f"{file}: line {number} begins with {begins!r}, and the file's name does not end in "
            f"{' or '.join(JSON_LINES)}: set --input-format jsonl (each line is a JSON object with "
            "'prompt') or --input-format text (each line is a prompt as it stands)",
            param="input_format",
        )


def _of_text(number: int, raw: bytes) -> Prompt:
    try:
        return Prompt(raw.removesuffix(b"\r").decode("utf-8"), number)
    except UnicodeDecodeError as error:
        return Prompt(None, number, fault=_not_utf8(error))


def _of_json(number: int, raw: bytes) -> Prompt:
    try:
        content = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Prompt(None, number, fault=_not_utf8(error))
    except json.JSONDecodeError as error:
        return Prompt(None, number, fault=f"is not valid JSON: {error.msg} (column {error.colno})")
    except RecursionError:
        return Prompt(None, number, fault="is nested too deeply; " + _FORM)
    except ValueError:  # a number of too many digits
        return Prompt(None, number, fault="is not JSON that can be read")
    found = content.get("custom_id") if isinstance(content, dict) else None
    custom_id = found if type(found) in (str, int) else None
    fault = _fault_of(content)
    return Prompt(None if fault else content["prompt"], number, custom_id, fault)


def _fault_of(content: Any) -> str | None:
    """Why a JSON value is not a prompt's line."""
    if not isinstance(content, dict):
        return _FORM
    for name in content:
        if name not in FIELDS:
            near = near_names(name, FIELDS, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"fields are {', '.join(FIELDS)}"
            return f"{name[:100]!r}: unknown field; {hint}"
    if not isinstance(content.get("prompt"), str):
        said = f"prompt = {content['prompt']!r:.100}" if "prompt" in content else "prompt"
        return f"{said}: must be there, as text"
    custom_id = content.get("custom_id")
    if custom_id is not None and type(custom_id) not in (str, int):
        return f"custom_id = {custom_id!r:.100}: must be text or a whole number"
    try:
        content["prompt"].encode()
        str(custom_id).encode()
    except UnicodeEncodeError as error:
        return f"holds half of a surrogate pair: {error.object[error.start]!a}"
    return None


_FORM = 'must be a JSON object such as {"prompt": "Hello"}'


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"is not UTF-8 text: byte {error.object[error.start]:#04x} in column {error.start + 1}"
