"""``kv_transfer_params``: what is taken, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_core.errors import RequestError
from headrace_engine.kv_transfer.params import check_transfer_params, transfer_params

FOUND = {"do_remote_prefill": True, "remote_host": "h", "remote_port": 9, "remote_engine_id": "e"}


@pytest.mark.parametrize(
    ("given", "role"),
    [
        (None, ""),
        ({"other": 1}, ""),
        ({"kv_transfer_params": {}}, ""),
        ({"kv_transfer_params": {"do_remote_decode": False, "remote_host": None}}, ""),
        ({"kv_transfer_params": FOUND}, "kv_consumer"),
        ({"kv_transfer_params": {**FOUND, "tp_size": 1, "remote_block_ids": None}}, "kv_both"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_producer"),
    ],
)
def test_what_is_taken(given: Any, role: str) -> None:
    check_transfer_params(given, role)


@pytest.mark.parametrize(
    ("given", "role", "message"),
    [
        (3, "kv_both", r"^kv_transfer_params = 3: must be an object"),
        ({"do_remote_decode": 1}, "kv_both", r"do_remote_decode = 1: must be true or false"),
        ({"remote_port": 70000}, "kv_both", r"remote_port = 70000: must be 1 to 65535"),
        ({"remote_port": True}, "kv_both", r"remote_port = True: must be 1 to 65535"),
        ({"remote_host": "x" * 300}, "kv_both", r"remote_host = .*: must be a host"),
        ({"remote_host": "x"}, "kv_both", r"remote_port = None: must be given with remote_host"),
        ({"remote_block_ids": [1]}, "kv_both", r"remote_block_ids = \[1\]: must be null: blocks are"),
        ({"tp_size": 0}, "kv_both", r"tp_size = 0: must be 1 to 64, its ranks"),
        ({"colour": 1}, "kv_both", r"colour = 1: must be left out: fields are do_remote_decode"),
        ({**FOUND, "do_remote_decode": True}, "kv_both", r"do_remote_prefill = True: must be false bes"),
        (FOUND, "kv_producer", r"do_remote_prefill = True: .* its kv_role is kv_producer"),
        (FOUND, "", r"do_remote_prefill = True: .* it has no --kv-transfer-config"),
        ({"do_remote_decode": True}, "kv_consumer", r"do_remote_decode = True: .* is kv_consumer"),
    ],
)  # fmt: skip
def test_what_is_refused(given: Any, role: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        check_transfer_params({"kv_transfer_params": given}, role)
    assert caught.value.param == "kv_transfer_params"


def test_nulls_are_as_if_left_out() -> None:
    assert transfer_params({"kv_transfer_params": {**FOUND, "tp_size": None}}) == FOUND
    assert transfer_params(None) == transfer_params({"kv_transfer_params": None}) == {}
