"""A tree that sees: where its language model is, and what stays transformers' own around it.

The language model is patched as trees of text are. Towers and projectors keep their code, their linear
layers and their attention (``sdpa``, or ``eager`` where the class has no other).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from headrace_core.errors import UnsupportedModel
from headrace_models.transformers_backend import classes
from headrace_models.transformers_backend.library import first_line

_STREAM = frozenset({
    "input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "use_cache",
    "output_attentions", "output_hidden_states", "return_dict", "cache_position",
})  # fmt: skip
"""What a language model may be given by the model around it; masks only if they are None."""
_KINDS = ("mm_token_type_ids", "token_type_ids")
"""Arguments that say of each token whether it is of an image."""
_TRIAL_TOKENS = 8


class Parts(NamedTuple):
    """Places in a tree."""

    base: Any
    """The model that joins towers and language model, below the head."""
    base_name: str
    language: Any
    """The language model, without its head."""
    language_name: str
    """Its full name in the tree."""

    def is_text(self, name: str) -> bool:
        """True if a module is part of the language model or of the head, by its full name."""
        of_base = name == self.base_name or name.startswith(f"{self.base_name}.")
        return not of_base or f"{name}.".startswith(f"{self.language_name}.")

    def towers(self) -> list[str]:
        """Full names of the topmost modules beside the language model."""
        inner = self.language_name.removeprefix(f"{self.base_name}.").partition(".")[0]
        return [f"{self.base_name}.{name}" for name, _ in self.base.named_children() if name != inner]


def parts_of(tree: Any) -> Parts:
    """
    Raises:
        UnsupportedModel: the tree is no language model below a model that joins it with towers.
    """
    from transformers import PreTrainedModel

    base_name, base = classes.base_of(tree)
    language = base.get_decoder() if base_name and hasattr(base, "get_decoder") else base
    names = {module: name for name, module in tree.named_modules()}
    if language is base or not isinstance(language, PreTrainedModel) or language not in names:
        raise UnsupportedModel(
            f"{type(tree).__name__} has no language model of its own class below its head"
        )
    if names[language].rpartition(".")[0] != base_name:
        raise UnsupportedModel(
            f"{type(tree).__name__}: its language model is {names[language]}, not a part of {base_name}"
        )
    if hasattr(language, "lm_head"):
        raise UnsupportedModel(f"{type(tree).__name__}: its language model has a head inside")
    return Parts(base, base_name, language, names[language])


def features_of(parts: Parts, tree: Any) -> Any:
    """The method that makes vectors of images.

    Raises:
        UnsupportedModel: there is none that takes named arguments.
    """
    found = getattr(parts.base, "get_image_features", None) or getattr(
        tree, "get_image_features", None
    )
    if found is None:
        raise UnsupportedModel(f"{type(tree).__name__} has no get_image_features")
    if "pixel_values" not in inspect.signature(found).parameters:
        raise UnsupportedModel(
            f"{type(tree).__name__}.get_image_features does not name its arguments"
        )
    return found


def keep_attention(tree: nn.Module, parts: Parts) -> None:
    """Have everything but the language model attend by transformers' own functions."""
    for config, module in _outer_configs(tree, parts):
        has_sdpa = getattr(module, "_supports_sdpa", False)
        config._attn_implementation_internal = "sdpa" if has_sdpa else "eager"


def _outer_configs(tree: nn.Module, parts: Parts) -> Iterator[tuple[Any, nn.Module]]:
    """Configs of modules that are not the language model's, each with its outermost module."""
    within = {id(m.config) for m in parts.language.modules() if hasattr(m, "config")}
    seen: set[int] = set()
    for module in tree.modules():
        config = getattr(module, "config", None)
        if not hasattr(config, "_attn_implementation_internal"):
            continue
        if id(config) not in within | seen:
            seen.add(id(config))
            yield config, module


class _Called(Exception):  # noqa: N818 (it carries an answer)
    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


def check_wrapper(parts: Parts, dtype: str, device: str) -> None:
    """See that the model around a language model hands it a stream of vectors, and nothing else of images.

    It runs on a prompt with an image, whose vectors are given, up to the call of its language model: a
    mask that lets an image's tokens see those after them, or features for inner layers, would show.

    Raises:
        UnsupportedModel: says what is handed over, or why it does not run.
    """
    name, language = type(parts.base).__name__, parts.language

    def forward(*args: Any, **kwargs: Any) -> Any:
        raise _Called(kwargs)

    vars(language)["forward"] = forward
    try:
        parts.base(**_trial(parts, dtype, device))
    except _Called as called:
        found = called.arguments
    except Exception as error:  # the tree is anybody's code
        raise UnsupportedModel(f"{name} does not run on vectors: {first_line(error)}") from error
    else:
        raise UnsupportedModel(f"{name} does not call {parts.language_name}")
    finally:
        del vars(language)["forward"]
    _check_arguments(name, language, found)


def _trial(parts: Parts, dtype: str, device: str) -> dict[str, Any]:
    size = parts.language.config.hidden_size
    marked = torch.zeros(1, _TRIAL_TOKENS, dtype=torch.long, device=device)
    marked[:, 2:6] = 1
    takes = inspect.signature(parts.base.forward).parameters
    return {
        "inputs_embeds": torch.zeros(
            1, _TRIAL_TOKENS, size, dtype=getattr(torch, dtype), device=device
        ),
        "position_ids": torch.arange(_TRIAL_TOKENS, device=device).unsqueeze(0),
        "use_cache": False,
        **{key: marked for key in _KINDS if key in takes},
    }


def _check_arguments(name: str, language: Any, found: Mapping[str, Any]) -> None:
    if found.get("attention_mask") is not None:
        raise UnsupportedModel(
            f"{name} makes a mask of its own for prompts with images: their tokens do not attend to those "
            "before them only"
        )
    named = set(inspect.signature(language.forward).parameters) | set(found)
    other = sorted(named - _STREAM - {"kwargs", "args", "labels", "logits_to_keep", *_KINDS})
    if other:
        raise UnsupportedModel(
            f"{name}: {type(language).__name__} takes {', '.join(other)} beside its stream of vectors"
        )


def vectors_of(made: Any, size: int, dtype: torch.dtype) -> torch.Tensor:
    """What ``get_image_features`` made of one item, as [vectors, ``size``]."""
    if hasattr(made, "pooler_output"):
        made = made.pooler_output
    if isinstance(made, tuple | list):
        made = torch.cat([part.reshape(-1, size) for part in made])
    return made.reshape(-1, size).to(dtype)
