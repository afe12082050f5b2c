"""Backends that stand in for those chosen where ranks divide a model's tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from headrace_core.attention import AttentionBackend, AttentionNeed
from headrace_core.errors import ConfigError

Class = TypeVar("Class")


def counterpart(
    need: AttentionNeed,
    chosen: AttentionBackend,
    classes: Mapping[type[AttentionBackend], Class],
    *,
    unserved: Sequence[str],
    field: str,
    ranks: int,
) -> Class:
    """The class that serves a layer in place of its backend.

    Args:
        need: of the layer.
        classes: by the class of the backend that was chosen.
        unserved: features of the need that no class serves, in words.
        field: that asks for division, whose value is ``ranks``.

    Raises:
        ConfigError: the layer's attention, or the backend, is not served.
    """
    words = [*unserved]
    if need.attention_type != "decoder":
        words.append(f"attention of type {need.attention_type}")
    if words:
        raise ConfigError(
            f"{field} = {ranks}: must be 1 for a model with {', '.join(words)}", field=field
        )
    found = classes.get(type(chosen))
    if found is None:
        raise ConfigError(
            f"attention.backend = {chosen.name!r}: must be 'paged' or 'latent' with {field} = {ranks}",
            field="attention.backend",
        )
    return found
