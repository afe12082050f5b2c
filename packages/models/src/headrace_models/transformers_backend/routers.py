"""Routers of mixtures of experts: which of them compute what the op ``route_experts`` does.

Such a module has a weight [E, H], perhaps a bias [E] by which experts are chosen and not weighed, and
gives for rows [T, H] its logits [T, E], weights [T, k] and experts [T, k].
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

if TYPE_CHECKING:
    from headrace_core.model import BuildContext
    from headrace_core.ops import PackedLinear

BIAS = "e_score_correction_bias"
_MOST_EXPERTS = 4096
"""Most outputs of a router; a module with more is a head, which need not be tried."""
_NUM_ROWS = 64
"""Rows that are tried: so many that ways of choosing differ in some."""


class RouterLike(NamedTuple):
    """Computation of a router."""

    weight: str
    bias: str | None
    """Names of its tensors in the module; the bias may be an argument instead."""
    top_k: int
    options: Mapping[str, Any]
    """Arguments of the op."""
    exact: bool
    """Its logits are of float32, whatever the activations are."""
    rounds: bool
    """Its weights are rounded to the activations' dtype."""


class Router:
    """The ``forward`` of a router.

    Args:
        module: with its weights once they are loaded; then :meth:`pack` is called.
    """

    def __init__(self, context: BuildContext, module: nn.Module, like: RouterLike) -> None:
        self.ops, self.module, self.like = context.ops, module, like
        self.packed: PackedLinear | None = None
        self.bias: Tensor | None = None

    def pack(self) -> None:
        """Take the module's weights."""
        weight = self.module.get_parameter(self.like.weight).detach()
        self.packed = self.ops.linear.pack(weight.float() if self.like.exact else weight)
        if self.like.bias is not None:
            owner, _, key = self.like.bias.rpartition(".")
            bias: Tensor = getattr(self.module.get_submodule(owner), key)
            self.bias = bias.detach().float().flatten()

    def __call__(
        self, hidden: Tensor, bias: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [..., H] -> logits [T, E], weights [T, k], experts [T, k]."""
        assert self.packed is not None
        like, rows = self.like, hidden.reshape(-1, hidden.shape[-1])
        if BIAS in kwargs:
            bias = kwargs[BIAS]
        logits = self.ops.linear(self.ops.to_float32(rows) if like.exact else rows, self.packed)
        chosen_by = self.bias if bias is None else bias.float()
        weights, ids = self.ops.route_experts(logits, like.top_k, bias=chosen_by, **like.options)
        return logits, weights.to(hidden.dtype) if like.rounds else weights, ids


def router_like(module: nn.Module) -> RouterLike | None:
    """Computation of a module that routes; None if it does not, or otherwise than the op can."""
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    weights = [name for name, x in own.items() if x.dim() == 2 and not name.endswith(BIAS)]
    biases = [name for name in own if name.endswith(BIAS)]
    if len(weights) != 1 or len(biases) > 1 or len(own) != len(weights) + len(biases):
        return None
    plain = type(module).forward in (nn.Linear.forward, nn.Embedding.forward)
    if plain or own[weights[0]].shape[0] > _MOST_EXPERTS:
        return None
    probe = _RouterProbe(module, own, weights[0], next(iter(biases), None))
    answer = probe.answer(torch.float32)
    if answer is None or not torch.allclose(answer[0], probe.logits(), rtol=1e-4, atol=1e-5):
        return None
    options, rounded = probe.options(answer), probe.answer(torch.bfloat16)
    if options is None or rounded is None:
        return None
    logits, chosen_weights, _ = rounded
    exact = not logits.float().equal(logits.bfloat16().float())
    rounds = chosen_weights.dtype is torch.bfloat16
    return RouterLike(weights[0], probe.bias_name, answer[2].shape[1], options, exact, rounds)


class _RouterProbe:
    """A router with random weights, and what it makes of a few rows."""

    def __init__(
        self, module: nn.Module, own: Mapping[str, Tensor], weight: str, bias: str | None
    ) -> None:
        generator = torch.Generator().manual_seed(12)
        experts, hidden = own[weight].shape
        self.module, self.weight_name, self.bias_name = module, weight, bias
        self.weight = torch.randn(experts, hidden, generator=generator) * 2 * hidden**-0.5
        self.rows = torch.randn(_NUM_ROWS, hidden, generator=generator)
        self.takes_bias = list(inspect.signature(module.forward).parameters)[1:2] == [BIAS]
        correction = torch.randn(experts, generator=generator) * 0.2
        self.bias = correction if self.takes_bias or bias is not None else None
        self.shape = correction.shape if bias is None else own[bias].shape

    def answer(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor] | None:
        """Logits, weights and experts, if that is what it gives."""
        tensors = {self.weight_name: self.weight.to(dtype)}
        if self.bias_name is not None and self.bias is not None:
            tensors[self.bias_name] = self.bias.view(self.shape)
        rows = self.rows.to(dtype)
        for hidden in (rows, rows.unsqueeze(0)):  # some want a batch
            arguments = (hidden, self.bias) if self.takes_bias else (hidden,)
            try:
                with torch.no_grad():
                    logits, weights, ids = functional_call(self.module, tensors, arguments)
                if weights.shape == ids.shape == (len(rows), ids.shape[1]):
                    return logits, weights, ids.long()
            except Exception:  # it is something else
                continue
        return None

    def logits(self) -> Tensor:
        product: Tensor = self.rows @ self.weight.T
        return product

    def options(self, answer: tuple[Tensor, Tensor, Tensor]) -> dict[str, Any] | None:
        """Arguments with which the op gives the same."""
        logits, weights, ids = answer
        wanted = torch.zeros_like(logits).scatter(1, ids, weights.float())
        for options in _candidates(self.module):
            try:
                mine, chosen = _routed(logits, ids.shape[1], self.bias, **options)
            except RuntimeError:  # experts that are no such groups
                continue
            dense = torch.zeros_like(logits).scatter(1, chosen, mine)
            if torch.allclose(dense, wanted, rtol=1e-4, atol=1e-6):
                return options
        return None


def _candidates(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Ways in which the module's own numbers may be meant."""
    numbers = vars(module)
    scales = {1.0, *(float(v) for v in numbers.values() if isinstance(v, (int, float)))} - {0.0}
    counts = [v for k, v in numbers.items() if "group" in k and isinstance(v, int) and v > 0]
    groups = {(1, 1, "max")} | {
        (many, top, score)
        for many, top in itertools.permutations(counts, 2)
        if many > 1 and top <= many
        for score in ("top2", "max")
    }
    for scoring, renormalise in itertools.product(("softmax", "sigmoid"), (False, True)):
        for num_groups, top_groups, group_score in sorted(groups):
            for scale in sorted(scales):
                yield {
                    "scoring": scoring, "renormalise": renormalise, "scale": scale,
                    "num_groups": num_groups, "top_groups": top_groups, "group_score": group_score,
                }  # fmt: skip


def _routed(
    logits: Tensor,
    k: int,
    bias: Tensor | None,
    *,
    scoring: str,
    renormalise: bool,
    scale: float,
    num_groups: int,
    top_groups: int,
    group_score: str,
) -> tuple[Tensor, Tensor]:
    """Weights [T, k] and experts [T, k] that the op gives for logits [T, E], on any device.

    Raises:
        RuntimeError: E experts do not fall into groups of this number.
    """
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    ranked = logits if bias is None else scores + bias
    grouped = (scores if bias is None else ranked).view(len(logits), num_groups, -1)
    most = 1 if group_score == "max" else min(2, grouped.shape[-1])
    best = grouped.topk(most, dim=-1).values.sum(-1).topk(top_groups, dim=-1).indices
    left_out = torch.ones_like(grouped[..., 0]).scatter(1, best, 0.0).bool()
    ranked = ranked.view(grouped.shape).masked_fill(left_out[..., None], -torch.inf).flatten(1)
    ids = ranked.topk(k, dim=-1).indices
    weights = scores.gather(1, ids)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * scale, ids
