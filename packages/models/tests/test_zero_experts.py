"""Zero experts, which give nothing to a token that is sent to them: together with others and one by one."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from headrace_core.model import ModelInfo
from headrace_core.ops import KernelNeed, bind_ops
from headrace_models.families.recurrent.zaya import ZeroExperts
from headrace_testing.model.decoders import PlainQuant, build_context

TOKENS, EXPERTS, HIDDEN, INNER = 9, 4, 24, 16
INFO = ModelInfo("some/model", Path(), "A", {}, {}, "float32", 8, 9, ())


class OneByOne(PlainQuant):
    is_plain = False


def outputs(quant: PlainQuant | None, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    context = build_context(INFO) if quant is None else build_context(INFO, quant=quant)
    names = [f"mlp.experts.{index}" for index in range(EXPERTS)]
    layer = ZeroExperts(context, names, HIDDEN, INNER, "silu")
    generator = torch.Generator().manual_seed(1)
    slots = layer.slots()
    layer.load({n: torch.randn(slot.shape, generator=generator) / 4 for n, slot in slots.items()})
    return layer(x, *layer.places(weights, ids))


def test_a_token_of_a_zero_expert_gets_nothing_and_the_others_the_same() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(TOKENS, HIDDEN, generator=generator)
    weights = torch.rand(TOKENS, 1, generator=generator)
    ids = torch.arange(TOKENS)[:, None] % (EXPERTS + 1)
    together = outputs(None, x, weights, ids)
    ops = bind_ops(KernelNeed("cpu", "float32"), choose={"*": "reference"})
    apart = outputs(OneByOne(ops), x, weights, ids)
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)
    skips = ids[:, 0] == EXPERTS
    assert bool((together[skips] == 0).all())
    assert bool((together[~skips] != 0).any(1).all())
