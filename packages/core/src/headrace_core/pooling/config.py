"""Pooling settings of a user."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace_core.errors import ConfigError
from headrace_core.pooling.info import POOLING_TYPES

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PoolerConfig:
    """Pooling of hidden states, as a user sets it (``--pooler-config`` JSON).

    What is None follows from the checkpoint's Sentence Transformers files, else from its class.

    Raises:
        ConfigError: naming the field and what it may be.
    """

    pooling_type: str | None = None
    """One of :data:`POOLING_TYPES`, in any case: which tokens the result is made of."""
    normalize: bool | None = None
    """Divide embeddings by their length."""
    dimensions: int | None = None
    """Cut embeddings to so many numbers unless a request says otherwise; only for models that were
    trained for it."""
    enable_chunked_processing: bool | None = None
    """Embed texts beyond the model's positions in windows, and take their weighted mean.
    Cost: accuracy, as no window knows the others."""
    max_embed_len: int | None = None
    """Longest text with the above, in tokens; None: the context's length."""
    use_activation: bool | None = None
    """Turn the logits of classification into probabilities."""
    softmax: bool | None = None
    """Old name of ``use_activation``."""
    activation: bool | None = None
    """Old name of ``use_activation``."""
    logit_bias: float | None = None
    """Subtracted from the logits of classification before the activation."""
    step_tag_id: int | None = None
    """With STEP: the rows at this token only."""
    returned_token_ids: tuple[int, ...] | None = None
    """With STEP: these columns only."""

    def __post_init__(self) -> None:
        kind = self.pooling_type
        if isinstance(kind, str):
            object.__setattr__(self, "pooling_type", kind.upper())
        _accept("pooling_type", self.pooling_type, (None, *POOLING_TYPES))
        for name in ("normalize", "enable_chunked_processing", "use_activation", "softmax",
                     "activation"):  # fmt: skip
            _accept(name, getattr(self, name), (None, True, False))
        for name in ("dimensions", "max_embed_len"):
            _check_whole(name, getattr(self, name), 1)
        _check_whole("step_tag_id", self.step_tag_id, 0)
        bias = self.logit_bias
        if bias is not None and (type(bias) not in (int, float) or not -1e30 < bias < 1e30):
            _refuse("logit_bias", bias, "a number that float32 holds")
        self._check_columns()
        for old in ("softmax", "activation"):
            if getattr(self, old) is not None:
                logger.warning("pooler_config.%s is an old name of use_activation", old)
                if self.use_activation is None:
                    object.__setattr__(self, "use_activation", getattr(self, old))

    def _check_columns(self) -> None:
        columns: Any = self.returned_token_ids
        if columns is None:
            return
        if not isinstance(columns, list | tuple) or not columns:
            _refuse("returned_token_ids", columns, "a list of token ids")
        for column in columns:
            _check_whole("returned_token_ids", column, 0)
        object.__setattr__(self, "returned_token_ids", tuple(columns))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> PoolerConfig:
        """From JSON.

        Raises:
            ConfigError: a key is unknown, or its value wrong.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for name, value in values.items():
            if name not in known:
                _refuse(name, value, f"left out: unknown field; fields are {', '.join(known)}")
        return cls(**values)


def as_pooler_fields(given: object) -> Mapping[str, Any]:
    """A user's ``pooler_config`` as a mapping.

    Args:
        given: a mapping, a :class:`PoolerConfig`, or None for nothing.

    Raises:
        ConfigError: it is something else.
    """
    if given is None:
        return {}
    if isinstance(given, PoolerConfig):
        fields = dataclasses.asdict(given)
        return {name: value for name, value in fields.items() if value is not None}
    if isinstance(given, Mapping):
        return given
    raise ConfigError(
        f"pooler_config = {given!r}: must be a JSON object, or from Python a PoolerConfig",
        field="pooler_config",
    )


def _refuse(name: str, value: object, accepted: str) -> None:
    raise ConfigError(
        f"pooler_config.{name} = {value!r}: must be {accepted}", field=f"pooler_config.{name}"
    )


def _accept(name: str, value: object, choices: tuple[object, ...]) -> None:
    if not any(value is choice or (isinstance(value, str) and value == choice)
               for choice in choices):  # fmt: skip
        shown = ", ".join("null" if c is None else str(c) for c in choices)
        _refuse(name, value, f"one of {shown}")


def _check_whole(name: str, value: object, minimum: int) -> None:
    if value is not None and (
        isinstance(value, bool) or not isinstance(value, int) or value < minimum
    ):
        _refuse(name, value, f"a whole number of at least {minimum}")
