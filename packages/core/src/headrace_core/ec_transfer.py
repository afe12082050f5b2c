"""Vectors of media that one engine's towers make and other engines take: a disaggregated encoder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from headrace_core.arrays import PackedArray


class ECConnector(ABC):
    """The object behind an entry point of ``headrace.ec_connectors`` is a subclass. A worker makes one and
    calls it from one thread. A key is 64 hex digits, made of the model and an item's content.

    Args:
        settings: ``multimodal.ec_transfer_config``, checked. Raises ConfigError naming what is wrong.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings

    @abstractmethod
    def save(self, key: str, vectors: PackedArray) -> None:
        """Offer vectors [num_vectors, W], if they are not there. Raises OSError."""

    @abstractmethod
    def load(self, key: str) -> PackedArray | None:
        """Offered vectors; None: there are none. Does not wait for any to come. Raises OSError."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Let go of what it holds. Idempotent."""
