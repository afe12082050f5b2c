"""FP8 checkpoints, against a packer and a reading of scales of the tests' own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from headrace_core.errors import ConfigError, WeightsError
from headrace_core.linear import LinearSpec
from headrace_core.ops import KernelNeed, bind_ops
from headrace_quant.fp8.method import Fp8
from headrace_reference.quantized import dequantized
from headrace_testing.model.quant_methods import QuantConformance

OPS = bind_ops(KernelNeed("cpu", "float32"), choose={"*": "reference"})
E4M3 = torch.float8_e4m3fn
FILE = Path("model.safetensors")
NAME = "model.layers.0.mlp.down_proj.weight"
SCALE = f"{NAME}_scale_inv"
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [8, 16]}


def packed(weight: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """weight [N, K] -> in FP8, the scales of its blocks, and what both mean; element by element."""
    scales = torch.ones(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    for i, j in torch.cartesian_prod(*map(torch.arange, scales.shape)).tolist():
        part = weight[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        scales[i, j] = float(part.abs().max()) / 448 or 1.0
    where = torch.arange(weight.shape[0])[:, None] // rows, torch.arange(weight.shape[1]) // columns
    codes = (weight / scales[where]).to(E4M3)
    return codes, scales, codes.double() * scales[where].double()


def decoded(
    tensors: dict[str, Tensor] | Iterable[tuple[str, Tensor]],
    config: dict[str, Any] = BLOCKS,
    dtype: str = "float32",
    passed_over: tuple[str, ...] = (),
) -> dict[str, Tensor]:
    pairs = tensors.items() if isinstance(tensors, dict) else tensors
    stored = [(name, tensor, Path("model.safetensors")) for name, tensor in pairs]
    found = list(Fp8.from_config(config, OPS).decode(stored, dtype, passed_over.__contains__))
    assert len({name for name, _, _ in found}) == len(found)
    return {name: tensor for name, tensor, _ in found}


def random_weight(rows: int = 20, columns: int = 40) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))


class Fp8Conformance(QuantConformance):
    """A layer whose parts are one module in the checkpoint."""

    name = "fp8"

    def method(self, dtype: str = "float32", config: Any = ...) -> Fp8:
        method = super().method(dtype, config)
        assert isinstance(method, Fp8)
        method.layers.may_be_floats = False  # else layers have tensors that need not come
        return method

    def make_tensors(self, spec: LinearSpec, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        rows, columns = (self.config or {}).get("weight_block_size") or tuple(weight.shape)
        codes, scales, meant = packed(weight, rows, columns)
        if rows == weight.shape[0]:
            scales = scales.reshape(())
        method = self.method()
        method.for_layer(spec)
        names = f"{spec.name}.weight", f"{spec.name}.weight_scale_inv"
        stored = [(names[0], codes, FILE), (names[1], scales, FILE)]
        found = method.decode(stored, spec.dtype, lambda _: False)
        tensors = {name.removeprefix(f"{spec.name}."): tensor for name, tensor, _ in found}
        return tensors, meant.float()


class TestBlocks(Fp8Conformance):
    """No size is a multiple of the blocks'."""

    config: ClassVar = {
        **BLOCKS, "activation_scheme": "dynamic", "scale_fmt": "ue8m0",
        "modules_to_not_convert": ["lm_head"],
    }  # fmt: skip
    ignores = "lm_head"
    refused: ClassVar = {
        "quant_method": "fp9", "fmt": "e5m2", "activation_scheme": "token", "scale_fmt": 1,
        "weight_block_size": [8, 0], "modules_to_not_convert": "lm_head", "ignored_layers": [1],
        "kv_cache_scheme": {"num_bits": 8}, "expert_dtype": "fp4", "dequantize": 1,
        "is_checkpoint_fp8_serialized": False, "modules_to_convert": ["model.embed_tokens"],
    }  # fmt: skip


class TestPackedBlocks(Fp8Conformance):
    """Blocks that stay packed: parts end within one, and so do the inputs."""

    config: ClassVar = {**BLOCKS, "weight_block_size": [16, 64]}
    in_features, out_parts = 96, (24, 20)

    def test_scales_of_other_blocks_show(self) -> None:
        spec = self.spec()
        tensors, meant = self.make_tensors(spec, self.weight(spec))
        assert tensors["weight"].dtype == E4M3
        assert tensors["weight_scale"].shape == (44, 3)
        tensors["weight_scale"] = tensors["weight_scale"].roll(1, 1)
        state = self.method().for_layer(spec).finish(spec, tensors)
        error = (dequantized(state.data[0]) - meant).abs().max()
        assert float(error) > 0.1 * float(meant.abs().max())


class TestPackedBlocksDynamic(TestPackedBlocks):
    fp8_activations = True
    config: ClassVar = {**TestPackedBlocks.config, "activation_scheme": "dynamic"}


class TestOneScale(Fp8Conformance):
    config: ClassVar = {"quant_method": "fp8", "activation_scheme": "static"}
    refused: ClassVar = {"weight_block_size": [128]}


class TestOnline(QuantConformance):
    """Rounded to E4M3 while loading, with a scale for each output."""

    name = "fp8"
    config = None
    ignores = "lm_head"

    def make_tensors(self, spec: LinearSpec, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        weight = weight.bfloat16().float()
        scales = (weight.abs().amax(1, keepdim=True) / 448).clamp(min=1e-38)
        codes = (weight / scales).to(E4M3)
        return {"weight": weight}, codes.float() * scales

    def test_memory(self) -> None:
        layer, spec = self.method().for_layer(self.spec()), self.spec()
        assert layer.kept_bytes(spec) == spec.out_features * (spec.in_features + 4)

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_weights_that_are_no_numbers_are_refused(self, bad: float) -> None:
        spec = self.spec()
        weight = self.weight(spec)
        weight[3, 4] = bad
        with pytest.raises(WeightsError, match="gate_up_proj"):
            self.method().for_layer(spec).finish(spec, {"weight": weight})


NAMES = tuple(f"m.{part}_proj" for part in "qkv")
SPEC = LinearSpec("m.qkv_proj", 64, (16, 8, 8), "float32", part_names=NAMES)


def loaded(method: Fp8, tensors: dict[str, Tensor]) -> Tensor:
    """The real weight of the layer of :data:`SPEC`, of its modules' tensors."""
    layer = method.for_layer(SPEC)
    stored = [(name, tensor, FILE) for name, tensor in tensors.items()]
    parts: dict[str, list[Tensor]] = {}
    for name, tensor, _ in method.decode(stored, "float32", lambda _: False):
        module, _, suffix = name.rpartition(".")
        own = f"{suffix}@{NAMES.index(module)}"
        parts.setdefault(own if own in layer.create(SPEC) else suffix, []).append(tensor)
    arrived = {name: torch.cat(found) for name, found in parts.items()}
    for name, wanted in layer.create(SPEC).items():
        assert not wanted.required or arrived[name].shape == wanted.shape, name
    return layer.apply(layer.finish(SPEC, arrived), torch.eye(64)).T


def modules(*floats: str) -> tuple[dict[str, Tensor], Tensor]:
    """Tensors of query, key and value with a scale each, those that are named in floats."""
    tensors, meant = {}, []
    for name, size in zip(NAMES, SPEC.out_parts, strict=True):
        weight = random_weight(size, 64) * (1 + size)
        if name in floats:
            tensors[f"{name}.weight"] = weight
            meant.append(weight)
        else:
            codes, scales, real = packed(weight, size, 64)
            tensors |= {f"{name}.weight": codes, f"{name}.weight_scale": scales.reshape(())}
            meant.append(real.float())
    return tensors, torch.cat(meant)


ONE_SCALE = {"quant_method": "fp8", "modules_to_not_convert": ["k_proj"]}


@pytest.mark.parametrize("floats", [(), NAMES])
def test_a_layer_in_floats_is_as_it_is(floats: tuple[str, ...]) -> None:
    """Whether or not the config names it."""
    tensors, meant = modules(*floats)
    method = Fp8.from_config({"quant_method": "fp8"}, OPS)
    torch.testing.assert_close(loaded(method, tensors), meant)


def test_parts_in_floats_that_are_named() -> None:
    tensors, meant = modules("m.k_proj")
    torch.testing.assert_close(loaded(Fp8.from_config(ONE_SCALE, OPS), tensors), meant)


def test_parts_in_floats_that_are_not_named() -> None:
    tensors, _ = modules("m.k_proj")
    with pytest.raises(
        WeightsError, match=r"m\.qkv_proj': m\.k_proj in floats.*modules_to_not_convert"
    ):
        loaded(Fp8.from_config({"quant_method": "fp8"}, OPS), tensors)


@pytest.mark.parametrize(
    ("columns", "inputs", "size"), [(128, 256, 128), (128, 192, 64), (64, 96, 32)]
)
def test_groups_of_a_ranks_inputs(columns: int, inputs: int, size: int) -> None:
    config = {**BLOCKS, "weight_block_size": [128, columns]}
    spec = LinearSpec("m.o", inputs, (8,), "float32")
    layer = Fp8.from_config(config, OPS).for_layer(spec)
    assert layer.create(spec)["weight_scale"].shape == (8, inputs // size)
    kept = layer.kept_bytes(spec)
    assert kept is not None
    assert kept <= 1.15 * 8 * inputs


def test_inputs_that_end_within_a_small_group_become_floats() -> None:
    config = {**BLOCKS, "weight_block_size": [128, 128]}
    layer = Fp8.from_config(config, OPS).for_layer(LinearSpec("m.o", 136, (8,), "float32"))
    assert layer.is_plain


def test_experts_in_one_tensor_become_floats() -> None:
    spec = LinearSpec("m.mlp.experts.0.gate_up_proj", 64, (64,), "float32")
    assert Fp8.from_config({"quant_method": "fp8"}, OPS).for_layer(spec).is_plain


def test_null_says_nothing() -> None:
    Fp8.from_config({**BLOCKS, "fmt": None, "kv_cache_scheme": None, "ignored_layers": None}, OPS)


@pytest.mark.parametrize("shape", [(8, 16), (20, 40), (3, 5), (17, 1)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_each_number_is_rounded_once(shape: tuple[int, int], dtype: str) -> None:
    codes, scales, meant = packed(random_weight(*shape), 8, 16)
    out = decoded({NAME: codes, SCALE: scales}, dtype=dtype)[NAME]
    assert torch.equal(out, meant.float().to(getattr(torch, dtype)))


def test_every_code() -> None:
    """The values of E4M3, by their bits."""
    codes = [code for code in range(256) if code & 127 != 127]
    values = [
        (-1.0 if code & 128 else 1.0)
        * (
            (code & 7) / 512
            if not code & 120
            else (1 + (code & 7) / 8) * 2.0 ** ((code >> 3 & 15) - 7)
        )
        for code in codes
    ]
    weight = torch.tensor([codes], dtype=torch.uint8).view(E4M3)
    scales = torch.full((1, 16), 0.5)
    assert decoded({NAME: weight, SCALE: scales})[NAME].tolist() == [[v / 2 for v in values]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e8m0fnu])
def test_scales_of_other_dtypes(dtype: torch.dtype) -> None:
    codes, _, _ = packed(random_weight(), 8, 16)
    scales = torch.tensor([[0.5, 2.0, 0.25], [1.0, 8.0, 0.125], [4.0, 1.0, 2.0]])
    expected = decoded({NAME: codes, SCALE: scales})[NAME]
    assert torch.equal(decoded({NAME: codes, SCALE: scales.to(dtype)})[NAME], expected)


@pytest.mark.parametrize("scale", [2.0**-140, 2.0**-126, 2.0**118])
def test_scales_at_the_ends_of_float32(scale: float) -> None:
    weight = torch.tensor([[1.0, -(2.0**-9), 448.0, 0.0]]).to(E4M3)
    out = decoded({NAME: weight, SCALE: torch.full((1, 1), scale)})[NAME]
    assert torch.equal(out, weight.float() * scale)


def test_nothing() -> None:
    tensors = {NAME: torch.empty(0, 40).to(E4M3), SCALE: torch.empty(0, 3)}
    assert decoded(tensors)[NAME].shape == (0, 40)


def test_stacked_matrices_have_stacked_scales() -> None:
    both = [packed(random_weight() * factor, 8, 16) for factor in (1, 30)]
    codes, scales, meant = (torch.stack(each) for each in zip(*both))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    out = decoded({name: codes, f"{name}_scale_inv": scales})
    assert torch.equal(out[name], meant.float())


@pytest.mark.parametrize("scale", ["weight_scale_inv", "weight_scale", "qscale_weight"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale_by_any_name(scale: str, shape: tuple[int, ...]) -> None:
    weight = random_weight().to(E4M3)
    name = NAME.replace("weight", scale)
    out = decoded({name: torch.full(shape, 3.0), NAME: weight}, {"quant_method": "fp8"})
    assert torch.equal(out[NAME], weight.float() * 3)


def test_order_and_distance_do_not_matter() -> None:
    other = NAME.replace("down", "up")
    codes, scales, _ = packed(random_weight(), 8, 16)
    tensors = {NAME: codes, SCALE: scales, other: codes, f"{other}_scale_inv": scales * 2,
               "model.norm.weight": torch.ones(4)}  # fmt: skip
    there, back = decoded(tensors), decoded(reversed(tensors.items()))
    apart = decoded(sorted(tensors.items(), key=lambda item: item[0].endswith("inv")))
    assert set(there) == {NAME, other, "model.norm.weight"}
    for name, tensor in there.items():
        assert torch.equal(tensor, back[name])
        assert torch.equal(tensor, apart[name])
    assert torch.equal(there[other], there[NAME] * 2)


def test_what_is_no_fp8_weight_stays_as_it_is() -> None:
    tensors = {
        "lm_head.weight": torch.ones(3, 4, dtype=torch.bfloat16),
        "logit_scale": torch.ones(()),
        "weird.weight": torch.ones(2, 2).to(torch.float8_e5m2),
    }
    out = decoded(tensors)
    assert all(out[name] is tensor for name, tensor in tensors.items())


def test_what_the_model_passes_over_is_not_decoded() -> None:
    broken = torch.full((2, 2), 127, dtype=torch.uint8).view(E4M3)
    out = decoded({NAME: broken, SCALE: torch.ones(7)}, passed_over=(NAME, SCALE))
    assert out[NAME] is broken
    assert SCALE in out


@pytest.mark.parametrize("name", ["input_scale", "activation_scale", "qscale_act"])
def test_scales_of_activations(name: str) -> None:
    tensors = {f"model.layers.0.mlp.down_proj.{name}": torch.ones(())}
    assert not decoded(tensors, {"quant_method": "fp8", "activation_scheme": "static"})
    assert decoded(tensors, {"quant_method": "fp8", "activation_scheme": "dynamic"}) == tensors


class TestFaults:
    def refused(
        self, match: str, config: dict[str, Any] = BLOCKS, **changed: Tensor | None
    ) -> None:
        codes, scales, _ = packed(random_weight(), 8, 16)
        own: dict[str, Tensor | None] = {NAME: codes, SCALE: scales}
        own |= {{"weight": NAME, "scale": SCALE}.get(k, k): tensor for k, tensor in changed.items()}
        tensors = {name: tensor for name, tensor in own.items() if tensor is not None}
        with pytest.raises(WeightsError, match=match):
            decoded(tensors, config)

    @pytest.mark.parametrize("code", [127, 255])
    def test_a_weight_that_is_no_number(self, code: int) -> None:
        codes = torch.zeros(20, 40, dtype=torch.uint8)
        codes[19, 39] = code
        self.refused(r"model\.safetensors.*down_proj\.weight' has NaN", weight=codes.view(E4M3))

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -0.5])
    def test_an_impossible_scale(self, bad: float) -> None:
        scales = torch.ones(3, 3)
        scales[2, 1] = bad
        self.refused(r"weight_scale_inv'.*negative, infinite or NaN", scale=scales)

    def test_float16_that_is_too_small(self) -> None:
        tensors = {NAME: torch.full((2, 2), 400.0).to(E4M3), SCALE: torch.full((1, 1), 400.0)}
        with pytest.raises(WeightsError, match="a value that float16 cannot hold"):
            decoded(tensors, dtype="float16")
        assert decoded(tensors, dtype="bfloat16")

    def test_scales_of_another_shape(self) -> None:
        wanted = (
            r"weight_scale_inv' has shape .*\[20, 40\] in blocks of \[8, 16\] must have \[3, 3\]"
        )
        for shape in ((3, 2), (2, 3), (9,), (3, 3, 1), ()):
            self.refused(wanted, scale=torch.ones(shape))

    def test_blocks_without_weight_block_size(self) -> None:
        self.refused(r"must be one number.*names no blocks", {"quant_method": "fp8"})

    def test_scales_of_a_wrong_dtype(self) -> None:
        self.refused("has dtype int8", scale=torch.ones(3, 3, dtype=torch.int8))

    def test_a_weight_without_rows(self) -> None:
        self.refused(r"has shape \[40\]: FP8 in blocks", weight=torch.ones(40).to(E4M3))

    def test_no_scale(self) -> None:
        self.refused(r"tensors 'model.*down_proj\.weight' are in FP8, but their scales", scale=None)

    def test_no_weight(self) -> None:
        complaint = r"tensors '.*weight_scale_inv' are scales, but there is nothing in FP8"
        self.refused(complaint, weight=None)
        self.refused(complaint, weight=torch.ones(20, 40))

    def test_two_scales(self) -> None:
        self.refused(
            "is the same, and comes too",
            weight=None,
            **{NAME: None, NAME.replace("weight", "weight_scale"): torch.ones(3, 3)},
        )

    @pytest.mark.parametrize(
        "entry", ["model.layers.0.mlp", "model.layers.*.mlp.down_proj", "down_proj", NAME[:-7]]
    )
    def test_a_layer_that_was_not_to_be_converted(self, entry: str) -> None:
        self.refused(
            r"down_proj\.weight' is in FP8, but .* was not converted",
            {**BLOCKS, "modules_to_not_convert": ["gate", entry]},
        )

    @pytest.mark.parametrize("entry", ["model.layers.0.mlp.down", "mlp", "layers.0", "gate"])
    def test_entries_that_mean_other_layers(self, entry: str) -> None:
        codes, scales, _ = packed(random_weight(), 8, 16)
        assert decoded({NAME: codes, SCALE: scales}, {**BLOCKS, "ignored_layers": [entry]})

    def test_a_malformed_entry(self) -> None:
        with pytest.raises(ConfigError, match=r"'\(' is not a pattern"):
            Fp8.from_config({**BLOCKS, "ignored_layers": ["("]}, OPS)
