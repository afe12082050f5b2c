"""``kv_transfer_params`` of a request: which other engine has its prompt's blocks, or will want them.

They travel in :attr:`~headrace_core.sampling.params.SamplingParams.extra_args`, under their own name, with
the fields of vLLM's proxies: an engine that prefills gets ``do_remote_decode`` and answers with
``do_remote_prefill`` and its address, which the engine that decodes gets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headrace_core.errors import RequestError
from headrace_engine.kv_transfer.settings import CONSUMER, PRODUCER

NAME = "kv_transfer_params"
DECODE, PREFILL = "do_remote_decode", "do_remote_prefill"
MAX_TEXT = 256

_FIELDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    DECODE: (lambda value: isinstance(value, bool), "true or false"),
    PREFILL: (lambda value: isinstance(value, bool), "true or false"),
    "remote_host": (lambda value: isinstance(value, str) and 0 < len(value) <= MAX_TEXT, "a host"),
    "remote_port": (lambda value: type(value) is int and 0 < value < 65536, "1 to 65535"),
    "remote_engine_id": (
        lambda value: isinstance(value, str) and 0 < len(value) <= MAX_TEXT, "an engine_id",
    ),
    "remote_block_ids": (lambda value: False, "null: blocks are found by their content"),
    "tp_size": (lambda value: type(value) is int and 1 <= value <= 64, "1 to 64, its ranks"),
}  # fmt: skip
"""Field -> check of a value, and the text of what is accepted. Null is as if it were left out."""


def check_transfer_params(extra_args: Mapping[str, Any] | None, kv_role: str) -> None:
    """Refuse parameters that the engine cannot honour.

    Args:
        extra_args: of the request.
        kv_role: of the engine's connector; "": it has none.

    Raises:
        RequestError: naming the field.
    """
    if not extra_args or NAME not in extra_args:
        return
    given = extra_args[NAME]
    if not isinstance(given, Mapping):
        raise _wrong(NAME, given, "an object")
    for name, value in given.items():
        if value is None:
            continue
        good, accepted = _FIELDS.get(name, (None, f"left out: fields are {', '.join(_FIELDS)}"))
        if good is None or not good(value):
            raise _wrong(f"{NAME}.{name}", value, accepted)
    if given.get(DECODE) and given.get(PREFILL):
        raise _wrong(f"{NAME}.{PREFILL}", True, f"false beside {DECODE}")
    if (given.get("remote_host") is None) != (given.get("remote_port") is None):
        raise _wrong(f"{NAME}.remote_port", given.get("remote_port"), "given with remote_host")
    for name, other in ((DECODE, CONSUMER), (PREFILL, PRODUCER)):
        if given.get(name) and kv_role in ("", other):
            has = f"its kv_role is {kv_role}" if kv_role else "it has no --kv-transfer-config"
            raise _wrong(f"{NAME}.{name}", True, f"false or left out for this engine: {has}")


def transfer_params(extra_args: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Checked parameters without nulls; {}: the request has none."""
    given = (extra_args or {}).get(NAME) or {}
    return {name: value for name, value in given.items() if value is not None}


def _wrong(name: str, value: object, accepted: str) -> RequestError:
    return RequestError(f"{name} = {value!r:.100}: must be {accepted}", param=NAME)
