"""Classes of transformers, or of a checkpoint: which one runs it, and what its parts are."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headrace_core.errors import UnsupportedModel
from headrace_models.transformers_backend.checkpoint_code import checkpoint_class
from headrace_models.transformers_backend.library import offers, transformers
from headrace_models.transformers_backend.refusals import REFUSED


class Found(NamedTuple):
    """A class that can be built from a config."""

    tree: Any
    """Class with ``_from_config``."""
    base: Any
    """The class of the base model, which must have the marker."""


def generating(whole: Mapping[str, Any], config: Any, path: Path | None, *, trusted: bool) -> Found:
    """The language model of a checkpoint: transformers', else its own base model under a plain head.

    Raises:
        UnsupportedModel: neither is there.
    """
    named = _named(whole)
    if named is not None and hasattr(named, "prepare_inputs_for_generation"):
        return Found(named, named)
    base = checkpoint_class(whole, "AutoModel", path, trusted=trusted)
    if base is None:
        raise UnsupportedModel(
            f"config.json: architectures {whole.get('architectures')!r}: transformers has no language "
            "model of that name, and auto_map names no AutoModel"
        )
    return Found(_headed(base), base)


def pooling(
    whole: Mapping[str, Any], config: Any, path: Path | None, *, trusted: bool, labels: bool
) -> Found:
    """The class that gives hidden states, or with ``labels`` the one whose head classifies them.

    Raises:
        UnsupportedModel: there is none.
    """
    named = _named(whole)
    if labels:
        if named is None or "Classification" not in named.__name__:
            raise UnsupportedModel(
                f"config.json: architectures {whole.get('architectures')!r}: the transformers backend "
                "classifies by classes of transformers that end in ForSequenceClassification or "
                "ForTokenClassification"
            )
        return Found(named, named)
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    base = checkpoint_class(whole, "AutoModel", path, trusted=trusted) if named is None else None
    if base is None and type(config) in MODEL_MAPPING:
        base = MODEL_MAPPING[type(config)]
    if base is None:
        raise UnsupportedModel(
            f"config.json: model_type = {config.model_type!r}: transformers has no base model for it"
        )
    return Found(base, base)


def _named(whole: Mapping[str, Any]) -> Any:
    """transformers' class of the first of ``architectures`` that it has."""
    names = whole.get("architectures")
    for name in names if isinstance(names, list) else []:
        if isinstance(name, str) and offers(name):
            found = getattr(transformers(), name)
            if isinstance(found, type) and hasattr(found, "_from_config"):
                return found
    return None


def check(base: Any, model_type: str) -> None:
    """Refuse classes that cannot run over a paged cache, before they are built.

    Args:
        base: the class that must have the marker.
        model_type: of the language model.

    Raises:
        UnsupportedModel: says why.
    """
    name, reason = base.__name__, REFUSED.get(model_type)
    if reason is not None:
        raise UnsupportedModel(f"{name}: {reason}")
    if getattr(base, "_is_stateful", False):
        raise UnsupportedModel(
            f"{name}: keeps a recurrent state, in a cache that only transformers can manage"
        )
    if not getattr(base, "_supports_attention_backend", False):
        raise UnsupportedModel(
            f"Marker: {name} does not have _supports_attention_backend = True: its attention is its own"
        )


def base_of(tree: Any) -> tuple[str, Any]:
    """Name and module of the model below the head; ("", tree) of a tree without one.

    Raises:
        UnsupportedModel: there are several.
    """
    from transformers import PreTrainedModel

    named = tree._modules.get(tree.base_model_prefix)
    if isinstance(named, PreTrainedModel):
        return tree.base_model_prefix, named
    found = [(n, m) for n, m in tree.named_children() if isinstance(m, PreTrainedModel)]
    if not found or not hasattr(tree, "lm_head"):
        return "", tree
    if len(found) > 1:
        raise UnsupportedModel(f"{type(tree).__name__} has several models below its head")
    return found[0]


def tied_names(tree: Any) -> dict[str, str]:
    """Parameters that have another's values -> whose."""
    found: dict[str, str] = dict(getattr(tree, "all_tied_weights_keys", None) or {})
    return found


def ignored(tree: Any, tied: Mapping[str, str]) -> dict[str, str]:
    """Tensors of checkpoints that nobody needs: the class's own list, tied ones that are stored all
    the same, and heads that a base model has none of."""
    patterns = getattr(tree, "_keys_to_ignore_on_load_unexpected", None) or ()
    found = {f".*(?:{pattern}).*": "ignored by transformers" for pattern in patterns}
    found |= {re.escape(name): f"the same as {source}" for name, source in tied.items()}
    for name, module in tree.named_modules():
        for key in module._non_persistent_buffers_set:
            found[re.escape(f"{name}.{key}" if name else key)] = "computed from the config"
    if base_of(tree)[0] == "":
        found[r"(lm_head|score|classifier|cls|pooler|.*\.pooler)\..*"] = "the head of another task"
    return found


def first_position(base: nn.Module) -> int:
    """Number that transformers adds to positions (RoBERTa's begin behind its padding)."""
    for module in base.modules():
        padding = getattr(module, "padding_idx", None)
        if hasattr(module, "create_position_ids_from_input_ids") and isinstance(padding, int):
            return padding + 1
    return 0


def without_base(tree: Any, name: str, base: nn.Module) -> nn.Module:
    """The tree with nothing below its head: what it is given as input vectors it takes for the base
    model's final states. So logits are whatever the class makes of them."""
    head: nn.Module = copy.copy(tree)
    head._modules = dict(tree._modules)
    head._modules[name] = _Given(base)
    return head


class _States(dict[str, Any]):
    """Outputs of a base model: final states, and nothing else that it may be asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return super().__getitem__(key)
        return tuple(self.values())[key]


class _Given(nn.Module):
    """Module in place of a base model: gives back its input."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.real = (base,)  # in a tuple, so that its weights are not this one's

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> _States:
        states = _States(last_hidden_state=inputs_embeds)
        pooler = self.real[0]._modules.get("pooler")
        states["pooler_output"] = None if pooler is None else pooler(inputs_embeds)
        return states

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            found = getattr(self.__dict__["real"][0], name)
            # Some call what is inside the base model (OPT's decoder).
            return _Given(found) if hasattr(found, "_from_config") else found


def _headed(base: Any) -> Any:
    """A class with ``base`` under a linear head, as language models of checkpoints' own code are run:
    tied if the config says so, scaled and capped as it says."""

    class PlainHead(nn.Module):
        base_model_prefix = getattr(base, "base_model_prefix", "") or "model"

        def __init__(self, model: Any) -> None:
            super().__init__()
            self.config = model.config
            text = model.config.get_text_config()
            self.add_module(self.base_model_prefix, model)
            dtype = next(model.parameters()).dtype
            self.lm_head = nn.Linear(
                text.hidden_size, text.vocab_size, bias=False, device="meta", dtype=dtype
            )
            self.scale = float(getattr(text, "logit_scale", None) or 1.0)
            self.cap = getattr(text, "final_logit_softcapping", None)
            table = model.get_input_embeddings()
            named = {id(module): name for name, module in self.named_modules()}
            tied = getattr(text, "tie_word_embeddings", False)
            self.all_tied_weights_keys = (
                {"lm_head.weight": f"{named[id(table)]}.weight"} if tied else {}
            )

        @classmethod
        def _from_config(cls, config: Any, **arguments: Any) -> Any:
            return cls(base._from_config(config, **arguments))

        def is_custom_code(self) -> bool:
            return True

        def forward(self, inputs_embeds: Tensor, **kwargs: Any) -> _States:
            model = self.get_submodule(self.base_model_prefix)
            logits = self.lm_head(model(inputs_embeds=inputs_embeds).last_hidden_state) * self.scale
            if self.cap:
                logits = self.cap * torch.tanh(logits / self.cap)
            return _States(logits=logits)

    PlainHead.__name__ = PlainHead.__qualname__ = f"{base.__name__}WithHead"
    return PlainHead
