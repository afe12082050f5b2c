"""A wrapper's ``config.json``, as its language model reads it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from headrace_models.catalogue.multimodal.left_out import LEFT_OUT
from headrace_models.catalogue.multimodal.rows import WRAPPERS
from headrace_models.catalogue.multimodal.wrapper import PREFIXES, nested_settings

_HEADS = ("lm_head.", "output.", "language_model.lm_head.", "language_model.output.", "text_model.lm_head.",
          "transformer.output_layer.",
          "thinker.lm_head.", "llm.lm_head.", "language.lm_head.", "decoder.lm_head.")  # fmt: skip
"""Beginnings of the names of a language model's head."""


def text_architecture(architecture: str, whole: Mapping[str, Any]) -> str:
    """The architecture of a checkpoint's language model: of a wrapper's, or its own.

    Args:
        whole: ``config.json``.
    """
    wrapper = WRAPPERS.get(architecture)
    if wrapper is None:
        return architecture
    inner = nested_settings(whole)
    kind = wrapper.text_kind(whole if inner is None else inner)
    return wrapper.texts.get(kind, architecture)


def of_inner_model(whole: Mapping[str, Any]) -> dict[str, Any]:
    """A retriever's config as that of the model that is in it (``vlm_config``); others come back as they are.

    Args:
        whole: ``config.json``.
    """
    inner = whole.get("vlm_config")
    if not isinstance(inner, Mapping):
        return dict(whole)
    outer = {key: value for key, value in whole.items() if key not in ("vlm_config", "model_type")}
    return {**inner, **outer}


def own_quantization(architecture: str, said: Any) -> Any:
    """A ``quantization_config`` whose lists of modules and patterns name a wrapper's language model as its
    own class does; other architectures' come back as they are.

    Args:
        said: the whole, or a value in it.
    """
    wrapper = WRAPPERS.get(architecture)
    if wrapper is None:
        return said
    if isinstance(said, Mapping):
        return {
            own_quantization(architecture, key): own_quantization(architecture, value)
            for key, value in said.items()
        }
    if isinstance(said, list):
        return [own_quantization(architecture, value) for value in said]
    return _own_entry(said) if isinstance(said, str) else said


def _own_entry(entry: str) -> str:
    """A module's name, or a pattern of names, with the language model's prefix replaced."""
    for prefix, own in PREFIXES.items():
        for spelled, replaced in (
            (prefix, own),
            (prefix.replace(".", r"\."), own.replace(".", r"\.")),
        ):
            at = entry.find(spelled)
            if at >= 0 and (at == 0 or not (entry[at - 1].isalnum() or entry[at - 1] in "_.")):
                return entry[:at] + replaced + entry[at + len(spelled) :]
    return entry


def settings_of_towers(architecture: str) -> tuple[str, ...]:
    """Keys of a wrapper's config that mean a tower (:attr:`Wrapper.settings_of_towers`)."""
    wrapper = WRAPPERS.get(architecture)
    return () if wrapper is None else wrapper.settings_of_towers


def fixed_settings(architecture: str) -> Mapping[str, Any]:
    """Settings of a wrapper's language model that its class fixes (:attr:`Wrapper.fixed`)."""
    wrapper = WRAPPERS.get(architecture)
    return {} if wrapper is None else wrapper.fixed


def joined_settings(
    architecture: str, whole: Mapping[str, Any], text: Mapping[str, Any]
) -> dict[str, Any]:
    """A wrapper's text settings with those that its configs leave out, and with those that it says for all of
    its parts (:data:`LEFT_OUT`, :attr:`Wrapper.defaults`, :attr:`Wrapper.shared`).

    Args:
        whole: ``config.json``.
        text: of the language model.
    """
    wrapper = WRAPPERS.get(architecture)
    if wrapper is None:
        return dict(text)
    shared = {key: whole[key] for key in wrapper.shared if whole.get(key) is not None}
    inner = nested_settings(whole)
    kind = "" if inner is None else str(inner.get("model_type", ""))
    known = {**LEFT_OUT.get(kind, {}), **wrapper.defaults}
    return _with_more_tokens({**known, **text, **shared}, wrapper.more_tokens)


def _with_more_tokens(text: Mapping[str, Any], number: int) -> dict[str, Any]:
    """With ``vocab_size`` of all tokens, and ``embedding_size`` of the head's; see
    :attr:`Wrapper.more_tokens`."""
    answers = text.get("embedding_size") or text.get("vocab_size")
    more = text.get("additional_vocab_size", number)
    if not number or type(answers) is not int or type(more) is not int:
        return dict(text)
    return {**text, "embedding_size": answers, "vocab_size": answers + more}


def ties_by_tensors(
    architecture: str, config: Mapping[str, Any], stored: Iterable[str]
) -> dict[str, Any]:
    """A wrapper's text settings, with ``tie_word_embeddings`` as its files have it: configs say it on two
    levels, which differ, and classes have defaults of their own.

    Args:
        config: of the language model.
        stored: names of the checkpoint's tensors; none: the config is believed.
    """
    names = [name for name in stored if name]
    if architecture not in WRAPPERS or not names:
        return dict(config)
    has_head = any(name.startswith(_HEADS) for name in names)
    return {**config, "tie_word_embeddings": not has_head}
