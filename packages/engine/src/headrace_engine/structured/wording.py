"""What libraries say about a constraint, in words that may be shown to whoever sent it.

Foreign messages can hold paths, addresses and traces. Of theirs only the first plain phrase is
kept, made of nothing but letters, figures and harmless marks.
"""

from __future__ import annotations

import re

_POSITION = re.compile(r"(?:at |^|line )(\d+)(?:\((\d+)\))?[:,]")
_LOGGED = re.compile(r"^\[[\d:]+\] \S+:\d+: (?:Check failed: \(.*?\) is (?:true|false): )?")
_REPEATED = re.compile(r'invalid regex ".*" \(in regex\): |\s+in regex /.*$')
"""A pattern that the client has sent itself, quoted: with its backslashes it would end the phrase."""
_PHRASE = re.compile(r"[\w ,.'\"()<>=+*:;|&%?!\[\]{}$^/-]+")
_PATH = re.compile(r"(^|[^\w])[~/]|\w\.(py|rs|so|cc|h)\b|/.*/")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{4,}")
_MOST = 160


def plain(message: str) -> str:
    """The message's most telling phrase, cleaned; "" if none is fit to be shown."""
    if "panic" in message or "Traceback" in message:
        return ""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    line = (errors or lines or [""])[0]
    line = _REPEATED.sub("", _POSITION.sub("", _LOGGED.sub("", line))).strip()
    found = _PHRASE.match(line)
    phrase = found.group().strip(" ,:;(") if found else ""
    path = _PATH.search(phrase)
    phrase = phrase[: path.start()].strip(" ,:;('") if path else phrase
    return "" if _ADDRESS.search(phrase) else phrase[:_MOST]


def place(message: str) -> tuple[int, int] | None:
    """(line, column) with which a message begins, both from 1, column 0 if it names none; None: no line."""
    found = _POSITION.match(message.strip())
    return None if found is None else (int(found[1]), int(found[2] or 0))
