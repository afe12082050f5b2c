"""A tree that sees: where its language model is, and what stays transformers' own around it.

The language model is patched as trees of text are. Towers and projectors keep their code, their linear
layers and their attention (``sdpa``, or ``eager`` where the class has no other).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from headrace_core.errors import ModelError, UnsupportedModel
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

    outer: Any
    """The model that joins towers and language model."""
    outer_name: str
    """Its name in the tree; "": it is the tree."""
    text_name: str
    """Full name of the part of it that is all text: the language model, perhaps with its head."""
    language: Any
    """The language model, without its head."""
    language_name: str
    """Its full name."""

    def is_text(self, name: str) -> bool:
        """True if a module is part of the language model or of the head, by its full name."""
        if f"{name}.".startswith(f"{self.text_name}."):
            return True
        return bool(self.outer_name) and not f"{name}.".startswith(f"{self.outer_name}.")

    def towers(self) -> list[str]:
        """Full names of the topmost modules beside the language model."""
        start = f"{self.outer_name}." if self.outer_name else ""
        names = [f"{start}{name}" for name, _ in self.outer.named_children()]
        return [name for name in names if name != self.text_name]


def parts_of(tree: Any) -> Parts:
    """Find the language model in a tree, with its head above the whole or inside.

    Raises:
        UnsupportedModel: the tree does not have a language model as a part of what joins it with towers.
    """
    name, outer = classes.base_of(tree)
    if "lm_head" in outer._modules:
        name, outer = "", tree
    inner = outer.get_decoder() if hasattr(outer, "get_decoder") else outer
    found = [key for key, child in outer.named_children() if child is inner]
    if not found:
        raise UnsupportedModel(f"{type(tree).__name__} has no language model as a part of it")
    text_name = f"{name}.{found[0]}" if name else found[0]
    below, language = classes.base_of(inner)
    if not name and not below:
        raise UnsupportedModel(f"{type(tree).__name__} has no head above its language model")
    if name and below:
        raise UnsupportedModel(f"{type(tree).__name__}: its language model has a head inside")
    language_name = f"{text_name}.{below}" if below else text_name
    return Parts(outer, name, text_name, language, language_name)


def head_place(tree: Any, parts: Parts) -> tuple[Any, str, Any]:
    """The model that has the head, and name and module of what is directly below it."""
    if parts.outer_name:
        return tree, parts.outer_name, parts.outer
    inner = tree.get_submodule(parts.text_name)
    return inner, parts.language_name.removeprefix(f"{parts.text_name}."), parts.language


def features_of(parts: Parts, tree: Any) -> Any:
    """The method that makes vectors of images.

    Raises:
        UnsupportedModel: there is none that takes named arguments.
    """
    found = getattr(parts.outer, "get_image_features", None) or getattr(
        tree, "get_image_features", None
    )
    if found is None:
        raise UnsupportedModel(f"{type(tree).__name__} has no get_image_features")
    if "pixel_values" not in inspect.signature(found).parameters:
        raise UnsupportedModel(
            f"{type(tree).__name__}.get_image_features does not name its arguments"
        )
    return found


def attention_of_parts(config: Any, text: Any, language: str) -> str | dict[str, str]:
    """What transformers takes as the attention of a tree: ``language`` for the language model, and for
    the others what they use by themselves. All use it if the language model has no config of its own."""
    found = [key for key in config.sub_configs if getattr(config, key, None) is text]
    return {found[0]: language} if found else language


def keep_attention(tree: nn.Module, parts: Parts, others: frozenset[str]) -> None:
    """Have everything but the language model attend by transformers' own functions.

    Args:
        others: names of functions that only a language model can call.
    """
    within = {id(m.config) for m in parts.language.modules() if hasattr(m, "config")}
    for module in tree.modules():
        config: Any = getattr(module, "config", None)
        if id(config) in within or getattr(config, "_attn_implementation", None) not in others:
            continue
        has_sdpa = getattr(module, "_supports_sdpa", False)
        config._attn_implementation_internal = "sdpa" if has_sdpa else "eager"


class _Called(Exception):
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
    name, language = type(parts.outer).__name__, parts.language

    def forward(*args: Any, **kwargs: Any) -> Any:
        raise _Called(kwargs)

    vars(language)["forward"] = forward
    try:
        parts.outer(**_trial(parts, dtype, device))
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
    takes = inspect.signature(parts.outer.forward).parameters
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
    handed = {key for key, value in found.items() if value is not None}
    takes = set(inspect.signature(language.forward).parameters)
    other = sorted((takes | handed) - _STREAM - {"kwargs", "args", "labels", "logits_to_keep"})
    if other:
        raise UnsupportedModel(
            f"{name}: {type(language).__name__} takes {', '.join(other)} beside its stream of vectors"
        )


def states_of(made: Any) -> Any:
    """The tensor, or tensors, in what ``get_image_features`` gives."""
    if hasattr(made, "last_hidden_state"):
        return made.last_hidden_state if made.pooler_output is None else made.pooler_output
    return made


def vectors_of(made: Any, size: int) -> torch.Tensor:
    """Tensors of one item as [vectors, ``size``].

    Raises:
        ModelError: they are something else.
    """
    parts = list(made) if isinstance(made, tuple | list) else [made]
    if not parts or not all(isinstance(p, torch.Tensor) and p.shape[-1] == size for p in parts):
        told = [list(p.shape) if isinstance(p, torch.Tensor) else type(p).__name__ for p in parts]
        raise ModelError(
            f"get_image_features made {told} of an image, not vectors of {size} numbers"
        )
    return torch.cat([part.reshape(-1, size) for part in parts])
