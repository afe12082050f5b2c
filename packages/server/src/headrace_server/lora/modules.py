"""``--lora-modules``: the adapters that a server begins with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from headrace_core.errors import ConfigError, RequestError

FIELD = "lora_modules"
MAX_NAME = 256
_FORMS = 'name=path, a JSON object {"name": ..., "path": ..., "base_model_name": ...} or a JSON list of such'


class AdapterModule(NamedTuple):
    """One adapter of the command line."""

    name: str
    path: str
    base_model_name: str | None = None
    """Name that is shown as its parent; None: the model's first."""


def parse_modules(words: Sequence[str]) -> list[AdapterModule]:
    """The adapters that the words of ``--lora-modules`` name, in order.

    Raises:
        ConfigError: a word has none of the three forms, a name cannot be one, or is given twice.
    """
    found = [module for word in words for module in _modules_of(word)]
    seen = set[str]()
    for module in found:
        if module.name in seen:
            raise ConfigError(f"{FIELD}: name {module.name!r} is given twice", field=FIELD)
        seen.add(module.name)
    return found


def check_name(name: str, field: str) -> None:
    """Refuse what cannot be an adapter's name.

    Raises:
        RequestError: naming the field.
    """
    if not (0 < len(name) <= MAX_NAME and name.isprintable() and name == name.strip()):
        raise RequestError(
            f"{field} = {name[:64]!r}: must be 1 to {MAX_NAME} printable characters, without spaces at "
            "its ends",
            param=field,
        )


def _modules_of(word: str) -> Iterator[AdapterModule]:
    text = word.strip()
    if text.startswith(("{", "[")):
        given = _decoded(text)
        for item in given if isinstance(given, list) else [given]:
            yield _checked(_from_object(item, word), word)
        return
    name, equals, path = word.partition("=")
    if not equals:
        raise _refused(word)
    yield _checked(AdapterModule(name, path), word)


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{FIELD} = {text!r:.500}: is not valid JSON: {error}", field=FIELD
        ) from error


def _from_object(item: Any, word: str) -> AdapterModule:
    if not isinstance(item, dict):
        raise _refused(word)
    if unknown := sorted(item.keys() - set(AdapterModule._fields)):
        raise _refused(word, f"field {unknown[0][:64]!r} is unknown; ")
    texts = all(isinstance(value, str | None) for value in item.values())
    if not texts or not {"name", "path"} <= item.keys():
        raise _refused(word)
    return AdapterModule(**item)


def _checked(module: AdapterModule, word: str) -> AdapterModule:
    if not module.path or not module.name:
        raise _refused(word)
    try:
        check_name(module.name, FIELD)
    except RequestError as error:
        raise ConfigError(str(error), field=FIELD) from error
    return module


def _refused(word: str, why: str = "") -> ConfigError:
    return ConfigError(f"{FIELD} = {word!r}: {why}must be {_FORMS}", field=FIELD)
