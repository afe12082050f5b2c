"""The labels of a classifier, and what turns its logits into probabilities. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace_core.errors import UnsupportedModel
from headrace_models.config.settings import Settings
from headrace_models.reranker import token_classifier

TORCH_ACTIVATIONS = (
    "CELU", "ELU", "GELU", "Hardsigmoid", "Hardswish", "Hardtanh", "Identity", "LeakyReLU",
    "LogSigmoid", "Mish", "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softplus", "Softsign", "Tanh",
)  # fmt: skip
"""Classes of ``torch.nn`` that a checkpoint may name: elementwise, made without arguments."""
_MAX_LABELS = 1 << 20


def num_labels(config: Mapping[str, Any]) -> int:
    """``num_labels``, else as many as ``id2label`` names, else Hugging Face's default of 2. Labels
    made of tokens are as many as these come to.

    Raises:
        UnsupportedModel: it is no number of labels.
        ConfigError: see :func:`headrace_models.reranker.token_classifier`.
    """
    by_token = token_classifier(config)
    if by_token is not None:
        return by_token.num_labels
    names = config.get("id2label")
    default = len(names) if isinstance(names, Mapping) and names else 2
    return Settings(config).integer("num_labels", default, maximum=_MAX_LABELS)


def label_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """``id2label`` by index; () unless it names every label. Labels made of tokens are named so."""
    by_token = token_classifier(config)
    if by_token is not None:
        return by_token.labels
    names = config.get("id2label")
    if not isinstance(names, Mapping):
        return ()
    by_index = [names.get(str(index), names.get(index)) for index in range(num_labels(config))]
    return () if None in by_index else tuple(map(str, by_index))


def classification_activation(config: Mapping[str, Any], stated: str | None = None) -> str:
    """``identity``, ``sigmoid``, ``softmax``, or a class of ``torch.nn``.

    A cross-encoder's own wins; else it follows from the problem that the model was trained for.

    Args:
        stated: what ``config_sentence_transformers.json`` names, if it does.

    Raises:
        UnsupportedModel: it is none that may be named.
    """
    block = config.get("sentence_transformers")
    for name, value in (
        ("sentence_transformers.activation_fn",
         block.get("activation_fn") if isinstance(block, Mapping) else None),
        ("sbert_ce_default_activation_function",
         config.get("sbert_ce_default_activation_function")),
        ("activation_fn", stated),
    ):  # fmt: skip
        if value is not None:
            return torch_activation(name, value)
    kind = config.get("problem_type")
    if kind == "regression":
        return "identity"
    if kind == "multi_label_classification" or num_labels(config) == 1:
        return "sigmoid"
    return "softmax"


def torch_activation(name: str, value: object) -> str:
    """``torch.nn.modules.activation.Tanh`` -> ``Tanh``; classes that are never imported by name.

    Args:
        name: of the setting, for the message.

    Raises:
        UnsupportedModel: another object is named.
    """
    module, _, kind = value.rpartition(".") if isinstance(value, str) else ("", "", "")
    if kind not in TORCH_ACTIVATIONS or not f"{module}.".startswith("torch.nn."):
        raise UnsupportedModel(
            f"{name} = {value!r}: must be torch.nn's {', '.join(TORCH_ACTIVATIONS)}"
        )
    return kind
