"""Classes that a checkpoint brings as Python files. Run only if the user trusts them.

``config.json``'s ``auto_map`` names them: ``{"AutoModel": "modeling_x.XModel"}``.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace_core.errors import ConfigError, NetworkError, UnsupportedModel

_ONE_AT_A_TIME = threading.Lock()
"""transformers parses a file before it imports it, which CPython 3.11 cannot in two threads at once."""


def reference(whole: Mapping[str, Any], role: str) -> str | None:
    """Reference that ``auto_map`` has for a role (``AutoConfig``, ``AutoModel``); None: nothing.

    Raises:
        UnsupportedModel: it is no name.
    """
    auto_map = whole.get("auto_map")
    if auto_map is None:
        return None
    found = auto_map.get(role) if isinstance(auto_map, Mapping) else auto_map
    if isinstance(found, list) and found:  # of tokenizers: slow and fast
        found = found[0]
    if found is not None and not (isinstance(found, str) and "." in found):
        raise UnsupportedModel(
            f"config.json: auto_map.{role} = {found!r:.200}: must be a module of the checkpoint and "
            "a class of it, as modeling_x.XModel"
        )
    return found


def refuse_foreign_code(whole: Mapping[str, Any]) -> None:
    """Offline, a checkpoint's code must be its own: ``auto_map`` may name another repository's
    (``owner/name--module.Class``), which transformers would ask the hub for.

    Raises:
        NetworkError: it does.
    """
    auto_map = whole.get("auto_map")
    for role in auto_map if isinstance(auto_map, Mapping) else ():
        named = reference(whole, role)
        if named is not None and "--" in named:
            raise NetworkError(
                f"config.json: auto_map.{role} = {named!r:.200}: offline = True, and this is code of "
                "another repository: copy its files into the checkpoint's folder and name them there",
                field="load.offline",
            )


def checkpoint_class(
    whole: Mapping[str, Any], role: str, path: Path | None, *, trusted: bool
) -> Any:
    """The class that ``auto_map`` names, imported; None if it names none.

    Raises:
        ConfigError: the user does not trust the checkpoint's code; names the flag.
        UnsupportedModel: it cannot be imported.
    """
    named = reference(whole, role)
    if named is None:
        return None
    if not trusted:
        raise refused(named)
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    try:
        with _ONE_AT_A_TIME:
            return get_class_from_dynamic_module(named, str(path))
    except Exception as error:  # whatever the file does while it is imported
        raise UnsupportedModel(
            f"config.json: auto_map.{role} = {named!r} cannot be imported from {path}: "
            f"{type(error).__name__}: {error}"
        ) from error


def refused(named: str) -> ConfigError:
    """The error of a checkpoint whose code would have to run."""
    return ConfigError(
        f"model.trust_remote_code = False: the checkpoint is run by its own code ({named}), which may "
        "do anything that you may: read it, and set --trust-remote-code (trust_remote_code=True) if "
        "you trust it",
        field="model.trust_remote_code",
    )
