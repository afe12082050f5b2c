"""Python literals as models write them, read to JSON by hand: nothing is ever evaluated.

Strings, numbers, True, False, None (also in JSON's spelling), lists, tuples and dictionaries.
"""

from __future__ import annotations

import json

MAX_DEPTH = 64
"""Deeper nesting is no literal."""

_WORDS = {
    "True": "true", "true": "true", "False": "false", "false": "false", "None": "null",
    "null": "null",
}  # fmt: skip
_ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0",
    "\\": "\\", "'": "'", '"': '"', "/": "/", "\n": "",
}  # fmt: skip
_HEX = {"x": 2, "u": 4, "U": 8}
_SPACE = " \t\r\n"


def read_literal(text: str) -> str | None:
    """The JSON text of a literal; None if ``text`` is none."""
    reader = _Reader(text)
    try:
        spelled = reader.value(0)
        reader.space()
    except _NotALiteral:
        return None
    return spelled if reader.at == len(text) else None


class _NotALiteral(Exception):
    pass


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def value(self, depth: int) -> str:
        if depth > MAX_DEPTH:
            raise _NotALiteral
        self.space()
        character = self.text[self.at : self.at + 1]
        if character in ("'", '"'):
            return _spell(self._strings())
        if character == "[":
            return self._list("]", depth)
        if character == "(":
            return self._list(")", depth)
        if character == "{":
            return self._dict(depth)
        if character and character in "+-.0123456789":
            return self._number()
        return self._word()

    def space(self) -> None:
        while self.at < len(self.text) and self.text[self.at] in _SPACE:
            self.at += 1

    def _skip(self, character: str) -> bool:
        self.space()
        if not self.text.startswith(character, self.at):
            return False
        self.at += 1
        return True

    def _list(self, close: str, depth: int) -> str:
        self.at += 1
        items: list[str] = []
        while not self._skip(close):
            if items and not self._skip(","):
                raise _NotALiteral
            if items and self._skip(close):
                break
            items.append(self.value(depth + 1))
        return "[" + ", ".join(items) + "]"

    def _dict(self, depth: int) -> str:
        self.at += 1
        items: list[str] = []
        while not self._skip("}"):
            if items and not self._skip(","):
                raise _NotALiteral
            if items and self._skip("}"):
                break
            key = self.value(depth + 1)
            if key[0] in "[{" or not self._skip(":"):
                raise _NotALiteral
            key = key if key[0] == '"' else f'"{key}"'
            items.append(f"{key}: {self.value(depth + 1)}")
        return "{" + ", ".join(items) + "}"

    def _word(self) -> str:
        start = self.at
        while self.at < len(self.text) and self.text[self.at].isalpha():
            self.at += 1
        try:
            return _WORDS[self.text[start : self.at]]
        except KeyError:
            raise _NotALiteral from None

    def _number(self) -> str:
        start = self.at
        while self.at < len(self.text) and self.text[self.at] in "+-.eE_0123456789":
            self.at += 1
        return _spell_number(self.text[start : self.at])

    def _strings(self) -> str:
        """One string, or several side by side, which are one."""
        strings = []
        while self.text[self.at : self.at + 1] in ("'", '"') and self.at < len(self.text):
            strings.append(self._string())
            self.space()
        return "".join(strings)

    def _string(self) -> str:
        quote = self.text[self.at]
        self.at += 1
        pieces: list[str] = []
        end = -1
        while True:
            if end < self.at:
                end = self.text.find(quote, self.at)
            if end < 0:
                raise _NotALiteral
            escape = self.text.find("\\", self.at, end)
            if escape < 0:
                pieces.append(self.text[self.at : end])
                self.at = end + 1
                return "".join(pieces)
            pieces.append(self.text[self.at : escape])
            self.at = escape + 1
            pieces.append(self._escape())

    def _escape(self) -> str:
        letter = self.text[self.at : self.at + 1]
        self.at += 1
        if letter in _HEX:
            digits = self.text[self.at : self.at + _HEX[letter]]
            self.at += len(digits)
            if len(digits) == _HEX[letter] and all(d in "0123456789abcdefABCDEF" for d in digits):
                code = int(digits, 16)
                if code <= 0x10FFFF:
                    return chr(code)
            raise _NotALiteral
        return _ESCAPES.get(letter, "\\" + letter)


def _spell_number(text: str) -> str:
    """A number as JSON: its own spelling where that is JSON's too."""
    sign = "-" if text[:1] == "-" else ""
    body = text[1:] if text[:1] in ("+", "-") else text
    if body.isascii() and body.replace("_", "").isdigit():
        return sign + (body.replace("_", "").lstrip("0") or "0")
    try:
        value = float(sign + body)
    except ValueError:
        raise _NotALiteral from None
    if value in (float("inf"), float("-inf")):
        raise _NotALiteral
    mantissa = body.lower().split("e")[0]
    whole, point, fraction = mantissa.partition(".")
    plain = whole.isdigit() and (whole == "0" or whole[0] != "0") and (fraction or not point)
    return sign + body if plain and "_" not in body else repr(value)


def _spell(text: str) -> str:
    """A string as JSON. Halves of surrogate pairs are joined; a lone one stays an escape."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(text)
    return json.dumps(text, ensure_ascii=False)
