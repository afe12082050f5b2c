"""Messages of libraries about a constraint, in words that may be shown to its sender.

Foreign messages can hold paths, addresses and traces. Of theirs only the first plain phrase is
kept, made of nothing but letters, figures and harmless marks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_POSITION = re.compile(r"(?:at |^|line )(\d+)(?:\((\d+)\))?[:,]")
_LOGGED = re.compile(r"^\[[\d:]+\] \S+:\d+: (?:Check failed: \(.*?\) is (?:true|false): )?")
_REPEATED = re.compile(r'invalid regex ".*" \(in regex\): |\s+in regex /.*$')
"""A pattern that the client has sent itself, quoted: with its backslashes it would end the phrase."""
_PHRASE = re.compile(r"[\w ,.'\"()<>=+*:;|&%?!\[\]{}$^/-]+")
_PATH = re.compile(r"(^|[^\w])[~/]|\w\.(py|rs|so|cc|h)\b|/.*/")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{4,}")
_MOST = 160
_OURS: Mapping[str, str] = {
    "lookarounds not supported yet; (Start|End)":
        "'^' and '$' must stand at the beginning and the end of the regex, without the flag m",
    "lookarounds not supported yet; Word":
        "a regex must not hold word boundaries (\\b, \\B)",
    "^look-around, including":
        "a regex must not hold look-ahead or look-behind, (?=...) for example",
    "^backreferences are not":
        "a regex must not hold back-references (\\1) or octal escapes; \\0 is written \\x00",
    "^hexadecimal literal is not a Unicode scalar":
        "an escaped code point must be a character: at most 10FFFF, and not half of a surrogate pair",
    "^decimal literal invalid":
        "a repetition's number is too large",
    "^repetition quantifier expects":
        "a repetition must be {m}, {m,} or {m,n}; a brace that stands for itself must be escaped",
    "^unrecognized flag":
        "a group must begin with (, (?:, (?P<name>, or flags of i, m, s, u, U and x",
    "^unrecognized escape sequence":
        "unknown escape in a regex; only marks of punctuation may be escaped to stand for themselves",
    "^oneOf constraints are not":
        "two alternatives may hold for the same value: must differ in 'type', or in a required property's "
        "'const' or 'enum'; or write 'anyOf'",
    "^fuel exhausted when checking":
        "too complex: must repeat less",
    "Too many items":
        "too many ways to go on: must have fewer alternatives or repetitions, or marks between them; "
        "recursion must end",
    "Regex is empty":
        "no text satisfies all keywords: must not contradict each other",
    "^min/maxProperties only supported when all":
        "with 'minProperties' or 'maxProperties', all of 'properties' must be 'required'",
    "^patternProperty regexes":
        "two regexes must not match the same name",
    "^error parsing string":
        "this text is not closed, or holds an unknown escape: must be written as in JSON",
}  # fmt: skip
"""Messages of llguidance and its regex library -> the same in our words."""


def plain(message: str) -> str:
    """The message's most telling phrase, cleaned; "" if none is fit to be shown."""
    if "panic" in message or "Traceback" in message:
        return ""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    line = (errors or lines or [""])[0]
    line = _REPEATED.sub("", _POSITION.sub("", _LOGGED.sub("", line))).strip()
    for theirs, ours in _OURS.items():
        if re.search(theirs, line):
            return ours
    found = _PHRASE.match(line)
    phrase = found.group().strip(" ,:;(") if found else ""
    path = _PATH.search(phrase)
    phrase = phrase[: path.start()].strip(" ,:;('") if path else phrase
    return "" if _ADDRESS.search(phrase) else phrase[:_MOST]


def place(message: str) -> tuple[int, int] | None:
    """(line, column) with which a message begins, both from 1, column 0 if it names none; None: no line."""
    found = _POSITION.match(message.strip())
    return None if found is None else (int(found[1]), int(found[2] or 0))
