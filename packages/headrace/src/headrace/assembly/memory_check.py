"""Refuses a model that cannot fit, after it is built and before its weights are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from headrace.assembly.resolved import ResolvedConfig
from headrace_core.errors import CapacityError

if TYPE_CHECKING:
    from headrace_core.model import CausalLM
    from headrace_models.layers.base import Layer


def check_room(resolved: ResolvedConfig, model: CausalLM, share: int = 1, ahead: int = 0) -> None:
    """Refuse a model that cannot start, by the reckoning of ``headrace inspect``: better now than when the
    weights have been read, or the system has ended the process.

    Args:
        model: built, without weights.
        share: ranks that share the device's memory, each with a model like this one.
        ahead: bytes of its weights that are in memory already.

    Raises:
        CapacityError: says what is needed, what there is and what would help.
    """
    from headrace.assembly.footprint import reckoned, specs_of  # which imports the worker's module
    from headrace_engine.execution.memory import of_one_rank, readable
    from headrace_models.weight_bytes import kept_bytes

    available = free_memory(resolved) // share + ahead
    resolved = resolved._replace(config=of_one_rank(resolved.config))
    limit = resolved.config.cache.max_memory_bytes
    weights = kept_bytes(cast("Layer", model), resolved.info.dtype)
    room, named = available, "are free"
    if limit is not None and limit < available:
        room, named = limit, "are allowed (max_memory_bytes)"
    if weights > room:
        raise CapacityError(
            f"model {resolved.info.name!r} does not fit: its weights take {readable(weights)} in "
            f"{resolved.info.dtype}, and {readable(room)} of memory {named}. Free memory, or use a smaller "
            "model, a model in fewer bits, or --quantization (`headrace inspect` estimates the memory)"
        )
    if (
        resolved.info.source != "native"
    ):  # others need not know what they cache before they are filled
        return
    plan = reckoned(resolved, weights, specs_of(model), available)
    if plan.cannot_start:
        raise CapacityError(f"model {resolved.info.name!r} does not fit: {plan.cannot_start}")


def free_memory(resolved: ResolvedConfig) -> int:
    """Bytes that are free, without what engines of this process will still write to their caches."""
    from headrace_engine.execution.populate import unwritten_bytes

    available = resolved.platform.available_memory()
    return max(0, available - unwritten_bytes()) if resolved.platform.device == "cpu" else available
