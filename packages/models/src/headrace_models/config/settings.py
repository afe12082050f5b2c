"""Reading a config.json with every value checked. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace_core.errors import UnsupportedModel

ACTIVATIONS: Mapping[str, str] = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "relu": "relu",
    "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu2": "relu2",
}  # fmt: skip
"""The checkpoint's name of an activation -> the op's."""

Spelling = Mapping[str, tuple[str, ...]]
"""Our name of a config's key -> what a family's configs may call it."""

_USUAL: Spelling = {}
_ABSENT = object()
_LARGEST = 1e30
MAX_LAYERS = 4096
MAX_EXPERTS = 4096
MAX_HEAD_DIM = 8192
MAX_HEADS = 65_536
"""Limit of heads, each of which has an entry in some table."""


class Settings:
    """Typed look-ups; an absent, null or wrong value is an error that names the key.

    Args:
        config: ``config.json``'s text part.
        spelling: keys are found under either name; messages have the config's own.
        file: what messages call the config.
    """

    def __init__(
        self, config: Mapping[str, Any], spelling: Spelling = _USUAL, file: str = "config.json"
    ) -> None:
        self.config, self.file = dict(config), file
        self.spelled: dict[str, str] = {}
        for name, others in spelling.items():
            if config.get(name) is None:
                found = next((n for n in others if config.get(n) is not None), others[0])
                self.spelled[name], self.config[name] = found, config.get(found)

    def integer(
        self, name: str, default: Any = _ABSENT, *, minimum: int = 1, maximum: int = 2**31 - 1
    ) -> int:
        """Raises: UnsupportedModel."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise self._wrong(name, value, f"an integer from {minimum} to {maximum}")
        return value

    def number(self, name: str, default: Any = _ABSENT) -> float:
        """Raises: UnsupportedModel."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, value, "a number")
        if not abs(value) <= _LARGEST:  # written so that NaN fails too
            raise self._wrong(name, value, f"a number of at most {_LARGEST:g}")
        return float(value)

    def positive(self, name: str, default: Any = _ABSENT) -> float:
        """A number above 0. Raises: UnsupportedModel."""
        value = self.number(name, default)
        if value <= 0:
            raise self._wrong(name, value, "a number above 0")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Raises: UnsupportedModel."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def integers(self, name: str, count: int | None = None) -> Sequence[int]:
        """A list of integers from 0, empty if the key is absent or null; with ``count`` one of so many
        from 1, which must be there. Raises: UnsupportedModel."""
        value = self._value(name, [] if count is None else _ABSENT)
        least = 0 if count is None else 1
        good = isinstance(value, list) and count in (None, len(value))
        if not good or not all(type(x) is int and least <= x < 2**31 for x in value):
            many = "" if count is None else f"{count} "
            raise self._wrong(name, value, f"a list of {many}integers from {least}")
        return list(value)

    def marks(self, name: str, count: int) -> list[bool] | None:
        """A list of ``count`` zeros and ones; None if the key is absent, null or empty.
        Raises: UnsupportedModel."""
        value = self.config.get(name)
        if value is None or value == []:
            return None
        good = isinstance(value, list) and len(value) == count
        if not good or not all(type(x) in (int, bool) and x in (0, 1) for x in value):
            raise self._wrong(name, value, f"a list of {count} numbers, 0 or 1")
        return [bool(x) for x in value]

    def optional_integer(self, name: str) -> int | None:
        """None if the key is absent or null."""
        return None if self.config.get(name) is None else self.integer(name)

    def optional_positive(self, name: str) -> float | None:
        """None if the key is absent, null or 0."""
        return None if not self.config.get(name) else self.positive(name)

    def refuse(self, name: str, *accepted: Any) -> None:
        """A key that must be absent, null or one of the accepted. Raises: UnsupportedModel."""
        value = self.config.get(name)
        if value is not None and value not in accepted:
            said = " or ".join([*map(repr, accepted), "absent"])
            raise self._wrong(name, value, f"{said}; nothing else is supported")

    def numbers(self, name: str, count: int) -> list[float] | None:
        """A list of ``count`` numbers; None if the key is absent or null. Raises: UnsupportedModel."""
        value = self.config.get(name)
        if value is None:
            return None
        good = isinstance(value, list) and len(value) == count
        if not good or not all(type(x) in (int, float) and abs(x) <= _LARGEST for x in value):
            raise self._wrong(name, value, f"a list of {count} numbers")
        return [float(x) for x in value]

    def activation(self, *names: str, default: str | None = None) -> str:
        """The op's name of the activation under the first of the keys that is there.

        Args:
            default: as configs name it, if there is none of the keys; None: one must be there.
        """
        name = next((n for n in names if self.config.get(n) is not None), names[-1])
        value = self._value(name, default or _ABSENT)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise self._wrong(name, value, "one of " + ", ".join(sorted(ACTIVATIONS)))
        return ACTIVATIONS[value]

    def choice(self, name: str, accepted: Sequence[str], default: str) -> str:
        """One of a few words. Raises: UnsupportedModel."""
        value = self._value(name, default)
        if value not in accepted:
            raise self._wrong(name, value, "one of " + ", ".join(accepted))
        return str(value)

    def head_dim(self, default: int | None = None) -> int:
        """``head_dim``, else the default, else hidden size over heads."""
        if self.config.get("head_dim") is not None:
            return self.integer("head_dim", maximum=MAX_HEAD_DIM)
        if default is not None:
            return default
        hidden, heads = self.integer("hidden_size"), self.integer("num_attention_heads")
        if hidden % heads or hidden // heads > MAX_HEAD_DIM:
            raise self._wrong("hidden_size", hidden, f"a multiple of num_attention_heads = {heads}")
        return hidden // heads

    def num_kv_heads(self) -> int:
        """``num_key_value_heads``, else as many as query heads."""
        heads = self.integer("num_attention_heads")
        kv_heads = self.integer("num_key_value_heads", heads)
        if heads % kv_heads:
            raise self._wrong(
                "num_key_value_heads", kv_heads, f"a divisor of num_attention_heads = {heads}"
            )
        return kv_heads

    def layer_types(self) -> list[str] | None:
        """Kind of each layer's attention, if the config says it per layer."""
        value = self.config.get("layer_types")
        if value is None:
            return None
        count = self.integer("num_hidden_layers")
        known = ("full_attention", "sliding_attention")
        if not isinstance(value, list) or len(value) != count or any(v not in known for v in value):
            raise self._wrong("layer_types", value, f"{count} entries out of {', '.join(known)}")
        return value

    def _value(self, name: str, default: Any) -> Any:
        value = self.config.get(name)
        if value is None:
            if default is _ABSENT:
                spelled = self.spelled.get(name, name)
                raise UnsupportedModel(f"{self.file} has no {spelled!r}, which the model needs")
            return default
        return value

    def _wrong(self, name: str, value: object, accepted: str) -> UnsupportedModel:
        shown = repr(value)
        shown = shown if len(shown) <= 200 else shown[:200] + "..."
        spelled = self.spelled.get(name, name)
        return UnsupportedModel(f"{self.file}: {spelled} = {shown}: must be {accepted}")
