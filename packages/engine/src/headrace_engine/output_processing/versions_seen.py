"""Versions of the weights that computed one request."""

from __future__ import annotations


class VersionsSeen:
    """Versions in the order in which they were first seen."""

    __slots__ = ("all",)

    def __init__(self) -> None:
        self.all: tuple[str, ...] = ()
        """Each once. See :attr:`headrace_core.output.RequestOutput.weights_versions`."""

    def see(self, version: str) -> None:
        """Weights of this version computed a part of the request; "" says nothing."""
        if version and version not in self.all:
            self.all = (*self.all, version)
