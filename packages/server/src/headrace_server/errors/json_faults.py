"""Why a body is not JSON, in words of our own, and where."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

_TOLD = re.compile(r"JSON is malformed: (.*) \(byte (\d+)\)")
"""A decoder's message with a place."""
_HALF = "half of a surrogate pair"
_REASONS: Mapping[str, str] = {
    "invalid character": "unexpected character",
    "invalid character in unicode escape": "\\u must have four hexadecimal digits behind it",
    "invalid escape character in string": "unknown escape in a string",
    "invalid number": "malformed number",
    "invalid escaped character": "unknown escape in a string",
    "unexpected end of hex escape": "\\u must have four hexadecimal digits behind it",
    "invalid utf-16 surrogate pair": _HALF,
    "unexpected end of escaped utf-16 surrogate pair": _HALF,
    "object keys must be strings": "names must be strings in double quotes",
    "trailing characters": "more text behind the value",
    "trailing comma in array": "trailing comma",
    "trailing comma in object": "trailing comma",
    "expected ':'": "a colon is missing",
    "expected ',' or ']'": "a comma or closing bracket is missing",
    "expected ',' or '}'": "a comma or closing bracket is missing",
}
"""Faults as msgspec tells them -> our words."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_CUT_HALF = re.compile(rb"(?<!\\)(?:\\\\)*(\\u[dD][89abAB][0-9a-fA-F]{2})[^\\]{1,5}\Z")
"""The first half of a pair so near to the end that no second half fits: decoders read on, and find the
end too early."""

_NUMBER_OR_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"|(-?\d[\d.eE+-]*+)', re.DOTALL)
"""The next string, or (group 1) the next number outside of strings."""
_SAFE_DIGITS = 300
"""Characters of a number without exponent that every decoder takes: float64 ends at 1.8e308."""


def reason(body: bytes, error: Exception) -> str:
    """Why decoding failed: what is wrong, and its line and column, both from 1; columns count characters.
    Nothing of the body is repeated.

    Args:
        body: what was decoded.
        error: what msgspec raised.
    """
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if "out of range" in str(error):
        return _at("a number is too long or too large", body, _number_out_of_range(body))
    try:
        body.decode()
    except UnicodeDecodeError as broken:
        return _at("not UTF-8", body, broken.start)
    found = _TOLD.fullmatch(str(error))
    if found is not None:
        fault, offset = _REASONS.get(found[1], "malformed"), int(found[2])
        if fault == _HALF:  # the place is behind the escape
            halves = [
                half.start() for half in _SURROGATE.finditer(body, max(0, offset - 14), offset)
            ]
            offset = halves[-1] if halves else offset
        elif found[1] == "trailing characters":
            offset -= 1
        return _at(fault, body, offset)
    half = _CUT_HALF.search(body, max(0, len(body) - 64))
    if half is not None:
        return _at(_HALF, body, half.start(1))
    return _at("it ends too early", body, len(body))


def _number_out_of_range(body: bytes) -> int:
    """Byte offset of the first number that a decoder refuses for its size; linear in the body's length."""
    for found in _NUMBER_OR_STRING.finditer(body):
        number = found[1]
        if number is None or (len(number) < _SAFE_DIGITS and b"e" not in number.lower()):
            continue
        try:
            msgspec.json.decode(number)
        except msgspec.ValidationError:
            return found.start()
        except msgspec.DecodeError:
            continue
    return len(body)


def _at(fault: str, body: bytes, offset: int) -> str:
    before = body[:offset]
    line = before.count(b"\n") + 1
    column = len(before[before.rfind(b"\n") + 1 :].decode(errors="replace")) + 1
    return f"{fault} (line {line}, column {column})"
