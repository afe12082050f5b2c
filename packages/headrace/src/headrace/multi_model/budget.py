"""One budget of memory, and what each model may take of it.

The budget is the memory that was free when the server started. An entry's share of it
(``gpu_memory_utilization``) is its own, used or not. Models without one share what the others leave:
each may take its part of that while it is loaded, and keeps what it then took.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace_core.errors import CapacityError, ConfigError


@dataclass(frozen=True)
class Claim:
    """Part of the budget that a model holds, in bytes."""

    limit: int
    """Bytes that it may take."""
    taken: int
    """Bytes that it took."""
    is_share: bool
    """True if the whole limit is its own."""

    @property
    def held(self) -> int:
        return self.limit if self.is_share else self.taken


class Budget:
    """Memory budget of all models.

    Args:
        total: bytes that were free at start.
        usable: share of them that models without one of their own may reach together with all
            others.
    """

    def __init__(self, total: int, usable: float) -> None:
        self.total = total
        self._usable = int(total * usable)
        self._claims: dict[str, Claim] = {}

    @property
    def claimed(self) -> int:
        """Bytes that loaded models hold."""
        return sum(claim.held for claim in self._claims.values())

    @property
    def free(self) -> int:
        return self.total - self.claimed

    def limit_of(self, name: str, asked: int | None, others: int = 1, kept: int = 0) -> int:
        """Bytes that a model may take while it is loaded.

        Args:
            asked: bytes that are to be its own; None: it shares what is left.
            others: models yet to come that share it too, this one counted.
            kept: bytes that models yet to come asked for.

        Raises:
            CapacityError: as much is not left.
        """
        if asked is not None:
            if asked > self.free:
                raise CapacityError(
                    f"model {name!r}: its share is {asked} of the budget's {self.total} bytes, of "
                    f"which {self.free} are free: unload a model, or give it at most "
                    f"{self.free / self.total:.4f} (gpu_memory_utilization)"
                )
            return asked
        left = self._usable - self.claimed - kept
        if left < others:
            raise CapacityError(
                f"model {name!r}: no memory is left of the {self._usable} bytes for all models: unload "
                f"a model, or give other models smaller shares"
            )
        return left // others

    def claim(self, name: str, limit: int, taken: int, *, is_share: bool) -> None:
        """A model was loaded."""
        self._claims[name] = Claim(limit, taken, is_share)

    def release(self, name: str) -> None:
        """A model is gone, or never came."""
        self._claims.pop(name, None)

    def limit(self, name: str) -> int:
        """Bytes that a loaded model could take."""
        return self._claims[name].limit if name in self._claims else 0


def check_shares(names: Sequence[str], shares: Sequence[float | None]) -> None:
    """Raises: ConfigError, if the shares are more than there is."""
    asked = {name: share for name, share in zip(names, shares, strict=True) if share is not None}
    total = sum(asked.values())
    if total > 1 + 1e-9:
        parts = ", ".join(f"{name} {share:g}" for name, share in asked.items())
        raise ConfigError(
            f"gpu_memory_utilization: the shares of all models are {total:g} of the budget "
            f"({parts}); they must be at most 1 together",
            field="gpu_memory_utilization",
        )
