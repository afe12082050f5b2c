"""Settings of a disaggregated encoder: ``multimodal.ec_transfer_config``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headrace_core.config import require
from headrace_core.errors import ConfigError

FIELD = "multimodal.ec_transfer_config"
PRODUCER, CONSUMER = "ec_producer", "ec_consumer"
BUFFER_SIZE = 1_000_000_000

_Check = tuple[Callable[[Any], bool], str]
"""A check of a value, and the text of what is accepted."""


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


_KNOWN: Mapping[str, _Check] = {
    "ec_connector": (_is_text, "the name of a connector"),
    "ec_connector_module_path": (_is_text, "a Python module that has the class ec_connector"),
    "ec_role": (lambda value: value in (PRODUCER, CONSUMER), f"{PRODUCER} or {CONSUMER}"),
    "ec_connector_extra_config": (lambda value: isinstance(value, Mapping), "an object"),
    "ec_buffer_device": (lambda value: value == "cpu", "cpu: vectors travel through its memory"),
    "ec_buffer_size": (
        lambda value: type(value) in (int, float) and value >= 1,
        "bytes, at least 1",
    ),
    "ec_ip": (_is_text, "an address of this machine"),
    "ec_port": (lambda value: type(value) is int and 0 <= value < 65536, "a port"),
    "ec_rank": (lambda value: value in (0, 1), "0 of a producer, 1 of a consumer"),
    "ec_parallel_size": (lambda value: value == 1, "1: an encoder is one worker"),
    "engine_id": (_is_text, "a text, which the log shows"),
}
_DEFAULTS: Mapping[str, Any] = {
    "ec_connector_extra_config": {}, "ec_buffer_device": "cpu", "ec_buffer_size": BUFFER_SIZE,
    "ec_parallel_size": 1,
}  # fmt: skip


def check_ec_transfer(stated: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings with what they leave out; not ``ec_ip`` and ``ec_port``, which some connectors refuse.
    {}: there is no transfer.

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
    for name in ("ec_connector", "ec_role"):
        require(name in stated, f"{FIELD}.{name}", None, _KNOWN[name][1])
    own_rank = int(stated["ec_role"] == CONSUMER)
    require(stated.get("ec_rank", own_rank) == own_rank, f"{FIELD}.ec_rank", stated.get("ec_rank"),
           _KNOWN["ec_rank"][1])  # fmt: skip
    return {**_DEFAULTS, **stated}
