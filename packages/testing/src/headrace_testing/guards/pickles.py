"""No format that can run code may be read."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn
from unittest import mock

FORBIDDEN = {
    "pickle": ("load", "loads", "Unpickler"),
    "shelve": ("open",),
    "dill": ("load", "loads"),
    "cloudpickle": ("load", "loads"),
}
"""Module -> what may not be called; modules that are not installed are left alone."""


@contextmanager
def guarded_pickles() -> Iterator[None]:
    """Fail with an AssertionError where one of :data:`FORBIDDEN` is called, or ``torch.load``
    without ``weights_only``. What was called is reported at the end too, for code that swallows
    the error. ``marshal`` is left alone: the import system reads byte code with it.
    """
    called: list[str] = []
    with ExitStack() as stack:
        for module_name, names in FORBIDDEN.items():
            module = _module(module_name)
            for name in names if module is not None else ():
                refuse = _refusing(f"{module_name}.{name}", called)
                stack.enter_context(mock.patch.object(module, name, refuse))
        torch: Any = sys.modules.get("torch")
        if torch is not None:
            guarded = _weights_only(torch.load, called)
            stack.enter_context(mock.patch.object(torch, "load", guarded))
        yield
    assert not called, f"a format that can run code was read: {', '.join(called)}"


def _module(name: str) -> Any:
    """The module, imported if it is the standard library's; else only if somebody has."""
    if name in sys.stdlib_module_names:
        return importlib.import_module(name)
    return sys.modules.get(name)


def _refusing(name: str, called: list[str]) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        called.append(name)
        raise AssertionError(f"{name} was called: it can run code")

    return refuse


def _weights_only(load: Callable[..., Any], called: list[str]) -> Callable[..., Any]:
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("weights_only") is not True:
            called.append("torch.load")
            raise AssertionError("torch.load was called without weights_only=True")
        return load(*args, **kwargs)

    return guarded
