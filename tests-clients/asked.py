"""What all clients ask."""

from __future__ import annotations

from typing import Any

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "The city.", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
ASK_WEATHER = "What is the weather in Oslo?"
ASK_SUM = "What is 5 + 6?"
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 2},
    },
    "required": ["name", "age", "pets"],
    "additionalProperties": False,
}
