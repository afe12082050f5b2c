"""One attention layer with each of its arguments, against its definition in plain torch."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace_core.batch import ForwardBatch
from headrace_core.errors import UnsupportedModel
from headrace_core.kv import ChunkedLocalSpec
from headrace_core.model import BuildContext, ModelInfo
from headrace_core.parallel import Communicator
from headrace_core.pooling import PoolingInfo
from headrace_models.layers.attention.heads_norm import HeadLayerNorm, WholeLayerNorm, WholeRMSNorm
from headrace_models.layers.attention.selection import self_attention
from headrace_models.layers.attention.self_attention import Attention
from headrace_models.layers.base import Slot, WeightLayer
from headrace_models.layers.norm import LayerNorm
from headrace_testing.model.decoders import PagedDriver, build_context, run_ranks

HIDDEN, HEADS, KV_HEADS, DIM, EPS, LENGTH = 20, 4, 2, 6, 1e-5, 40
TOKENS = list(range(3, 3 + LENGTH))
SIZES = {
    "hidden_size": HIDDEN, "num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM,
}  # fmt: skip


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def table() -> Tensor:
    """Four of six dimensions turn."""
    angles = torch.arange(64.0)[:, None] * torch.tensor([1.0, 0.13])
    return torch.cat((angles.cos(), angles.sin()), dim=1)


WEIGHTS = {
    "q": noise(HEADS * DIM, HIDDEN, seed=1), "k": noise(KV_HEADS * DIM, HIDDEN, seed=2),
    "v": noise(KV_HEADS * DIM, HIDDEN, seed=3), "out": noise(HIDDEN, HEADS * DIM, seed=4) * 0.2,
    "sinks": noise(HEADS, seed=5) * 2,
}  # fmt: skip
EMBEDDING = noise(64, HIDDEN, seed=6) * 0.5
NORM = {name: 1 + noise(n * DIM, seed=7) for name, n in (("q", HEADS), ("k", KV_HEADS))}


class OneLayer:
    """A model that is attention layers one after the other, and nothing else."""

    weight_rules = ()

    def __init__(self, *layers: Attention) -> None:
        self.layers = layers

    def attention_layers(self) -> Mapping[str, Any]:
        return {layer.spec.name: layer for layer in self.layers}

    def forward(self, batch: ForwardBatch) -> Tensor:
        x = EMBEDDING[batch.input_ids]
        for layer in self.layers:
            x = layer(x, batch)
        return x

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return hidden


def context(communicator: Communicator | None = None) -> BuildContext:
    info = ModelInfo("", Path(), "", {}, {}, "float32", 64, 64, ())
    return build_context(info, communicator=communicator)


def cut(slot: Slot, wholes: list[Tensor]) -> Tensor:
    """This rank's piece of a fused tensor."""
    parts = slot.parts
    pieces = [w.chunk(p.shard.count)[p.shard.index] for w, p in zip(wholes, parts)] or wholes
    shard = slot.in_shard
    return torch.cat(pieces).chunk(shard.count, dim=-1)[shard.index].contiguous()


def fill(layer: WeightLayer | None, **tensors: list[Tensor]) -> None:
    assert layer is not None
    slots = layer.slots()
    layer.load({name: cut(slots[name], wholes) for name, wholes in tensors.items()})


def make(context: BuildContext, name: str = "attn", **options: Any) -> Attention:
    layer = Attention(context, name, **{"rotary": table(), **SIZES, **options})
    fill(layer.qkv, weight=[WEIGHTS[p] for p in ("q", "k", "v")[: 3 if layer.makes_keys else 1]])
    fill(layer.out, weight=[WEIGHTS["out"]])
    if layer.sinks is not None:
        fill(layer.sinks, weight=[WEIGHTS["sinks"]])
    for norm, weight in ((layer.query_norm, NORM["q"]), (layer.key_norm, NORM["k"])):
        if norm is not None:
            shape = torch.Size(norm.slots()["weight"].source_shape(0))
            fill(norm, weight=[weight[: shape.numel()].view(shape)])
    return layer


def turn(x: Tensor, interleaved: bool) -> Tensor:
    """[L, H, D], by complex numbers."""
    cos, sin = table()[: x.shape[0], None].chunk(2, dim=-1)
    a, b = (x[..., 0:4:2], x[..., 1:4:2]) if interleaved else (x[..., :2], x[..., 2:4])
    turned = torch.complex(a, b) * torch.complex(cos, sin)
    pair = (turned.real, turned.imag)
    joined = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((joined, x[..., 4:]), dim=-1)


def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """All of a sequence: [L, H, D], [L, Hk, D] twice -> [L, H * D]."""
    key, value = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * options.get("scale", DIM**-0.5)
    at = torch.arange(query.shape[0])
    if "alibi_slopes" in options:
        scores = scores + options["alibi_slopes"][:, None, None] * (at - at[:, None])
    seen = at <= at[:, None]
    if chunk := options.get("attention_chunk_size"):
        seen = seen & (at // chunk == at[:, None] // chunk)
    scores = scores.masked_fill(~seen, -torch.inf)
    if options.get("sinks"):
        column = WEIGHTS["sinks"][:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, value).flatten(1)


def rms(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def standard(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + EPS).sqrt()


def whole(x: Tensor, name: str) -> Tensor:
    return (rms(x.flatten(1)) * NORM[name]).view(x.shape)


def whole_standard(x: Tensor, name: str) -> Tensor:
    return (standard(x.flatten(1)) * NORM[name]).view(x.shape)


def own(x: Tensor, name: str) -> Tensor:
    return standard(x) * NORM[name].view(-1, DIM)


def shared(x: Tensor, name: str) -> Tensor:
    return standard(x) * NORM[name][:DIM]


def per_head(x: Tensor, name: str) -> Tensor:
    return rms(x) * NORM[name][:DIM]


def norm_of(kind: str, context: BuildContext) -> dict[str, Any]:
    """Arguments that make norms of a kind."""
    sides = (("query_norm", "q_norm", HEADS), ("key_norm", "k_norm", KV_HEADS))
    makers: dict[str, Any] = {
        "whole": lambda name, heads: WholeRMSNorm(context, name, heads, DIM, EPS),
        "whole_standard": lambda name, heads: WholeLayerNorm(
            context, name, heads, DIM, EPS, bias=False
        ),
        "own": lambda name, heads: HeadLayerNorm(context, name, heads, DIM, EPS),
        "shared": lambda name, heads: LayerNorm(context, name, DIM, EPS, bias=False),
    }
    if kind == "per_head":
        return {"head_norm_eps": EPS}
    return {argument: makers[kind](name, heads) for argument, name, heads in sides}


NORMS = {norm.__name__: norm for norm in (whole, whole_standard, own, shared, per_head)}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "interleaved": {"interleaved": True},
    "scale": {"scale": 0.1},
    "clip": {"clip": 0.7},
    "alibi": {"rotary": None, "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.06])},
    "chunks": {"attention_chunk_size": 11},
    "sinks": {"sinks": True},
    "temperature": {"query_temperature": 1 + 0.02 * torch.arange(64.0)},
    **{kind: {"norm": kind} for kind in NORMS},
    **{f"{kind}, after": {"norm": kind, "norm_after_rotary": True} for kind in NORMS},
}  # fmt: skip


def expected(x: Tensor, **options: Any) -> Tensor:
    """The layer by its definition: [L, hidden] -> the same shape."""
    query, key, value = ((x @ WEIGHTS[n].T).view(x.shape[0], -1, DIM) for n in ("q", "k", "v"))
    if "clip" in options:
        query, key, value = (
            y.clamp(-options["clip"], options["clip"]) for y in (query, key, value)
        )
    norm = NORMS.get(options.get("norm", ""), lambda x, name: x)
    after = options.get("norm_after_rotary", False)
    if not after:
        query, key = norm(query, "q"), norm(key, "k")
    if options.get("rotary", True) is not None:
        query, key = (turn(y, options.get("interleaved", False)) for y in (query, key))
    if after:
        query, key = norm(query, "q"), norm(key, "k")
    if "query_temperature" in options:
        query = query * options["query_temperature"][: x.shape[0], None, None]
    return attend(query, key, value, **options) @ WEIGHTS["out"].T


def build(options: Mapping[str, Any], communicator: Communicator | None = None) -> OneLayer:
    made = context(communicator)
    given = {name: value for name, value in options.items() if name != "norm"}
    norms = norm_of(options["norm"], made) if "norm" in options else {}
    return OneLayer(make(made, **given, **norms))


@pytest.mark.parametrize("case", CASES)
def test_the_layer_is_its_definition(case: str) -> None:
    driver = PagedDriver(build(CASES[case]))
    pieces = [driver.step({"a": TOKENS[a:b]}) for a, b in ((0, 17), (17, 18), (18, LENGTH))]
    want = expected(EMBEDDING[TOKENS], **CASES[case])
    torch.testing.assert_close(torch.cat(pieces), want, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("case", ["alibi", "sinks", "whole", "whole_standard", "own"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_several_ranks(case: str, ranks: int) -> None:
    """With four, two ranks have the same key-value head."""

    def work(communicator: Communicator) -> Tensor:
        return PagedDriver(build(CASES[case], communicator)).step({"a": TOKENS})

    want = expected(EMBEDDING[TOKENS], **CASES[case])
    for out in run_ranks(ranks, work):
        torch.testing.assert_close(out, want, atol=2e-5, rtol=1e-5)


def test_ranks_do_not_share_a_head() -> None:
    """Its output would be added once for each of them."""

    def work(communicator: Communicator) -> None:
        Attention(context(communicator), "attn", rotary=None, **SIZES)

    with pytest.raises(
        UnsupportedModel, match="heads = 4 must be divisible by tensor_parallel_size = 8"
    ):
        run_ranks(8, work)


def test_chunks_are_a_kind_of_cache() -> None:
    (layer,) = build(CASES["chunks"]).layers
    assert isinstance(layer.kv_spec, ChunkedLocalSpec)
    assert layer.kv_spec.attention_chunk_size == 11


@pytest.mark.parametrize("norm", [{}, {"norm": "per_head"}], ids=str)
def test_a_layer_reads_another_ones_cache(norm: dict[str, Any]) -> None:
    made = context()
    norms = norm_of(norm["norm"], made) if norm else {}
    first = make(made, "first", **norms)
    second = make(made, "second", kv_sharing_target="first", **norms)
    assert second.kv_spec is None
    assert [part.size for part in second.qkv.parts] == [HEADS * DIM]
    driver = PagedDriver(OneLayer(first, second))
    out = torch.cat([driver.step({"a": TOKENS[:17]}), driver.step({"a": TOKENS[17:]})])

    normed = NORMS[norm["norm"]] if norm else lambda x, name: x
    x = EMBEDDING[TOKENS]
    key = turn(normed((x @ WEIGHTS["k"].T).view(LENGTH, -1, DIM), "k"), False)
    value = (x @ WEIGHTS["v"].T).view(LENGTH, -1, DIM)
    for _ in range(2):
        query = turn(normed((x @ WEIGHTS["q"].T).view(LENGTH, -1, DIM), "q"), False)
        x = attend(query, key, value) @ WEIGHTS["out"].T
    torch.testing.assert_close(out, x, atol=2e-5, rtol=1e-5)


def test_pooling_in_both_directions_has_none_of_it() -> None:
    info = PoolingInfo(tasks=("embed",), pooling_type="mean", causal=False)
    made = dataclasses.replace(context(), pooling=info)
    with pytest.raises(UnsupportedModel, match="has alibi_slopes, sinks"):
        self_attention(
            made, "layers.0", rotary=None, sinks=True, alibi_slopes=torch.ones(HEADS), **SIZES
        )
    self_attention(made, "layers.0", rotary=None, sinks=False, **SIZES)
    asked = inspect.signature(Attention.__init__).parameters.values()
    own = {p.name for p in asked if p.kind is p.KEYWORD_ONLY} - SIZES.keys()
    for name in own:
        self_attention(made, "layers.0", rotary=None, **{name: None}, **SIZES)
