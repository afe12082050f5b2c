"""Base of all request bodies: bounds, unknown fields, fields that are refused by name."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, Field, PrivateAttr, model_validator

from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_server.protocols.known_fields import (
    MAX_NAME,
    RequestObject,
    UnknownField,
    unknown_fields,
)
from headrace_server.state import ServerState

MAX_TEXT = 16 * 1024 * 1024
MAX_TOKENS = 4 * 1024 * 1024
MAX_N = 128
MAX_SEQUENCES = 1024
"""Completions that one request may ask for: prompts times ``n``."""
MAX_DEPTH = 32
"""Nesting of free-form values."""
MAX_NODES = 100_000
"""Values inside free-form values."""
NEAR = 0.6
"""Names at least so alike are near (:class:`difflib.SequenceMatcher`, ratio): ``temprature`` and
``temperature`` (0.95) are, ``iterations`` and ``quantization`` (0.55) are not."""

TokenId = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=MAX_TOKENS)]
"""Fails with the first that is wrong: a million errors would take seconds."""
Text = Annotated[str, Field(max_length=MAX_TEXT)]
ShortText = Annotated[str, Field(max_length=256)]
StopText = Annotated[str, Field(min_length=1, max_length=1024)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
FreeObject = dict[str, Any]
"""An object whose content is not ours; its depth and size are checked by :func:`check_size`."""


class Refusal:
    """A known field that this server cannot honour, with the values that ask for nothing.

    Args:
        reason: why, and what to do instead.
        harmless: values that mean the same as leaving the field out.
    """

    def __init__(self, reason: str, *harmless: Any) -> None:
        self.reason = reason
        self.harmless = (None, *harmless)


class RequestBody(RequestObject):
    """Base of request bodies."""

    refused: ClassVar[Mapping[str, Refusal]] = {}

    _unknown: list[UnknownField] = PrivateAttr(default_factory=list)

    @model_validator(mode="after")
    def _find_unknown(self) -> Self:
        """Look through the whole body here, where large ones are beside the event loop."""
        self._unknown = unknown_fields(self, self.refused)
        return self

    def is_searched(self) -> bool:
        """No: a body within a body finds its own unknown fields."""
        return False

    def check_fields(self, state: ServerState, within: str = "") -> None:
        """Refuse known fields that have no effect here, and note the unknown, at every depth.

        Args:
            within: the field that holds this object, if it is a part of a body.

        Raises:
            UnsupportedFeature: a known field asks for something that is not supported.
            RequestError: an unknown field, under ``strict_requests``; or more of something than
                ``request_limits`` allow.
        """
        prefix = f"{within}." if within else ""
        for name, most in state.settings.request_limits.items():
            size = _size(getattr(self, name, None))
            if size > most:
                raise RequestError(
                    f"{prefix}{name}: {size} is more than the {most} that this server takes",
                    param=prefix + name,
                )
        for name, value in (self.model_extra or {}).items():
            refusal = self.refused.get(name)
            if refusal is not None and not any(
                value == h and type(value) is type(h) for h in refusal.harmless
            ):
                raise UnsupportedFeature(f"{prefix}{name}: {refusal.reason}", param=prefix + name)
        for unknown in self._unknown:
            _take_note(unknown, prefix, state)


def _take_note(unknown: UnknownField, prefix: str, state: ServerState) -> None:
    """Count an unknown field and log it once by name; or refuse it, under ``strict_requests``."""
    state.traffic.unknown_fields.inc()
    if not state.settings.strict_requests:
        state.unknown_fields.note(prefix + unknown.name)
        return
    last = str(unknown.path[-1])[:MAX_NAME]
    near = difflib.get_close_matches(last, unknown.known, n=1, cutoff=NEAR)
    hint = f"; the nearest known field is {near[0]!r}" if near else ""
    place = prefix + unknown.place
    raise RequestError(f"{place!r}: unknown field{hint}", param=place)


def fields_of(value: Any) -> Collection[str]:
    """Names of the fields that a body sets, whether it is decoded JSON or validated already."""
    if isinstance(value, dict):
        return value.keys()
    return value.model_fields_set if isinstance(value, BaseModel) else ()


def without_nulls(data: Any, keep: frozenset[str] = frozenset()) -> Any:
    """A body without its nulls, but for some fields: clients send null for what they do not set."""
    if not isinstance(data, dict):
        return data
    return {name: value for name, value in data.items() if value is not None or name in keep}


def _size(value: Any) -> int:
    """Size of a field's value: the number itself, or the number of its items."""
    if isinstance(value, int):
        return value
    if not isinstance(value, (list, dict)):
        return 0
    is_one_prompt = isinstance(value, list) and bool(value) and isinstance(value[0], int)
    return 1 if is_one_prompt else len(value)


def check_size(name: str, value: Any, *, depth: int = MAX_DEPTH) -> None:
    """Bound depth and size of a free-form value.

    Raises:
        RequestError: naming the field.
    """
    if not value:
        return
    level, reached, nodes = [value], 0, 0
    while level:
        reached += 1
        nodes += len(level)
        if reached > depth or nodes > MAX_NODES:
            raise RequestError(
                f"{name}: nested deeper than {depth} or holds more than {MAX_NODES} values",
                param=name,
            )
        below: list[Any] = []
        for node in level:
            if isinstance(node, dict):
                below.extend(node.values())
            elif isinstance(node, list):
                below.extend(node)
        level = below
