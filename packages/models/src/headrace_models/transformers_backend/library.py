"""The parts of transformers that the backend uses, imported when they are needed."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from headrace_core.errors import MissingDependency, UnsupportedModel
from headrace_models.transformers_backend.checkpoint_code import checkpoint_class

OLDEST = (5, 17)
"""The first version whose interfaces are those that are used here."""
INSTALL = "pip install 'headrace-models[transformers]'"

_OURS = (
    "quantization_config", "attn_implementation", "_attn_implementation", "experts_implementation",
    "_experts_implementation", "torch_dtype", "dtype", "transformers_version",
)  # fmt: skip
"""Keys of a config.json that headrace decides on: a checkpoint must not choose kernels."""


@functools.cache
def transformers() -> ModuleType:
    """The library.

    Raises:
        MissingDependency: it is absent or too old.
    """
    try:
        import transformers as library
    except ImportError as error:
        raise MissingDependency(
            "transformers", needed_for="the transformers backend", install=INSTALL
        ) from error
    found = tuple(int(part) for part in library.__version__.split(".")[:2] if part.isdigit())
    if found < OLDEST:
        raise MissingDependency(
            "transformers",
            needed_for="the transformers backend",
            install=INSTALL,
            found=library.__version__,
        )
    return library


def offers(architecture: str) -> bool:
    """True if transformers has a class of that name. Imports no torch.

    Raises:
        MissingDependency: see :func:`transformers`.
    """
    return architecture in _class_names()


def takes_images(architecture: str) -> bool:
    """True if transformers has a class of that name that answers about images in text."""
    transformers()
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    return architecture in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()


@functools.cache
def _class_names() -> frozenset[str]:
    return frozenset(dir(transformers()))


def read_config(whole: Mapping[str, Any], path: Path | None, *, trusted: bool) -> Any:
    """The config object of a checkpoint: transformers' own class, else the checkpoint's.

    Args:
        whole: ``config.json`` with the user's overrides.
        path: the checkpoint's folder.
        trusted: the user lets the checkpoint's code run.

    Raises:
        UnsupportedModel: nobody has a class for its ``model_type``, or the class refuses its values.
    """
    transformers()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = whole.get("model_type")
    if isinstance(kind, str) and kind in CONFIG_MAPPING:
        config_class = CONFIG_MAPPING[kind]
    else:
        config_class = checkpoint_class(whole, "AutoConfig", path, trusted=trusted)
    if config_class is None:
        raise UnsupportedModel(
            f"config.json: model_type = {kind!r}: transformers has no such model, and auto_map names no "
            "AutoConfig"
        )
    values = {key: value for key, value in whole.items() if key not in _OURS}
    try:
        return config_class.from_dict(values)
    except Exception as error:  # its checks raise what they like
        raise UnsupportedModel(
            f"config.json: {config_class.__name__} does not take it: {first_line(error)}"
        ) from error


def text_config(config: Any) -> Any:
    """The part of a config that describes the language model.

    Raises:
        UnsupportedModel: transformers cannot say which that is.
    """
    try:
        return config.get_text_config(decoder=True)
    except ValueError as error:
        raise UnsupportedModel(f"config.json: {first_line(error)}") from error


def facts(config: Any) -> dict[str, Any]:
    """The language model's settings as JSON has them, every default filled in.

    Sizes stand under the names that headrace reads, whatever the family calls them.
    """
    text = text_config(config)
    found: dict[str, Any] = text.to_dict()
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings"):
        value = getattr(text, name, None)
        if isinstance(value, int):
            found.setdefault(name, value)
    return found


def is_encoder(config: Any) -> bool:
    """True if transformers has the model as an encoder of text and not as a language model."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    kind = config.model_type
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(
            config, "is_decoder", False
        )
    return kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES


def first_line(error: BaseException) -> str:
    """First line of a message that may be long."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
