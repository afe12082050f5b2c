"""Which weights computed an answer, as it tells."""

from __future__ import annotations

from headrace_core.output import all_versions
from headrace_server.observability.fingerprint import Fingerprint, with_weights


class WeightsSeen:
    """The versions that outputs of one answer told, and the fingerprint that follows.

    Args:
        fingerprint: of the weights of the start.
        shown: the client asked for the versions.
    """

    def __init__(self, fingerprint: Fingerprint, shown: bool | None) -> None:
        self._first = fingerprint
        self._shown = bool(shown)
        self.versions: tuple[str, ...] = ()
        """Each once, in the order in which they were told."""
        self.fingerprint = fingerprint.name
        """Of the answer, as far as it is known."""

    def see(self, versions: tuple[str, ...]) -> bool:
        """Take an output's versions; True if they are more than before."""
        if versions == self.versions:
            return False
        together = all_versions((self.versions, versions))
        if together == self.versions:
            return False
        self.versions = together
        self.fingerprint = with_weights(self._first, together).name
        return True

    @property
    def shown(self) -> list[str] | None:
        """The versions, if the client asked for them."""
        return list(self.versions) if self._shown else None
