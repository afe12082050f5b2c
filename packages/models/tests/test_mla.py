"""The layer of latent attention: absorbed and expanded are the same function, and the definition's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace_core.batch import ForwardBatch
from headrace_core.errors import UnsupportedModel
from headrace_core.kv import MLASpec
from headrace_core.linear import LinearSpec, TensorSpec
from headrace_core.model import BuildContext, ModelInfo
from headrace_models.layers.attention import mla
from headrace_models.layers.attention.mla import MLAAttention, MLASizes
from headrace_testing.model.decoders import (
    PagedDriver,
    PlainQuant,
    ReferenceMLABackend,
    build_context,
)

HIDDEN, HEADS, RANK, NOPE, ROPE, VALUE = 20, 3, 12, 7, 4, 5
SIZES = MLASizes(HIDDEN, HEADS, None, RANK, NOPE, ROPE, VALUE)
LENGTH = 40
TOKENS = list(range(3, 3 + LENGTH))


def noise(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5


EMBEDDING = noise(64, HIDDEN, seed=1) * 8
DOWN = noise(HEADS * (NOPE + ROPE) + RANK + ROPE, HIDDEN, seed=2)
BOTH = noise(HEADS * (NOPE + VALUE), RANK, seed=3)
OUT = noise(HIDDEN, HEADS * VALUE, seed=4)
NORM = 1 + noise(1, RANK, seed=5)[0]


class OneLayer:
    """A model that is one layer of latent attention."""

    weight_rules = ()

    def __init__(self, layer: MLAAttention, dtype: str) -> None:
        self.layer, self.embedding = layer, EMBEDDING.to(getattr(torch, dtype))

    def attention_layers(self) -> Mapping[str, Any]:
        return {"attn": self.layer}

    def forward(self, batch: ForwardBatch) -> Tensor:
        return self.layer(self.embedding[batch.input_ids], batch)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return hidden


class Wide(PagedDriver):
    """Results in their own dtype."""

    def run(self, chunks: Mapping[str, list[int]]) -> Tensor:
        return self.model.forward(self.batch(chunks))


def context(dtype: str) -> BuildContext:
    info = ModelInfo("", Path(), "", {}, {}, "float32", 64, 64, ())
    made = build_context(info)
    return dataclasses.replace(
        made, dtype=dtype, attention=lambda need: ReferenceMLABackend(made.ops)
    )


def table() -> Tensor:
    angles = torch.arange(64.0)[:, None] * torch.tensor([1.0, 0.13])
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def driver(dtype: str, **options: Any) -> Wide:
    layer = MLAAttention(context(dtype), "attn", SIZES, rotary=table(), **options)
    weights = {"direct": DOWN, "latent_norm": NORM, "heads": BOTH, "out": OUT}
    for name, weight in weights.items():
        getattr(layer, name).load({"weight": weight.to(getattr(torch, dtype))})
    return Wide(OneLayer(layer, dtype))  # type: ignore[arg-type]


def expected() -> Tensor:
    """By the definition, in float64: keys and values of every head."""
    x = EMBEDDING[TOKENS]
    query, latent, rope_key = (x @ DOWN.T).split([HEADS * (NOPE + ROPE), RANK, ROPE], dim=1)
    latent = latent / (latent.square().mean(-1, keepdim=True) + 1e-6).sqrt() * NORM
    key, value = (latent @ BOTH.T).view(LENGTH, HEADS, -1).split([NOPE, VALUE], dim=-1)
    nope, rope = query.view(LENGTH, HEADS, -1).split([NOPE, ROPE], dim=-1)
    scores = torch.einsum("qhd,khd->hqk", nope, key)
    scores = scores + torch.einsum("qhd,kd->hqk", turn(rope), turn(rope_key[:, None])[:, 0])
    scores = scores * (NOPE + ROPE) ** -0.5
    future = torch.ones(LENGTH, LENGTH).triu(1).bool()
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value).flatten(1) @ OUT.T


def turn(x: Tensor) -> Tensor:
    """Neighbours are pairs."""
    cos, sin = table()[:LENGTH, None].double().chunk(2, dim=-1)
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.complex(cos, sin)
    return torch.view_as_real(turned).flatten(-2)


TOLERANCES = {"float64": 1e-10, "float32": 1e-4}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("expands", [False, True])
def test_both_forms_are_the_definition(
    dtype: str, expands: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mla, "EXPAND_FROM", 5)
    whole = driver(dtype, expands=expands)
    out = whole.run({"a": TOKENS, "b": TOKENS[:9]})
    want, tolerance = expected(), TOLERANCES[dtype]
    torch.testing.assert_close(out[:LENGTH].double(), want, atol=tolerance, rtol=0)
    torch.testing.assert_close(out[LENGTH:].double(), want[:9], atol=tolerance, rtol=0)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_after_an_expanded_prompt_it_goes_on_absorbed(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mla, "EXPAND_FROM", 5)
    steps = driver(dtype, expands=True)
    called: list[int] = []
    layer = steps.model.layer  # type: ignore[attr-defined]
    plain = layer.expanded
    layer.expanded = lambda *args: called.append(len(args[0])) or plain(*args)
    out = torch.cat([steps.run({"a": TOKENS[a:b]}) for a, b in ((0, 17), (17, 39), (39, 40))])
    assert called == [17]
    torch.testing.assert_close(out.double(), expected(), atol=TOLERANCES[dtype], rtol=0)


def test_where_bits_must_not_depend_on_chunks_nothing_is_expanded() -> None:
    made = context("float32")
    ops = made.ops
    for invariant in (False, True):
        own = dataclasses.replace(made, ops=dataclasses.replace(ops, row_invariant=invariant))
        assert MLAAttention(own, "attn", SIZES, rotary=table()).expands is not invariant


def test_the_cache_is_one_vector_a_token() -> None:
    layer = driver("float32").model.layer  # type: ignore[attr-defined]
    assert layer.kv_spec == MLASpec(8, 1, RANK + ROPE, "float32")
    assert layer.kv_spec.page_bytes == 8 * (RANK + ROPE) * 4


def test_quantized_projections_of_heads_are_refused() -> None:
    class Integers(PlainQuant):
        is_plain = False

        def create(self, spec: LinearSpec) -> Mapping[str, TensorSpec]:
            return {"qweight": TensorSpec((spec.out_features, spec.in_features), "int8", in_dim=1)}

    made = context("float32")
    with pytest.raises(UnsupportedModel, match="kv_b_proj is quantized"):
        MLAAttention(
            dataclasses.replace(made, quant=Integers(made.ops)), "attn", SIZES, rotary=None
        )
