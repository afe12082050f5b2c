"""Activations with static scales, and with zero points, in compressed-tensors' own rounding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from test_compressed_tensors import TestIntQuantized, config, words
from torch import Tensor

from headrace_core.errors import ConfigError, WeightsError
from headrace_core.linear import LinearSpec

LIBRARY = Path(__file__).parent / "data" / "compressed-tensors-0.20.0-activations.safetensors"
"""Rows ``x`` and, by case, what compressed-tensors 0.20.0 (``fake_quantize``) makes of them."""
CASES = ("static", "static-zeros", "token-zeros")
SIZE = 64


def layer(case: str, parts: tuple[int, ...] = (SIZE,)):
    """(method, its layer's spec, the module's tensors, rows, what they are to become)."""
    with safe_open(LIBRARY, "pt") as file:
        arguments = json.loads(file.metadata()[case])
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    method = TestIntQuantized().method(config=config("int-quantized", arguments))
    names = tuple(f"m.{index}" for index in range(len(parts))) if len(parts) > 1 else ()
    spec = LinearSpec("m.o", SIZE, parts, "float32", part_names=names)
    scales = [found[f"{case}.{name}"] for name in ("input_scale", "input_zero_point")
              if f"{case}.{name}" in found]  # fmt: skip
    stored = dict(zip(("input_scale", "input_zero_point"), scales, strict=False))
    return method, spec, stored, found["x"], found[f"{case}.meant"]


def identity(spec: LinearSpec) -> dict[str, Tensor]:
    """A weight of which each row is one of the identity's, with scales that are not one."""
    rows = torch.arange(spec.out_features)
    scales = 0.5 ** (rows % 5).float()[:, None]
    codes = torch.zeros(spec.out_features, SIZE, dtype=torch.int8)
    codes[rows, rows % SIZE] = (1 / scales[:, 0]).to(torch.int8)
    return {"weight": codes, "weight_scale": scales}


def arrived(method, spec: LinearSpec, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    given = [(f"m.o.{suffix}", tensor, Path("file")) for suffix, tensor in stored.items()]
    tensors = method.decode(given, "float32", lambda _: False)
    return {name.removeprefix("m.o."): tensor for name, tensor, _ in tensors}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_rows_enter_as_the_library_rounds_them(case: str, dtype: str) -> None:
    """Columns of the product by an identity are the rounded rows."""
    method, spec, stored, x, meant = layer(case)
    own = method.for_layer(spec)
    tensors = arrived(method, spec, {**identity(spec), **stored})
    wanted = {name: one.shape for name, one in own.create(spec).items()}
    assert wanted == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    kind = getattr(torch, dtype)
    exact = x.to(kind).float() == x
    out = own.apply(own.finish(spec, tensors), x.to(kind)).float()
    if dtype == "float32":
        torch.testing.assert_close(out, meant, rtol=1e-4, atol=1e-5 * float(meant.abs().max()))
    else:  # rows that the dtype rounds may enter one step beside
        step = float(stored.get("input_scale", (x.amax(1) - x.amin(1)).max() / 255))
        assert float((out - meant).abs().max()) <= 1.1 * step + 2**-8 * float(meant.abs().max())
        assert exact.any()


@pytest.mark.parametrize("case", CASES)
def test_a_bias_and_a_gate_come_after_the_scale(case: str) -> None:
    method, spec, stored, x, meant = layer(case)
    own = method.for_layer(spec)
    state = own.finish(spec, arrived(method, spec, {**identity(spec), **stored}))
    bias = torch.linspace(-1, 1, SIZE)
    plain = own.apply(state, x)
    torch.testing.assert_close(own.apply(state, x, bias), plain + bias, rtol=1e-6, atol=1e-6)
    gate, up = (plain + bias).chunk(2, -1)
    gated = own.apply_gated(method.ops, state, x, "silu", bias)
    torch.testing.assert_close(
        gated, torch.nn.functional.silu(gate) * up, rtol=1e-5, atol=1e-5 * float(meant.abs().max())
    )


@pytest.mark.parametrize("case", ["static", "static-zeros"])
def test_misread_scales_show(case: str) -> None:
    for name in ("input_scale", "input_zero_point"):
        method, spec, stored, x, meant = layer(case)
        if name == "input_zero_point" and case == "static":
            continue
        stored[name] = stored[name] * 2 if name == "input_scale" else stored[name] + 1
        own = method.for_layer(spec)
        state = own.finish(spec, arrived(method, spec, {**identity(spec), **stored}))
        assert float((own.apply(state, x) - meant).abs().max()) > 0.01


@pytest.mark.parametrize("form", ["int-quantized", "pack-quantized"])
def test_fused_modules_may_have_scales_of_their_own(form: str) -> None:
    """Each is what it is by itself."""
    _, spec, _, x, _ = layer("static-zeros", (32, 16, 16))
    arguments = dict.fromkeys(("symmetric", "dynamic"), False) | {
        "num_bits": 8, "type": "int", "strategy": "tensor",
    }  # fmt: skip
    method = TestIntQuantized().method(config=config(form, arguments, symmetric=False))
    codes = torch.randint(-128, 128, (SIZE, SIZE), generator=torch.Generator().manual_seed(1))
    zeros = torch.arange(SIZE)[:, None] - 30
    scales = torch.linspace(0.01, 0.02, SIZE)[:, None]
    tensors = {"weight": codes.to(torch.int8), "weight_zero_point": zeros.to(torch.int8)}
    if form == "pack-quantized":
        tensors = {
            "weight_packed": words(codes, 8),
            "weight_zero_point": words(zeros.T.contiguous(), 8).T,
        }
    of_parts = torch.tensor([0.05, 0.05, 0.1]), torch.tensor([3, -7, 3], dtype=torch.int8)
    tensors |= {"weight_scale": scales, "input_scale": of_parts[0], "input_zero_point": of_parts[1]}
    own = method.for_layer(spec)
    found = own.apply(own.finish(spec, tensors), x, torch.ones(SIZE))
    begin = 0
    for size, scale, zero in zip(spec.out_parts, *map(Tensor.tolist, of_parts), strict=True):
        rows = slice(begin, begin + size)
        weight = (codes - zeros)[rows] * scales[rows]
        rounded = ((x / scale + zero).clamp(-128, 127).round() - zero) * scale
        expected = rounded.double() @ weight.double().T + 1
        torch.testing.assert_close(
            found[:, rows].double(), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max())
        )
        begin += size


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_is_above_0(scale: float) -> None:
    method, spec, _, _, _ = layer("static")
    tensors = {**identity(spec), "input_scale": torch.tensor([scale])}
    with pytest.raises(WeightsError, match=r"m\.o.*input_scale = .*above 0"):
        method.for_layer(spec).finish(spec, tensors)


@pytest.mark.parametrize(("strategy", "dynamic"), [("token", False), ("tensor", True)])
def test_other_strategies_are_refused(strategy: str, dynamic: bool) -> None:
    block = config("int-quantized", {
        "num_bits": 8, "type": "int", "symmetric": True, "strategy": strategy, "dynamic": dynamic,
    })  # fmt: skip
    with pytest.raises(ConfigError, match=rf"input_activations\.strategy.*{strategy}"):
        TestIntQuantized().method(config=block)
