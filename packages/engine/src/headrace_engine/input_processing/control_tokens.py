"""Text of control tokens in messages: it stays text.

A chat template writes turns with tokens that the tokenizer marks special (``<|im_end|>``), and the
tokenizer knows these by their text. So whoever writes that text into a message would write a turn of
somebody else's. Before a chat is rendered, a *guard* is put inside each such text: a character that
occurs nowhere else. After rendering, an occurrence without a guard is the template's own, and one
with a guard is encoded as text (:class:`~headrace_core.text.GuardableTokenizer`). A chat without such
text gets no guard and is rendered and encoded as if this module did not exist.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from headrace_core.errors import RequestError
from headrace_core.request import ChatPrompt, modality_of
from headrace_engine.input_processing.chat.arguments import MAX_ARGUMENTS, arguments_object

GUARDS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
"""Candidates: code points that Unicode reserves for such use and no text holds."""
TRUSTED_ROLES = frozenset({"system", "developer"})
"""Their text is the developer's."""
COMMON_ROLES = TRUSTED_ROLES | {"user", "assistant", "tool", "function"}
"""Roles that every template may build marks from."""
_END = ""
"""Key of a trie's node where a text ends."""


class RenderedPrompt(NamedTuple):
    """A chat's prompt as text."""

    text: str
    guard: str = ""
    """The character that, inside the text of a special token, makes it plain text. "": there is
    none, and every special token's text is the template's own."""
    cache_salt: str | None = None

    @property
    def plain(self) -> str:
        """The text without guards."""
        return self.text.replace(self.guard, "") if self.guard else self.text


class MessageGuard:
    """Marks the text of control tokens in what users, tools and documents say.

    Args:
        texts: of the special tokens. A text of one character cannot be interrupted; it is left out.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = frozenset(text for text in texts if len(text) > 1)

    def found_in(self, text: str) -> frozenset[str]:
        """The control tokens of a text."""
        return frozenset(self._whole.findall(text)) if self._texts else frozenset()

    def protect(
        self, prompt: ChatPrompt, turn_tokens: Callable[[], frozenset[str]] = frozenset
    ) -> tuple[ChatPrompt, str]:
        """A chat with guards, and the character that serves as one; "" if nothing needs any.

        What developers say is left alone. Of an assistant's turn the calls are guarded, for their
        arguments are data; in its text, which may hold marks that the model wrote, those of turns are.

        Args:
            turn_tokens: the control tokens between turns; asked only if an assistant's text holds some.

        Raises:
            RequestError: a role holds the text of a control token, or part of one; or the chat holds
                every character that could serve.
        """
        if not self._texts or not _is_list(prompt.messages):
            return prompt, ""  # anything but a list of messages is refused elsewhere
        self._check_roles(prompt.messages)
        messages = [_with_open_calls(message) for message in prompt.messages]
        answered = any(self._whole.search(text) for text in _answered(messages))
        in_answers = MessageGuard(turn_tokens() if answered else ())
        suspicious = (
            any(self._is_suspicious(text) for text in _said(messages))
            or any(self._whole.search(text) for text in strings((prompt.tools, prompt.documents)))
            or any(in_answers.found_in(text) for text in _answered(messages))
        )
        if not suspicious:
            return prompt, ""
        guard = _unused((messages, prompt.tools, prompt.documents, prompt.chat_template_kwargs))
        change = functools.partial(self._guarded, guard=guard)
        answer_change = functools.partial(in_answers._guarded, guard=guard)
        protected = dataclasses.replace(
            prompt,
            messages=[_protected(message, change, answer_change) for message in messages],
            tools=_mapped(prompt.tools, change),
            documents=_mapped(prompt.documents, change),
        )
        return protected, guard

    def protect_text(self, *texts: str) -> tuple[tuple[str, ...], str]:
        """The same for texts that somebody else's template takes."""
        if not self._texts or not any(map(self._is_suspicious, texts)):
            return texts, ""
        guard = _unused(texts)
        return tuple(self._guarded(text, guard=guard) for text in texts), guard

    def settle(self, text: str, guard: str) -> RenderedPrompt:
        """The prompt of a chat that was rendered with guards.

        Guards that the template has spelled in another way (JSON, URLs) are told by their spelling.
        """
        if not guard:
            return RenderedPrompt(text)
        rendered = RenderedPrompt(_escaped(guard).sub(guard, text), guard)
        plain = rendered.plain
        between = [piece.replace(guard, "") for piece in self._whole.split(rendered.text)]
        if between == self._whole.split(plain):
            return RenderedPrompt(plain)  # no guard keeps anything apart
        return rendered

    def _guarded(self, text: str, *, guard: str) -> str:
        """The text with a guard in each control token, and in the beginning of one at its end."""
        if not self._texts:
            return text
        for start in reversed(self._unfinished(text)):
            text = text[: start + 1] + guard + text[start + 1 :]
        if self._whole.search(text) is None:
            return text
        return self._starts.sub(lambda found: found[0] + guard, text)

    def _is_suspicious(self, text: str) -> bool:
        return self._whole.search(text) is not None or bool(self._unfinished(text))

    def _unfinished(self, text: str) -> list[int]:
        """Positions near the end of a text where a control token begins and is cut off. A template may
        complete it, since templates join parts and strip the space around them."""
        end = len(text.rstrip())
        starts = range(max(0, end - self._longest + 1), end)
        return [start for start in starts if text[start:end] in self._beginnings]

    def _check_roles(self, messages: Iterable[object]) -> None:
        for index, message in enumerate(messages):
            role = message.get("role") if isinstance(message, Mapping) else None
            if isinstance(role, str) and role not in COMMON_ROLES and self._builds_token(role):
                raise RequestError(
                    f"messages[{index}].role = {role!r:.100}: must not hold the text of a control "
                    "token, or a part of one; the template builds such tokens from roles",
                    param=f"messages[{index}].role",
                )

    def _builds_token(self, role: str) -> bool:
        """True if a role is a piece of a control token, or begins or ends with one."""
        heads = (role[:length] for length in range(2, self._longest))
        return self._is_suspicious(role) or any(head in self._endings for head in heads)

    @functools.cached_property
    def _whole(self) -> re.Pattern[str]:
        """Finds control tokens: the leftmost, of these the longest."""
        return re.compile(trie_pattern(self._texts))

    @functools.cached_property
    def _starts(self) -> re.Pattern[str]:
        """Finds the first character of each, of those that overlap too."""
        return re.compile(f"(?={trie_pattern(self._texts)}).", re.DOTALL)

    @functools.cached_property
    def _beginnings(self) -> frozenset[str]:
        return frozenset(text[:end] for text in self._texts for end in range(1, len(text)))

    @functools.cached_property
    def _endings(self) -> frozenset[str]:
        return frozenset(text[start:] for text in self._texts for start in range(1, len(text) - 1))

    @functools.cached_property
    def _longest(self) -> int:
        return max(map(len, self._texts))


def trie_pattern(texts: Iterable[str]) -> str:
    """A regular expression for any of some texts, the longest that fits. It reads a character at most
    once for each place where a text could begin, however many texts there are."""
    root: dict[str, Any] = {}
    for text in texts:
        node = root
        for character in text:
            node = node.setdefault(character, {})
        node[_END] = {}
    return _pattern(root)


def _pattern(node: Mapping[str, Any]) -> str:
    branches = [re.escape(key) + _pattern(node[key]) for key in sorted(node) if key != _END]
    if not branches:
        return ""
    whole = branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
    return f"(?:{whole})?" if _END in node else whole


def strings(value: object) -> Iterator[str]:
    """All strings of JSON data, names of members too; not the content of media."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        if modality_of(value):
            return
        for key, inner in value.items():
            yield from strings(key)
            yield from strings(inner)
    elif _is_list(value):
        for inner in value:
            yield from strings(inner)


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _said(messages: Iterable[object]) -> Iterator[str]:
    """Strings of messages that are to be guarded."""
    for message in messages:
        if isinstance(message, Mapping) and message.get("role") not in TRUSTED_ROLES:
            is_answer = message.get("role") == "assistant"
            yield from strings(message.get("tool_calls") if is_answer else message)


def _answered(messages: Iterable[object]) -> Iterator[str]:
    """Strings of assistants' turns, but for their calls."""
    for message in messages:
        if isinstance(message, Mapping) and message.get("role") == "assistant":
            yield from strings({k: v for k, v in message.items() if k != "tool_calls"})


def _with_open_calls(message: Any) -> Any:
    """A message whose calls have their arguments as objects: JSON text, whole or cut, can spell anything
    in escapes."""
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if not _is_list(calls):
        return message
    return {**message, "tool_calls": [_open_call(call) for call in calls]}


def _open_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(arguments, str) or len(arguments) > MAX_ARGUMENTS:
        return call  # what is too long is refused elsewhere
    opened = arguments_object(arguments)
    return {**call, "function": {**function, "arguments": opened}}  # type: ignore[dict-item]


def _protected(
    message: Any, change: Callable[[str], str], answer_change: Callable[[str], str]
) -> Any:
    if not isinstance(message, Mapping) or message.get("role") in TRUSTED_ROLES:
        return message
    if message.get("role") == "assistant":
        calls = _mapped(message.get("tool_calls"), change)
        made: dict[str, Any] = _mapped(message, answer_change)
        return {**made, "tool_calls": calls} if calls else made
    return _mapped(message, change)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """JSON data with each of its strings changed; see :func:`strings`."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        if modality_of(value):
            return value
        return {_mapped(key, change): _mapped(inner, change) for key, inner in value.items()}
    if _is_list(value):
        return [_mapped(inner, change) for inner in value]
    return value


def _unused(value: object) -> str:
    """A guard character that none of the strings holds, in any spelling.

    Raises:
        RequestError: the strings hold every candidate.
    """
    texts = list(strings(value))
    for guard in GUARDS:
        spelled = _escaped(guard)
        if not any(guard in text or spelled.search(text) for text in texts):
            return guard
    raise RequestError(
        "messages: must not hold all of the code points U+FDD0 to U+FDEF, of which one is needed to "
        "keep text of control tokens apart",
        param="messages",
    )


@functools.cache
def _escaped(guard: str) -> re.Pattern[str]:
    """A guard as JSON without other than ASCII characters, and as URLs, spell it."""
    in_json, in_urls = json.dumps(guard)[1:-1], urllib.parse.quote(guard)
    return re.compile(f"{re.escape(in_json)}|{re.escape(in_urls)}", re.IGNORECASE)
