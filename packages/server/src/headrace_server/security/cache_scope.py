"""Cached prefixes that only requests with the same key share (``prefix_cache_scope = "key"``)."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any, cast

from headrace_core.context import OWNER
from headrace_core.request import ChatPrompt, Prompt


def scoped(prompt: Prompt) -> Prompt:
    """The prompt with a cache salt that belongs to the running request's key.

    A client's own salt still separates its requests from each other, and cannot be chosen so that it
    meets another owner's.
    """
    owner = OWNER.get()
    if isinstance(prompt, ChatPrompt):
        return dataclasses.replace(prompt, cache_salt=_salt(owner, prompt.cache_salt))
    if isinstance(prompt, Mapping):
        return cast(Prompt, _scoped_parts(prompt, owner))
    whole: dict[str, Any] = (
        {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
    )
    return cast(Prompt, {**whole, "cache_salt": _salt(owner, None)})


def _scoped_parts(given: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """The same of a prompt that is a mapping; what a decoder begins with carries the salt."""
    if "encoder_prompt" in given:
        decoder = given["decoder_prompt"]
        return {**given, "decoder_prompt": None if decoder is None else scoped(decoder)}
    return {**given, "cache_salt": _salt(owner, given.get("cache_salt"))}


def _salt(owner: str, given: str | None) -> str:
    # A name holds no NUL, so no two pairs run together.
    return hashlib.sha256(f"{owner}\0{given or ''}".encode()).hexdigest()
