"""Requests that must be answered: whole, and as a stream of events."""

from __future__ import annotations

import json
from typing import Any

import httpx2


def post(url: str, body: Any) -> Any:
    """The JSON of a whole answer."""
    answer = httpx2.post(url, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(url: str, body: Any) -> list[Any]:
    """The events of a streamed answer."""
    answer = httpx2.post(url, json={**body, "stream": True}, timeout=60)
    assert answer.status_code == 200, answer.text
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]
