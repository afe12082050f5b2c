"""First position of learned positions. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace_models.config.settings import Settings

_DEFAULT_PADDING = 1


def first_position(config: Mapping[str, Any]) -> int:
    """Row of the table that the first token of a prompt gets in RoBERTa's line: the one behind the
    padding token's id. Its authors' code counts positions so (fairseq, ``make_positions``)."""
    return Settings(config).integer("pad_token_id", _DEFAULT_PADDING, minimum=0) + 1
