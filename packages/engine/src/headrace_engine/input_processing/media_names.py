"""Names that a caller gives to media: ``multi_modal_uuids``, and ``uuid`` of a message's part.

An item with a name is known by it, whatever its content is: it need not be sent again while it is kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, Protocol

from headrace_core.errors import RequestError
from headrace_core.multimodal import ProcessedMedia

FIELD = "multi_modal_uuids"
MAX_LENGTH = 256
"""Characters of a name."""

Names = Mapping[str, Sequence[str | None]]
"""Modality -> its items' names, None for those without."""


def names_of(given: object, counts: Mapping[str, int]) -> dict[str, list[str | None]]:
    """The names of a prompt's items.

    Args:
        given: ``multi_modal_uuids``; None: no item has one.
        counts: modality -> items that the prompt brings.

    Raises:
        RequestError: they are malformed, or not one for each item.
    """
    if given is None:
        return {modality: [None] * count for modality, count in counts.items()}
    if not isinstance(given, Mapping):
        raise _refused(FIELD, given, "a mapping of modalities to names")
    for modality in (*given, *counts):
        if modality not in given or modality not in counts:
            raise RequestError(
                f"{FIELD}: has {', '.join(map(str, given)) or 'nothing'}, and multi_modal_data has "
                f"{', '.join(counts)}: must have the same modalities",
                param=FIELD,
            )
    return {modality: _list_of(modality, given[modality], counts[modality]) for modality in given}


def check_name(value: object, where: str) -> str | None:
    """Raises: RequestError: it is no name."""
    if value is None:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= MAX_LENGTH:
        raise _refused(where, value, f"text of 1 to {MAX_LENGTH} characters, or null")
    return value


def content_name(modality: str, name: str, salt: str | None, options: Mapping[str, Any]) -> str:
    """What stands for the hash of a named item's content: 256 bits in hex.

    Requests with another ``cache_salt`` have other items under the same names.
    """
    facts = ["uuid", modality, name, salt, dict(options)]
    return sha256(json.dumps(facts, sort_keys=True, default=repr).encode()).hexdigest()


def item_hash(name: str, made: ProcessedMedia) -> str:
    """What names a named item to the engine: the name, and the form that the item has in a prompt. Content
    of another size may come under the name once it is not kept any more."""
    return sha256(repr((name, made.num_tokens, made.runs)).encode()).hexdigest()


class NamesElsewhere(Protocol):
    """Named items that other processes in front of the same engine took in."""

    def find(self, name: str) -> ProcessedMedia | None:
        """An item by :func:`content_name`; None: it is not kept."""
        ...

    def offer(self, name: str, content_hash: str, made: ProcessedMedia) -> None:
        """Let others find an item that a request will bring, by its :func:`item_hash`."""
        ...


def _list_of(modality: str, given: object, count: int) -> list[str | None]:
    where = f"{FIELD}.{modality}"
    if given is None:
        return [None] * count
    found = given if isinstance(given, list | tuple) else [given]
    if len(found) != count:
        raise RequestError(
            f"{where}: {len(found)} names for {count} items: must be one for each, null for none",
            param=where,
        )
    return [check_name(name, f"{where}[{index}]") for index, name in enumerate(found)]


def _refused(where: str, value: object, accepted: str) -> RequestError:
    return RequestError(f"{where} = {value!r:.100}: must be {accepted}", param=where)
