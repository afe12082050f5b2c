"""All ops of this package, with their fakes, by name."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import headrace_reference


class Definition(NamedTuple):
    """Names that a module has for one op: ``name`` and ``fake_name``."""

    op: Callable[..., Any]
    """The definition in plain torch."""
    fake: Callable[..., Any]
    """Outputs of the right shape, dtype and device, content unset, for compilers and memory planning. It
    works on meta tensors, reads no data and changes no input."""


_FAKE = "fake_"


@functools.cache
def definitions() -> Mapping[str, Definition]:
    """Op name -> definition, of every module here: an op is what has a fake beside it."""
    found: dict[str, Definition] = {}
    for module in pkgutil.iter_modules(headrace_reference.__path__):
        content = vars(importlib.import_module(f"{headrace_reference.__name__}.{module.name}"))
        for name, fake in content.items():
            if name.startswith(_FAKE):
                op = name.removeprefix(_FAKE)
                found[op] = Definition(content[op], fake)
    return found
