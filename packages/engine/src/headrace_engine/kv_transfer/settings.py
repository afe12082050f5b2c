"""Settings of KV transfer: ``cache.kv_transfer_config``.

A connector that has no use for ``kv_ip``, ``kv_port`` or ``kv_buffer_size`` refuses them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headrace_core.config import require
from headrace_core.errors import ConfigError

FIELD = "cache.kv_transfer_config"
PRODUCER, CONSUMER, BOTH = "kv_producer", "kv_consumer", "kv_both"
RECOMPUTE, FAIL = "recompute", "fail"
BY_LAYER = "kv_by_layer"

_Check = tuple[Callable[[Any], bool], str]
"""A check of a value, and the text of what is accepted."""


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


_KNOWN: Mapping[str, _Check] = {
    "kv_connector": (_is_text, "the name of a connector"),
    "kv_connector_module_path": (_is_text, "a Python module that has the class kv_connector"),
    "kv_role": (
        lambda value: value in (PRODUCER, CONSUMER, BOTH),
        f"{PRODUCER} (it saves blocks), {CONSUMER} (it loads them) or {BOTH}",
    ),
    "kv_connector_extra_config": (lambda value: isinstance(value, Mapping), "an object"),
    "kv_load_failure_policy": (
        lambda value: value in (RECOMPUTE, FAIL),
        f"{RECOMPUTE} (a block that cannot be loaded is computed) or {FAIL} (its request ends with an error)",
    ),
    "kv_head_parts": (
        lambda value: type(value) is int and 1 <= value <= 1024,
        "parts of the heads of a block, 1 to 1024: each is saved and sought by itself",
    ),
    BY_LAYER: (
        lambda value: isinstance(value, bool),
        "true or false: each layer of a block is saved and sought by itself",
    ),
    "engine_id": (_is_text, "a text, which the log shows, and by which other engines know this one"),
    "kv_ip": (_is_text, "the address at which this engine gives its blocks away"),
    "kv_port": (lambda value: type(value) is int and 0 <= value < 65536, "a port, 0 to 65535"),
    "kv_buffer_size": (
        lambda value: type(value) in (int, float) and 1 <= value < float("inf"),
        "bytes of memory for blocks, at least 1",
    ),
}  # fmt: skip
_DEFAULTS: Mapping[str, Any] = {
    "kv_connector_extra_config": {}, "kv_load_failure_policy": RECOMPUTE,
}  # fmt: skip


def check_kv_transfer(stated: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings with what they leave out. {}: there is no transfer.

    Raises:
        ConfigError: a field is unknown, missing, or its value is not accepted; names it.
    """
    if not isinstance(stated, Mapping):
        raise ConfigError(f"{FIELD} = {stated!r:.100}: must be an object", field=FIELD)
    if not stated:
        return {}
    for name, value in stated.items():
        where = f"{FIELD}.{name}"
        require(name in _KNOWN, where, value, f"left out: fields are {', '.join(_KNOWN)}")
        good, accepted = _KNOWN[name]
        require(good(value), where, value, accepted)
    for name in ("kv_connector", "kv_role"):
        require(name in stated, f"{FIELD}.{name}", None, _KNOWN[name][1])
    return {**_DEFAULTS, **stated}
