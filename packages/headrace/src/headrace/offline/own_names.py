"""Methods under the name of the class that a script calls: :func:`own_names`."""

from __future__ import annotations

import functools
import types
from typing import Any, TypeVar

Made = TypeVar("Made", bound=type[Any])


def own_names(made: Made) -> Made:
    """Give a class, put together of parts, its parts' methods under its own name.

    Python's errors name a method by the class that defines it
    (``GenerationMixin.generate() got an unexpected keyword argument``). A script knows only the class that it
    calls, so the class gets copies of the methods that say ``LLM.generate()``.
    """
    for part in made.__mro__[1:-1]:
        for name, found in vars(part).items():
            if isinstance(found, types.FunctionType) and getattr(made, name) is found:
                setattr(made, name, _named(found, f"{made.__qualname__}.{name}"))
    return made


def _named(function: types.FunctionType, name: str) -> types.FunctionType:
    copied = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    functools.update_wrapper(copied, function)
    del copied.__wrapped__  # type: ignore[attr-defined]
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__qualname__ = name
    return copied
