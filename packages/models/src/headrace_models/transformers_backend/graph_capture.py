"""Undoes what recording a step would leave behind.

While a step is recorded nothing is computed (:mod:`headrace_core.graph`). A module that keeps what it
computed, say cosines for a longer sequence than any before, would keep memory that nobody filled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode


@contextmanager
def unchanged_by_recording(tree: nn.Module) -> Iterator[None]:
    """Puts modules' attributes back to what they were, if operations of torch are watched."""
    if _get_current_dispatch_mode() is None:
        yield
        return
    before = [(module, _held(module)) for module in tree.modules()]
    try:
        yield
    finally:
        for module, attributes in before:
            _restore(module, attributes)


def _held(module: nn.Module) -> dict[str, object]:
    """A module's attributes; its dictionaries of buffers, parameters and parts copied."""
    return {k: dict(v) if isinstance(v, dict) else v for k, v in vars(module).items()}


def _restore(module: nn.Module, attributes: dict[str, object]) -> None:
    now = vars(module)
    for name in [name for name in now if name not in attributes]:
        del now[name]
    for name, value in attributes.items():
        if isinstance(value, dict) and isinstance(now.get(name), dict):
            now[name].clear()
            now[name].update(value)
        else:
            now[name] = value
