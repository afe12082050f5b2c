"""Runs a loaded tree once on a few tokens, to see what its attention asks for, and that this is all.

Nothing about attention is guessed from a config. The tree runs with a function in place of attention
that notes how it is called, and gives each token something of its own query, key and value. Then the
same tokens run alone: as attention is the only place where tokens may meet, each must give what it gave
among the others. A model with a convolution, a state, an attention of its own or positions that it
counts itself does not, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from headrace_core.errors import UnsupportedModel
from headrace_models.transformers_backend.attention import STEP, AttentionCall
from headrace_models.transformers_backend.library import first_line
from headrace_models.transformers_backend.masks import MaskFacts, read_mask

if TYPE_CHECKING:
    from torch import Tensor, nn

NOTES = "headrace_notes"
"""The keyword argument that carries the notes through the tree while it is tried."""
NUM_TOKENS = 6
_PASSED_ON = frozenset({
    STEP, NOTES, "dropout", "scaling", "sliding_window", "softcap", "s_aux", "is_causal",
    "position_ids", "use_cache", "output_attentions", "output_hidden_states", "return_dict",
    "cache_position", "past_key_values", "past_key_value", "position_embeddings", "layer_idx",
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "output_router_logits",
    "token_type_ids", "training", "deterministic",
})  # fmt: skip
"""Arguments of an attention function that are known, or of no effect on one without a cache."""


class CallRecord:
    """Calls that were made, by attention module."""

    def __init__(self, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self.seen: dict[nn.Module, list[AttentionCall]] = {}
        """One entry for each time that a module attends in a step."""
        self.is_first_run = True
        self.masks: dict[AskedMask, MaskFacts] = {}


class AskedMask:
    """Stands for a mask of transformers: the function that it would have been made of.

    A model that computes with its mask finds no tensor, and is refused with what that raises.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __getitem__(self, key: object) -> AskedMask:
        parts = key if isinstance(key, tuple) else (key,)
        if all(part in (slice(None), slice(0, None)) for part in parts):  # all of it
            return self
        raise UnsupportedModel("it computes with its mask, which is not known before the step")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]


def note_mask(*args: Any, mask_function: Callable[..., Any], **kwargs: Any) -> AskedMask:
    """A mask function of transformers."""
    return AskedMask(mask_function)


def note_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers that notes and mixes nothing."""
    notes = kwargs.get(NOTES)
    if not isinstance(notes, CallRecord):
        raise UnsupportedModel(
            "Keyword arguments: kwargs do not flow from the base model through every module to "
            f"{type(module).__name__}"
        )
    asked = _asked(module, query, key, value, attention_mask, notes, kwargs)
    if notes.is_first_run:
        notes.seen.setdefault(module, []).append(asked)
    groups = query.shape[1] // key.shape[1]
    own = [x.repeat_interleave(groups, dim=1).transpose(1, 2) for x in (key, value)]
    # Rotated vectors of other positions have other sums.
    out = own[1] + query.transpose(1, 2).mean(-1, keepdim=True) + own[0].mean(-1, keepdim=True)
    return out.to(query.dtype).contiguous(), None


def _asked(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: object,
    notes: CallRecord,
    kwargs: Mapping[str, Any],
) -> AttentionCall:
    unknown = sorted(
        name
        for name, given in kwargs.items()
        if name not in _PASSED_ON and given is not None and given is not False
    )
    if unknown:
        raise UnsupportedModel(
            f"{type(module).__name__} passes {', '.join(unknown)} to its attention, which headrace's "
            "does not take"
        )
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise UnsupportedModel(f"{type(module).__name__} attends to more than the step's tokens")
    size = query.shape[-1]
    if key.shape[-1] != size or value.shape[-1] > size:
        raise UnsupportedModel(
            f"{type(module).__name__}: heads of {size} (query), {key.shape[-1]} (key) and "
            f"{value.shape[-1]} (value) numbers"
        )
    scale = kwargs.get("scaling")
    return AttentionCall(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=size,
        scale=float(size**-0.5 if scale is None else scale),
        mask=_mask(module, mask, notes, kwargs),
        soft_cap=float(kwargs.get("softcap") or 0.0),
        sinks=_sinks(module, kwargs.get("s_aux"), query.shape[1]),
    )


def _mask(
    module: nn.Module, mask: object, notes: CallRecord, kwargs: Mapping[str, Any]
) -> MaskFacts:
    if isinstance(mask, AskedMask):
        if mask not in notes.masks:
            notes.masks[mask] = read_mask(mask.function, notes.max_model_len)
        return notes.masks[mask]
    if mask is not None:
        raise UnsupportedModel(f"{type(module).__name__} adds a mask of its own making")
    causal = kwargs.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
    window = kwargs.get("sliding_window")
    return MaskFacts(causal, None if window is None else int(window))


def _sinks(module: nn.Module, sinks: Tensor | None, num_heads: int) -> Tensor | None:
    if sinks is None:
        return None
    if sinks.numel() != num_heads:
        raise UnsupportedModel(
            f"{type(module).__name__}: {sinks.numel()} sinks for {num_heads} heads"
        )
    return sinks.detach().reshape(-1)


def try_tree(
    run: Callable[..., Tensor], vocab_size: int, notes: CallRecord, *, dtype: str, device: str
) -> Tensor:
    """Fill ``notes``; see the module's docstring.

    Args:
        run: (ids [T], positions [T], **arguments of the base model) -> hidden states [T, H].

    Returns:
        Hidden states of the tokens.

    Raises:
        UnsupportedModel: the model cannot be run over a paged cache; says why.
    """
    ids = torch.arange(3, 3 + NUM_TOKENS, device=device) % vocab_size
    positions = torch.arange(NUM_TOKENS, device=device)
    arguments = {NOTES: notes}
    try:
        with torch.no_grad():
            hidden = run(ids, positions, **arguments)
            together = hidden.float()
            notes.is_first_run = False
            if not notes.seen:
                raise UnsupportedModel(
                    "Attention: no module looks its function up in transformers' registry by "
                    "config._attn_implementation and passes itself, query, key, value and kwargs"
                )
            alone = torch.cat(
                [run(ids[i : i + 1], positions[i : i + 1], **arguments) for i in (1, 3, 5)]
            ).float()
    except UnsupportedModel:
        raise
    except Exception as error:  # the tree is anybody's code
        raise UnsupportedModel(
            f"it does not run over a paged cache: {first_line(error)}"
        ) from error
    among = together[[1, 3, 5]]
    apart = (among - alone).norm(dim=-1) / among.norm(dim=-1).clamp_min(1e-6)
    limit = 1e-3 if dtype == "float32" else 0.1
    if int((apart > limit).sum()) > 1 or not bool(alone.isfinite().all()):
        # One may differ: where a router's two best experts are equally good, a last bit decides.
        raise UnsupportedModel(
            "its tokens meet outside of attention (a convolution, a recurrent state, positions that it "
            "counts itself), so that requests could not share a step"
        )
    return hidden
