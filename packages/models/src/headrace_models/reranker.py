"""Language models that rerank: a classifier made of the rows of their head for a few tokens. No torch.

Such a model was trained to say one token (``Yes``) or one of two (``no``, ``yes``). Its score needs
those rows of the head alone: for two tokens, a softmax over both logits is the sigmoid of their
difference, so one row, ``row(true) - row(false)``, is the whole classifier.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace_core.errors import ConfigError

METHODS = ("no_post_processing", "from_2_way_softmax")
_ORIGINAL_QWEN3 = ("no", "yes")


@dataclass(frozen=True, slots=True)
class TokenClassifier:
    """The conversion that the overrides ask for."""

    tokens: tuple[str | int, ...]
    """Tokens as the vocabulary spells them, or their ids. With two classes: false, true."""
    difference: bool
    """One label: the difference of both rows. Else one label for each token."""

    @property
    def num_labels(self) -> int:
        return 1 if self.difference else len(self.tokens)

    @property
    def labels(self) -> tuple[str, ...]:
        """The tokens as names; () where one has none."""
        names = tuple(token for token in self.tokens if isinstance(token, str))
        return names if not self.difference and len(names) == len(self.tokens) else ()


def token_classifier(config: Mapping[str, Any]) -> TokenClassifier | None:
    """Conversion that ``classifier_from_token``, ``method`` and ``is_original_qwen3_reranker`` ask for; None
    without them.

    Raises:
        ConfigError: they contradict each other; names the key.
    """
    original = config.get("is_original_qwen3_reranker", False)
    if not isinstance(original, bool):
        raise _wrong("is_original_qwen3_reranker", original, "true or false")
    tokens = config.get("classifier_from_token")
    if tokens is None:
        if not original:
            return None
        tokens = list(_ORIGINAL_QWEN3)
    if not isinstance(tokens, list | tuple) or not tokens or not all(map(_is_token, tokens)):
        raise _wrong("classifier_from_token", tokens, "a list of tokens, or of their ids")
    default = METHODS[1] if original else METHODS[0]
    method = config.get("method") or default
    if method not in METHODS:
        raise _wrong("method", method, f"one of {', '.join(METHODS)}")
    if original and method != METHODS[1]:
        raise _wrong("method", method, f"{METHODS[1]} with is_original_qwen3_reranker")
    difference = method == METHODS[1]
    if difference and len(tokens) != 2:
        raise _wrong("classifier_from_token", tokens, f"two tokens, false and true, for {method}")
    return TokenClassifier(tuple(tokens), difference)


def scored_by(config: dict[str, Any], tokens: tuple[int, ...]) -> dict[str, Any]:
    """A config that asks for a classifier of the head's rows for these tokens, unless it asks for one
    already.

    Args:
        tokens: one, or false and true; none: there is nothing to ask for.
    """
    if not tokens or token_classifier(config) is not None:
        return config
    return {**config, "classifier_from_token": list(tokens), "method": METHODS[len(tokens) - 1]}


def _is_token(given: object) -> bool:
    return isinstance(given, str) or (type(given) is int and given >= 0)


def _wrong(name: str, value: object, accepted: str) -> ConfigError:
    return ConfigError(
        f"{name} = {value!r}: must be {accepted}", field=f"model.hf_overrides.{name}"
    )
