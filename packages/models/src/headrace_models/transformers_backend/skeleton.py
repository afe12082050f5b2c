"""A module tree of transformers with parameters that take no memory, and buffers as they are."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from headrace_core.errors import UnsupportedModel
from headrace_models.transformers_backend.library import first_line

_ONE_AT_A_TIME = threading.Lock()
"""While a tree is made, functions of torch and transformers are replaced for the whole process."""


def make_tree(
    model_class: Any, config: Any, *, dtype: str, attention: str | dict[str, str], experts: str
) -> Any:
    """Build a class from its config.

    Buffers (frequencies, masks) are computed as always; a parameter is made, without its random
    values, and moved to the device ``meta`` at once, so that no more than one is there at a time.

    Args:
        attention, experts: names under which the functions are registered that are to be called;
            attention may be by name of an inner config.

    Raises:
        UnsupportedModel: the class does not take the config.
    """
    from transformers.initialization import no_init_weights, no_tie_weights

    try:
        with _ONE_AT_A_TIME, no_init_weights(), no_tie_weights(), _parameters_on_meta():
            tree = model_class._from_config(
                config,
                attn_implementation=attention,
                experts_implementation=experts,
                dtype=getattr(torch, dtype),
            )
    except Exception as error:  # a constructor may raise anything at a config that does not fit
        raise UnsupportedModel(
            f"transformers cannot build {model_class.__name__}: {first_line(error)}"
        ) from error
    return tree.eval()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    register, builder = nn.Module.register_parameter, threading.get_ident()

    def on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and threading.get_ident() == builder:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=False)
        register(module, name, param)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def freeze_rotary(tree: nn.Module, max_model_len: int) -> None:
    """Fix frequencies that transformers would choose anew for the longest sequence of each batch.

    A cache holds rotated keys, and a batch many lengths: as in headrace's own classes the longest
    context decides, once (LongRoPE, dynamic NTK).
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for module in tree.modules():
        kinds = getattr(module, "rope_type", None)
        by_layer = dict(kinds) if isinstance(kinds, dict) else {None: kinds}
        for layer_type, kind in by_layer.items():
            if kind not in ("dynamic", "longrope"):
                continue
            extra = {} if layer_type is None else {"layer_type": layer_type}
            prefix = "" if layer_type is None else f"{layer_type}_"
            frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](
                module.config, torch.device("cpu"), seq_len=max_model_len, **extra
            )
            module.register_buffer(f"{prefix}inv_freq", frequencies, persistent=False)
            setattr(module, f"{prefix}attention_scaling", scaling)
            by_layer[layer_type] = "default"
        if kinds is not None:
            vars(module)["rope_type"] = by_layer if isinstance(kinds, dict) else by_layer[None]
