"""Why a class that should transcribe does not: one line for each reason, with what mends it.

Whoever adds a speech model sees nothing but a missing route if a member is missing or misspelt. So the
log at start, the answer of that route and ``headrace inspect`` all say what :func:`faults` finds.
Imports no torch: it looks at classes and builds none.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from headrace_core.errors import ModelError
from headrace_core.speech.model import SupportsTranscription, check_languages

METHODS: Mapping[str, tuple[str, ...]] = {
    name: tuple(inspect.signature(getattr(SupportsTranscription, name)).parameters)
    for name, member in vars(SupportsTranscription).items()
    if isinstance(member, classmethod) and not name.startswith("__")
}
"""Method of the interface -> the keywords that it is called with."""
REQUIRED = tuple(
    name
    for name in METHODS
    if getattr(getattr(SupportsTranscription, name), "__isabstractmethod__", False)
)
_FLAGS = ("supports_transcription_only", "supports_segment_timestamp")


def comes_close(model: type) -> bool:
    """True if the class has a member of the interface, so that it was meant to transcribe."""
    members = {"supports_transcription", "supported_languages", *_FLAGS, *METHODS}
    return issubclass(model, SupportsTranscription) or any(hasattr(model, m) for m in members)


def faults(model: type) -> list[str]:
    """Reasons why a class cannot transcribe; [] if there are none.

    Args:
        model: the class that serves the checkpoint.
    """
    return [*_marker_faults(model), *_attribute_faults(model), *_all_method_faults(model)]


def _marker_faults(model: type) -> Iterator[str]:
    if not issubclass(model, SupportsTranscription):
        yield (
            f"{model.__qualname__} does not inherit SupportsTranscription: add "
            "headrace_core.speech.model.SupportsTranscription to its bases"
        )
    elif model.supports_transcription is not True:
        yield (
            f"{model.__qualname__}.supports_transcription = {model.supports_transcription!r}: leave "
            "it out; inheriting SupportsTranscription makes it True"
        )


def _attribute_faults(model: type) -> Iterator[str]:
    name = model.__qualname__
    if not hasattr(model, "supported_languages"):
        yield (
            f"{name}.supported_languages is missing: add a mapping of ISO 639 codes to names, such as "
            '{"en": "English"}'
        )
    else:
        try:
            check_languages(name, model.supported_languages)
        except ModelError as error:
            yield str(error)
    for flag in _FLAGS:
        value = getattr(model, flag, False)
        if not isinstance(value, bool):
            yield f"{name}.{flag} = {value!r}: must be True or False"
    if getattr(model, "supports_segment_timestamp", False) is True and not _overrides(
        model, "get_timestamp"
    ):
        yield (
            f"{name}.supports_segment_timestamp is True, but get_timestamp is not defined: add "
            f"{_wanted('get_timestamp')}, or leave the flag out"
        )


def _all_method_faults(model: type) -> Iterator[str]:
    for method in METHODS:
        if _overrides(model, method):
            yield from _method_faults(model, method)
        elif method in REQUIRED:
            yield f"{model.__qualname__}.{method} is missing: add {_wanted(method)}"


def _overrides(model: type, method: str) -> bool:
    """True if a class, or a base of it, defines a member of the interface itself."""
    owner = next((base for base in model.__mro__ if method in vars(base)), None)
    return owner not in (None, SupportsTranscription)


def _method_faults(model: type, method: str) -> Iterator[str]:
    where, member = f"{model.__qualname__}.{method}", inspect.getattr_static(model, method)
    if not isinstance(member, classmethod):
        kind = "a function" if inspect.isfunction(member) else f"a {type(member).__name__}"
        yield f"{where} is {kind}, no classmethod: make it {_wanted(method)}"
        return
    wrong = _wrong_parameters(member.__func__, METHODS[method])
    if wrong:
        yield f"{where} {wrong}: make it {_wanted(method)}"


def _wrong_parameters(function: Any, keywords: tuple[str, ...]) -> str:
    """Parameters of a class method that cannot be filled; "" if all can.

    It need not take all keywords: only those that it declares are passed.
    """
    parameters = list(inspect.signature(function).parameters.values())[1:]
    named = {p.name: p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    unknown = [n for n, p in named.items() if n not in keywords and p.default is p.empty]
    if unknown:
        return f"has the wrong parameters: headrace does not pass {', '.join(unknown)}"
    if any(p.kind is p.POSITIONAL_ONLY for p in named.values()):
        return "has the wrong parameters: all are passed by keyword"
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    subject = keywords[0]
    if subject != "model_config" and subject not in named and not takes_any:
        return f"has the wrong parameters: it does not take {subject}"
    return ""


def _wanted(method: str) -> str:
    """The method as it should stand in the class."""
    parameters = ", ".join(("cls", *METHODS[method]))
    return f"a @classmethod {method}({parameters})"
