"""What ``headrace quantize`` writes: the method that reads it multiplies by nearly the weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace_core import plugins
from headrace_core.errors import WeightsError
from headrace_core.linear import LinearSpec, QuantMethod
from headrace_core.ops import KernelNeed, bind_ops

ERRORS = {
    "awq": 0.12, "fp8": 0.04, "int4": 0.13, "int4_g32": 0.12, "int8": 0.01, "int8_weight_only": 0.01,
    "q4_0": 0.09, "q4_k": 0.08, "q5_k": 0.04, "q6_k": 0.02, "q8_0": 0.006,
}  # fmt: skip
"""Format -> most relative error of a normal distribution's weights, root mean square."""
BITS = {
    "awq": 4.25, "fp8": 8.1, "int4": 4.25, "int4_g32": 4.6, "int8": 8.1, "int8_weight_only": 8.1,
    "q4_0": 4.5, "q4_k": 4.5, "q5_k": 5.5, "q6_k": 6.5625, "q8_0": 8.5,
}  # fmt: skip
"""Format -> most bits a weight, scales included."""
NAME = "model.layers.0.mlp.up_proj"


def encoder(name: str) -> Any:
    return plugins.load("headrace.weight_encoders", name)()


def read_back(name: str, weight: torch.Tensor, dtype: str = "float32") -> torch.Tensor:
    """The weight [N, K] that the format's own method multiplies by."""
    made = encoder(name)
    tensors = made.encode(weight)
    config = made.config([NAME], ["lm_head"])
    kind: type[QuantMethod] = plugins.load("headrace.quantization", config["quant_method"])
    ops = bind_ops(KernelNeed(device="cpu", dtype=dtype), choose={"*": "reference"})
    method = kind.from_config(config, ops)
    spec = LinearSpec(NAME, weight.shape[1], (weight.shape[0],), dtype)
    layer = method.for_layer(spec)
    wanted = layer.create(spec)
    stored = [(f"{NAME}.{key}", tensor, Path("model")) for key, tensor in tensors.items()]
    decoded = method.decode(stored, dtype, lambda _: False)
    by_suffix = {name.removeprefix(f"{NAME}."): tensor for name, tensor, _ in decoded}
    given = {key: by_suffix[key] for key in wanted if key in by_suffix}
    for key, slot in wanted.items():
        if key in given:
            assert tuple(given[key].shape) == slot.shape, key
            if slot.any_float:
                given[key] = given[key].to(getattr(torch, slot.dtype or dtype))
    state = layer.finish(spec, given)
    return layer.apply(state, torch.eye(weight.shape[1])).T


@pytest.mark.parametrize("name", ERRORS)
def test_a_method_reads_nearly_the_weight(name: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(72, 512) * 0.02
    weight[3] = 0
    weight[5, ::7] *= 3
    found = read_back(name, weight)
    error = float((found - weight).norm() / weight.norm())
    assert error < ERRORS[name]
    assert error > ERRORS[name] / 8, "the bound says nothing"
    assert not found[3].any()


@pytest.mark.parametrize("name", ERRORS)
def test_sizes(name: str) -> None:
    tensors = encoder(name).encode(torch.randn(64, 512).bfloat16())
    bits = 8 * sum(t.nbytes for key, t in tensors.items() if key != "weight_shape") / (64 * 512)
    assert bits <= BITS[name]


@pytest.mark.parametrize("name", ERRORS)
def test_pieces_do_not_matter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(24, 256)
    whole = encoder(name).encode(weight)
    monkeypatch.setattr("headrace_quant.encoders.least_squares._AT_ONCE", 1280)
    for key, tensor in encoder(name).encode(weight).items():
        assert torch.equal(tensor.view(torch.uint8), whole[key].view(torch.uint8)), key


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
def test_numbers_only(name: str, bad: float) -> None:
    weight = torch.randn(8, 256)
    weight[7, 255] = bad
    with pytest.raises(WeightsError, match="infinities or NaN"):
        encoder(name).encode(weight)


@pytest.mark.parametrize(
    "name", ["awq", "int4", "int4_g32", "q4_0", "q4_k", "q5_k", "q6_k", "q8_0"]
)
def test_shapes_that_do_not_fit_stay_in_floats(name: str) -> None:
    assert encoder(name).encode(torch.randn(8, 260)) is None


def test_every_encoder_is_tested() -> None:
    assert set(plugins.installed("headrace.weight_encoders")) == set(ERRORS)


@pytest.mark.parametrize("change", ["nibbles", "scales"])
def test_a_wrong_layout_would_be_seen(change: str) -> None:
    """The bounds above are tight enough for layouts that are nearly right."""
    torch.manual_seed(0)
    weight = torch.randn(64, 512) * torch.logspace(0, 1, 512)
    blocks = encoder("q4_k").encode(weight)["weight"].view(-1, 144).clone()
    if change == "nibbles":
        blocks[:, 16:] = blocks[:, 16:] >> 4 | blocks[:, 16:] << 4
    else:
        blocks[:, 4:16] = blocks[:, 4:16].flip(1)
    from headrace_quant.gguf.packing import floats

    found = floats("Q4_K", blocks.view(64, -1), torch.float32)
    assert float((found - weight).norm() / weight.norm()) > 2 * ERRORS["q4_k"]
