"""The adapter that a request names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace_core.errors import RequestError
from headrace_core.lora import LoRARequest


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("lora_int_id", number) for number in ("1", True, 1.5, None, 0, -1, 2**63)),
        *(("lora_name", name) for name in ("", 3, None)),
        *(("lora_path", path) for path in ("", 3, None, b"/adapters/sql")),
    ],
)
def test_a_wrong_field_is_named(field: str, value: Any) -> None:
    given: dict[str, Any] = {"lora_name": "sql", "lora_int_id": 1, "lora_path": "/adapters/sql"}
    with pytest.raises(RequestError, match=f"{field} = .*must be") as caught:
        LoRARequest(**{**given, field: value})
    assert caught.value.param == field


def test_a_path_object_is_its_text() -> None:
    path: Any = Path("/adapters/sql")
    assert LoRARequest("sql", 1, path).lora_path == "/adapters/sql"
