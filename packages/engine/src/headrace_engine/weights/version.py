"""The version of an engine's weights. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable

from headrace_core.errors import RequestError

FIRST_VERSION = "0"
"""Of the weights that an engine starts with. A version is a name that whoever changes weights chooses; the
engine compares versions and shows them, and reads nothing out of them."""
MAX_LENGTH = 128
"""Characters of a version: it is part of every answer."""


class WeightsVersion:
    """Which weights compute, and which computed parts of requests that are under way. Belongs to the
    core's thread."""

    def __init__(self) -> None:
        self.current = FIRST_VERSION
        self._earlier: dict[str, list[str]] = {}
        self.has_changed_beside = False
        """True while there is something to be said of requests that more than one version computed. No
        property: it is asked in every step."""

    def change(self, version: str, request_ids: Iterable[str]) -> None:
        """The weights are others.

        Args:
            version: theirs; the one before, if they are not to be told apart.
            request_ids: requests that hold what the weights before computed.
        """
        if version == self.current:
            return
        for request_id in request_ids:
            self._earlier.setdefault(request_id, []).append(self.current)
        self.has_changed_beside = bool(self._earlier)
        self.current = version

    def take_earlier(self, request_ids: Iterable[str]) -> dict[str, list[str]] | None:
        """See :attr:`headrace_engine.messages.CoreOutputs.earlier_versions`, for requests of which a step
        tells; each is said once."""
        if not self._earlier:
            return None
        take = self._earlier.pop
        found = {name: take(name, []) for name in request_ids}
        self.has_changed_beside = bool(self._earlier)
        return {name: versions for name, versions in found.items() if versions} or None


def checked_version(version: object) -> str:
    """The version, if it may be one.

    Raises:
        RequestError: it is no text of 1 to 128 printable characters.
    """
    if (
        not isinstance(version, str)
        or not 0 < len(version) <= MAX_LENGTH
        or not version.isprintable()
    ):
        raise RequestError(
            f"weights_version = {version!r:.200}: must be 1 to {MAX_LENGTH} printable characters",
            param="weights_version",
        )
    return version


def counted_up(version: str) -> str:
    """The version after one: its last number and 1, or (without a number) with ``.1`` behind."""
    found = re.search(r"\d+$", version[-18:])
    if found is None:
        return f"{version[:120]}.1"
    return version[: len(version) - len(found[0])] + str(int(found[0]) + 1)
