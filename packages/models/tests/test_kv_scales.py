"""Layers hand out what they are about to store, and then use the scales that they get."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import test_families as families
import torch
from test_latent_families import TestDeepseekV3 as DeepseekV3Suite
from torch import Tensor

from headrace_core.attention import AttentionLayerSpec
from headrace_core.model import MeasuresKVScales
from headrace_core.ops import HeadNorm, KernelNeed, OpTable, bind_ops
from headrace_reference.cache import cache_write
from headrace_testing.model.decoders import PagedDriver, build_context

# Windows in a group of their own and head norms; a soft cap; learned positions, and none to rotate.
FAMILIES = [families.TestLlama, families.TestQwen3, families.TestGemma2, families.TestGPT2]
PROMPT = 29


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.__name__[4:])
def family(request: pytest.FixtureRequest, tmp_path_factory: Any) -> tuple[Any, Path]:
    suite = request.param()
    return suite, suite.make_checkpoint(tmp_path_factory.mktemp("model")).path


def load(family: tuple[Any, Path], ops: OpTable, kv_cache_dtype: str) -> Any:
    suite, path = family
    info = suite.resolve(path, max_model_len=suite.max_model_len)
    return suite.load(info, build_context(info, ops=ops, kv_cache_dtype=kv_cache_dtype))


def reference_ops() -> OpTable:
    return bind_ops(KernelNeed(device="cpu", dtype="float32"), choose={"*": "reference"})


def rotated(
    key: Tensor, positions: Tensor, cos_sin: Tensor | None, norm: HeadNorm | None
) -> Tensor:
    """Head norm and rotation from their formulas: key [T, Hk, D]."""
    if norm is not None:
        key = key / (key.square().mean(-1, keepdim=True) + norm.eps).sqrt()
        key = key * (norm.key_weight + norm.offset)
    if cos_sin is None:
        return key
    cos, sin = cos_sin[positions][:, None].chunk(2, -1)
    turning, rest = key.split([2 * cos.shape[-1], key.shape[-1] - 2 * cos.shape[-1]], -1)
    a, b = turning.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def fake_quantized(x: Tensor, scale: Tensor, kind: str) -> Tensor:
    stored = x / scale[:, None]
    if kind == "int8":
        return stored.round().clamp(-127, 127) * scale[:, None]
    return stored.clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale[:, None]


class Measuring:
    """Divides the largest key by ``k``, the largest value by ``v``."""

    def __init__(self, k: float, v: float) -> None:
        self.k, self.v = k, v
        self.order: list[str] = []

    def __call__(self, spec: AttentionLayerSpec, key: Tensor, value: Tensor) -> AttentionLayerSpec:
        self.order.append(spec.name)
        assert key.shape == value.shape == (PROMPT, spec.num_kv_heads, spec.head_dim)
        scales = [
            (x.abs().max() / c).expand(spec.num_kv_heads).clone()
            for x, c in ((key, self.k), (value, self.v))
        ]
        return dataclasses.replace(spec, k_scale=scales[0], v_scale=scales[1])


class Written(NamedTuple):
    """What ``ops.rotary_cache_write`` takes by position."""

    query: Tensor
    key: Tensor
    value: Tensor
    positions: Tensor
    cos_sin: Tensor | None
    key_cache: Tensor
    value_cache: Tensor
    slots: Tensor


def measured(
    model: Any, prompt: list[int], *, k: float = 90, v: float = 100
) -> tuple[list[str], Tensor]:
    """Measure with one prompt: the layers in the order in which they were measured, the logits."""
    driver, measure = PagedDriver(model), Measuring(k, v)
    for layer in driver.layers.values():
        assert isinstance(layer, MeasuresKVScales)
        layer.measure_kv_scales(measure)
    logits = driver.step({"measured": prompt})
    for layer in driver.layers.values():
        layer.measure_kv_scales(None)  # type: ignore[attr-defined]
    return measure.order, logits


def test_scales_are_those_of_the_rotated_keys(family: tuple[Any, Path]) -> None:
    """As an independent computation finds them in every layer, from what enters its cache's op."""
    ops, seen = reference_ops(), []

    def spying(*tensors: Any, head_norm: HeadNorm | None = None, **scales: Any) -> None:
        call = Written(*tensors)
        if call.key_cache.dtype is torch.int8:
            turned = rotated(call.key.clone(), call.positions, call.cos_sin, head_norm)
            seen.append((turned.abs().max(), call.value.abs().max(), scales))
        ops.rotary_cache_write(*call, head_norm=head_norm, **scales)

    model = load(family, dataclasses.replace(ops, rotary_cache_write=spying), "int8")
    names, _ = measured(model, family[0].prompt(PROMPT), k=90, v=100)
    layers = model.attention_layers()
    assert names == list(layers)
    for layer, (largest_key, largest_value, scales) in zip(layers.values(), seen, strict=True):
        spec = layer.spec
        torch.testing.assert_close(spec.k_scale, (largest_key / 90).expand(spec.num_kv_heads))
        torch.testing.assert_close(spec.v_scale, (largest_value / 100).expand(spec.num_kv_heads))
        # ... and the layer has stored with them already.
        assert scales["k_scale"] is spec.k_scale
        assert scales["v_scale"] is spec.v_scale


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_logits_are_those_of_rounded_keys_and_values(family: tuple[Any, Path], kind: str) -> None:
    suite, ops = family[0], reference_ops()
    small = load(family, ops, kind)
    measured(small, suite.prompt(PROMPT))
    by_name = {name: layer.spec for name, layer in small.attention_layers().items()}
    specs = iter(())  # of the layers in the order of a step

    def rounding(*tensors: Any, head_norm: HeadNorm | None = None, **scales: Any) -> None:
        assert scales == {"interleaved": False, "k_scale": None, "v_scale": None}
        call, spec = Written(*tensors), next(specs)
        ops.rotary_cache_write(*call, head_norm=head_norm)
        key = fake_quantized(call.key, spec.k_scale, kind)
        value = fake_quantized(call.value, spec.v_scale, kind)
        cache_write(key, value, call.key_cache, call.value_cache, call.slots)

    wide = load(family, dataclasses.replace(ops, rotary_cache_write=rounding), "auto")
    drivers = PagedDriver(small), PagedDriver(wide)
    steps = (
        {"a": suite.prompt(11, 3), "b": suite.prompt(20, 4)},
        {"a": suite.prompt(9, 5)},
        {"b": [7]},
    )
    for chunks in steps:
        specs = iter(by_name.values())
        torch.testing.assert_close(
            drivers[0].step(chunks), drivers[1].step(chunks), atol=2e-4, rtol=2e-4
        )
    plain = PagedDriver(load(family, ops, "auto")).step(steps[0])
    assert (plain - PagedDriver(small).step(steps[0])).abs().max() > 1e-3, "rounding must matter"


def test_the_measuring_pass_computes_what_service_does(family: tuple[Any, Path]) -> None:
    prompt = family[0].prompt(PROMPT)
    model = load(family, reference_ops(), "int8")
    _, logits = measured(model, prompt)
    assert torch.equal(logits, PagedDriver(model).step({"a": prompt}))


def test_measuring_ends(family: tuple[Any, Path]) -> None:
    """A later prompt, however large its keys are, leaves the scales as they are."""
    model = load(family, reference_ops(), "int8")
    measured(model, family[0].prompt(PROMPT))
    before = [layer.spec for layer in model.attention_layers().values()]
    PagedDriver(model).step({"a": family[0].prompt(PROMPT, 9)})
    after = [layer.spec for layer in model.attention_layers().values()]
    assert [spec.k_scale for spec in before if spec.k_scale is not None], "nothing was measured"
    assert [id(spec) for spec in after] == [id(spec) for spec in before]


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_latents_in_one_byte(tmp_path: Path, kind: str) -> None:
    """One scale for a vector; what is near the logits of an unrounded cache is the same in one step and
    in several."""
    suite = DeepseekV3Suite()
    suite.make_checkpoint(tmp_path)
    ops, prompt = reference_ops(), suite.prompt(PROMPT)
    small = load((suite, tmp_path), ops, kind)
    names, together = measured(small, prompt)
    layers = small.attention_layers()
    assert names == list(layers)
    for layer in layers.values():
        assert layer.kv_spec.page_bytes == 8 * layer.spec.head_dim
        assert layer.spec.k_scale.shape == (1,)
    driver = PagedDriver(small)
    pieces = [driver.step({"a": prompt[:11]}), driver.step({"a": prompt[11:]})]
    torch.testing.assert_close(torch.cat(pieces), together, atol=1e-4, rtol=0)
    plain = PagedDriver(load((suite, tmp_path), ops, "auto")).step({"a": prompt})
    assert not torch.equal(together, plain)
    similar = torch.cosine_similarity(together.log_softmax(-1), plain.log_softmax(-1), dim=-1)
    assert float(similar.min()) > 0.98
