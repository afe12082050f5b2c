"""The tokens of a prompt that the model continues."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from headrace_core.request import Prompt


def first_token_of(prompt: Prompt) -> Prompt | None:
    """The prompt up to its decoder's first token; None: it is not given as tokens."""
    found = _given(prompt)
    if found is None:
        return None
    field, ids = found
    return cast(Prompt, {**cast(Mapping[str, Any], prompt), field: ids[:1]})


def num_given(prompt: Prompt) -> int:
    """Number of tokens that a prompt gives to be continued; 0: it is not given as tokens."""
    found = _given(prompt)
    return 0 if found is None else len(found[1])


def _given(prompt: Prompt) -> tuple[str, list[int]] | None:
    """The field with the tokens that are continued, and these."""
    if not isinstance(prompt, Mapping):
        return None
    fields = cast(Mapping[str, Any], prompt)
    for field in ("decoder_prompt", "prompt_token_ids"):
        ids = fields.get(field)
        if isinstance(ids, list) and ids:
            return field, ids
    return None
