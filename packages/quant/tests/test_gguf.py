"""Blocks of GGUF files: every type against the format's own package, and layers of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from headrace_core.errors import ConfigError, WeightsError
from headrace_core.linear import LinearSpec
from headrace_core.ops import KernelNeed, bind_ops
from headrace_quant.gguf.blocks import KINDS, dequantize
from headrace_quant.gguf.method import BlockWeight, Gguf
from headrace_quant.gguf.packing import floats, packed_weight
from headrace_quant.none import PlainWeight
from headrace_quant.parted import PartedMethod
from headrace_reference.quantized import dequantized
from headrace_testing.model.quant_methods import QuantConformance

gguf = pytest.importorskip("gguf")
np = pytest.importorskip("numpy")

GATE_UP = "model.layers.0.mlp.gate_up_proj"
PARTS = ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj")


def random_rows(name: str, rows: int, blocks: int, seed: int = 0, largest: float = 1e4) -> Tensor:
    """uint8 [rows, bytes of a row], any bytes but those of larger numbers."""
    count, size = rows * blocks, KINDS[name].num_bytes
    raw = np.random.default_rng(seed).integers(0, 256, (8 * count, size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        meant = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    kept = raw[np.isfinite(meant).all(1) & (abs(meant).max(1) < largest)]
    assert len(kept) >= count // 4
    return torch.from_numpy(np.resize(kept, (count, size)).reshape(rows, blocks * size))


def their_floats(name: str, raw: Tensor) -> Tensor:
    """[rows, numbers] float32, by gguf's package."""
    return torch.from_numpy(gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType[name]))


@pytest.mark.parametrize("name", KINDS)
def test_numbers_of_any_bytes_are_those_of_the_formats_own_package(name: str) -> None:
    kind, theirs = KINDS[name], gguf.GGMLQuantizationType[name]
    assert gguf.GGML_QUANT_SIZES[theirs] == (kind.elements, kind.num_bytes)
    blocks = np.random.default_rng(1).integers(0, 256, (300, kind.num_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(blocks, theirs)
    found = dequantize(name, torch.from_numpy(blocks)).numpy()
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", KINDS)
def test_a_packed_weight_is_the_blocks_weight_bit_for_bit(name: str) -> None:
    raw = random_rows(name, rows=37, blocks=3)
    weight = packed_weight(name, raw)
    assert torch.equal(dequantized(weight), their_floats(name, raw))
    low, high = -(1 << weight.bits - 1), (1 << weight.bits - 1) - 1
    assert low <= int(weight.values.min()) <= int(weight.values.max()) <= high
    if weight.block_scales is not None:  # whole numbers, which a kernel may keep as bytes
        assert torch.equal(weight.scales, weight.scales.round().clamp(-128, 127))
        least = weight.minimums
        assert least is None or torch.equal(least, least.round().clamp(0, 255))


def test_slices_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = random_rows("Q4_K", rows=9, blocks=2)
    expected = packed_weight("Q4_K", raw)
    monkeypatch.setattr("headrace_quant.gguf.packing._NUMBERS_AT_ONCE", 1024)
    found = packed_weight("Q4_K", raw)
    for field in ("values", "scales", "minimums", "block_scales", "block_minimums"):
        assert torch.equal(getattr(found, field), getattr(expected, field)), field
    assert torch.equal(floats("Q4_K", raw, torch.float32), dequantized(expected))


def test_nothing_of_the_file_is_kept() -> None:
    for name in KINDS:
        raw = random_rows(name, rows=4, blocks=2)
        weight = packed_weight(name, raw)
        before = dequantized(weight)
        raw.zero_()
        assert torch.equal(dequantized(weight), before), name


@pytest.mark.parametrize("name", KINDS)
def test_scales_that_are_no_numbers_are_refused(name: str) -> None:
    raw = random_rows(name, rows=2, blocks=1)
    raw[1] = 255
    if name == "NVFP4":  # all of its scales are finite
        packed_weight(name, raw)
        return
    with pytest.raises(ValueError, match=f"of its {name} blocks are not finite"):
        packed_weight(name, raw)


class GgufConformance(QuantConformance):
    """A layer whose blocks are any bytes."""

    name = "gguf"
    in_features = 512
    out_parts = (24, 16)
    kind: ClassVar[str]
    ignores = "lm_head"

    def make_tensors(self, spec: LinearSpec, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        seed = int(weight.abs().argmax())
        blocks = spec.in_features // KINDS[self.kind].elements
        raw = random_rows(self.kind, spec.out_features, blocks, seed, largest=20)
        return {"weight": raw}, their_floats(self.kind, raw)


def _config(kind: str) -> dict[str, Any]:
    return {"quant_method": "gguf", "types": {GATE_UP: kind}}


class TestQ40(GgufConformance):
    kind = "Q4_0"
    config: ClassVar = _config("Q4_0")
    refused: ClassVar = {
        "quant_method": "awq",
        "types": ["Q4_0"],
        "types.lm_head": "Q9_9",
        "bits": 4,
    }


class TestQ51(GgufConformance):
    kind = "Q5_1"
    config: ClassVar = _config("Q5_1")


class TestQ2K(GgufConformance):
    kind = "Q2_K"
    config: ClassVar = _config("Q2_K")


class TestQ4K(GgufConformance):
    kind = "Q4_K"
    config: ClassVar = _config("Q4_K")


class TestQ6K(GgufConformance):
    kind = "Q6_K"
    config: ClassVar = _config("Q6_K")


class TestIQ4XS(GgufConformance):
    kind = "IQ4_XS"
    config: ClassVar = _config("IQ4_XS")


class TestIQ1S(GgufConformance):
    kind = "IQ1_S"
    config: ClassVar = _config("IQ1_S")


class TestIQ1M(GgufConformance):
    kind = "IQ1_M"
    config: ClassVar = _config("IQ1_M")


class TestIQ2XS(GgufConformance):
    kind = "IQ2_XS"
    config: ClassVar = _config("IQ2_XS")


class TestIQ3S(GgufConformance):
    kind = "IQ3_S"
    config: ClassVar = _config("IQ3_S")


class TestTQ10(GgufConformance):
    kind = "TQ1_0"
    config: ClassVar = _config("TQ1_0")


def method(types: dict[str, str], **fields: Any) -> Gguf:
    ops = bind_ops(KernelNeed(device="cpu", dtype="float32"), choose={"*": "reference"})
    return Gguf.from_config({"quant_method": "gguf", "types": types, **fields}, ops)


def spec(inputs: int = 512) -> LinearSpec:
    return LinearSpec(GATE_UP, inputs, (24, 16), "float32", part_names=PARTS)


def test_parts_of_different_types_are_kept_apart() -> None:
    types = dict(zip(PARTS, ("Q4_K", "Q6_K"), strict=True))
    layer = method(types).for_layer(spec())
    assert isinstance(layer, PartedMethod)
    shapes = {key: tensor.shape for key, tensor in layer.create(spec()).items()}
    assert shapes == {"weight@0": (24, 288), "weight@1": (16, 420)}
    alike = method(dict.fromkeys(PARTS, "Q4_K")).for_layer(spec())
    assert isinstance(alike, BlockWeight)
    assert alike.create(spec())["weight"].shape == (40, 288)


def test_parts_of_vectors_and_of_codes_are_each_packed() -> None:
    layer = method(dict(zip(PARTS, ("IQ2_S", "Q6_K"), strict=True))).for_layer(spec())
    assert isinstance(layer, PartedMethod)
    assert [type(each) for each in layer.methods] == [BlockWeight, BlockWeight]
    gate, up = random_rows("IQ2_S", 24, 2, largest=20), random_rows("Q6_K", 16, 2, largest=20)
    state = layer.finish(spec(), {"weight@0": gate, "weight@1": up})
    meant = torch.cat([their_floats("IQ2_S", gate), their_floats("Q6_K", up)])
    x = torch.randn(3, 512)
    torch.testing.assert_close(layer.apply(state, x), x @ meant.T)
    blocks = 24 * 2 * KINDS["IQ2_S"].kept_bytes + 16 * 2 * KINDS["Q6_K"].num_bytes
    assert layer.kept_bytes(spec()) == blocks
    codes = method(dict(zip(PARTS, ("Q4_K", "Q6_K"), strict=True))).for_layer(spec())
    assert codes.kept_bytes(spec()) is None


VECTORS = {"IQ1_S": 2, "IQ1_M": 3, "IQ2_XXS": 3, "IQ2_XS": 3, "IQ2_S": 3, "IQ3_XXS": 4, "IQ3_S": 4}
"""Types whose blocks choose vectors -> bits of a code."""


@pytest.mark.parametrize("name", VECTORS)
def test_vectors_use_all_numbers_of_their_tables(name: str) -> None:
    """A table has no more bits than its numbers need, and each number occurs."""
    weight = packed_weight(name, random_rows(name, rows=64, blocks=4))
    assert weight.bits == VECTORS[name]
    if weight.table is None:
        assert name == "IQ1_S"
        assert set((weight.values - weight.zero_points[0, 0]).unique().tolist()) == {0, 1, 2}
        return
    used = weight.table[(weight.values.int() + (1 << weight.bits - 1)).unique().long()]
    assert sorted(set(weight.table.tolist()) - {0.0}) == sorted(used.tolist())
    assert torch.equal(weight.table, -weight.table.flip(0))


def test_a_block_of_vectors_is_written_out() -> None:
    """By the format's text: IQ2_XXS, the first vector of the code book with one sign, scale 5."""
    block = torch.zeros(1, 66, dtype=torch.uint8)
    block[0, :2] = torch.tensor([0.5]).half().view(torch.uint8)
    block[0, 6] = 1  # of the first seven signs; the eighth makes their number even
    block[0, 9] = 5 << 4
    found = dequantize("IQ2_XXS", block)[0, :32]
    scale = 0.5 * (0.5 + 5) / 4
    signs = torch.tensor([-1.0, 1, 1, 1, 1, 1, 1, -1])
    assert torch.equal(found, torch.cat([8 * scale * signs, torch.full((24,), 8 * scale)]))


def test_experts_share_an_entry() -> None:
    types = {
        "model.layers.0.mlp.experts.*.down_proj": "Q4_K",
        "model.layers.0.mlp.down_proj": "Q6_K",
    }
    whole = method(types)
    for name, kind in (("experts.17.down_proj", "Q4_K"), ("down_proj", "Q6_K")):
        layer = whole.for_layer(LinearSpec(f"model.layers.0.mlp.{name}", 256, (8,), "float32"))
        assert isinstance(layer, BlockWeight)
        assert layer.kind == kind
    plain = whole.for_layer(
        LinearSpec("model.layers.0.mlp.experts.1.up_proj", 256, (8,), "float32")
    )
    assert isinstance(plain, PlainWeight)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_no_layer_asked_for_becomes_floats(dtype: str) -> None:
    whole = method({"a.q_proj": "Q5_K", "a.table": "Q4_0", "a.gone": "Q8_0"})
    whole.for_layer(LinearSpec("a.q_proj", 256, (3,), "float32"))
    q, table = random_rows("Q5_K", 3, 1), random_rows("Q4_0", 5, 4)
    bias, gone = torch.randn(3), random_rows("Q8_0", 1, 1)
    given = [("a.q_proj.weight", q), ("a.q_proj.bias", bias), ("a.table.weight", table),
             ("a.gone.weight", gone)]  # fmt: skip
    found = list(
        whole.decode([(*one, Path("f")) for one in given], dtype, lambda name: "gone" in name)
    )
    assert [name for name, _, _ in found] == [name for name, _ in given]
    assert found[0][1] is q
    assert found[1][1] is bias
    assert found[3][1] is gone
    assert torch.equal(found[2][1], their_floats("Q4_0", table).to(getattr(torch, dtype)))


def test_a_tensor_that_is_no_blocks_is_refused() -> None:
    for tensor in (torch.zeros(3, 256), torch.zeros(3, 19, dtype=torch.uint8)):
        given = [("a.table.weight", tensor, Path("f"))]
        found = method({"a.table": "Q4_0"}).decode(given, "float32", lambda _: False)
        with pytest.raises(WeightsError, match=r"f: tensor 'a\.table\.weight' is torch\.\w+ \[3, "):
            list(found)


@pytest.mark.parametrize("kind", ["Q6_K", "IQ1_S", "IQ2_S"])
def test_a_table_is_looked_up_and_multiplied(kind: str) -> None:
    whole = method({"model.embed_tokens": kind})
    table = LinearSpec("model.embed_tokens", 256, (11,), "float32")
    layer = whole.for_table(table)
    assert layer is not None
    raw = random_rows(kind, 11, 1)
    state, meant = layer.finish(table, {"weight": raw}), their_floats(kind, raw)
    ids = torch.tensor([3, 10, 3, 0])
    assert torch.equal(layer.rows(state, ids), meant[ids])
    x = torch.randn(2, 256)
    torch.testing.assert_close(layer.apply(state, x), x @ meant.T)
    assert whole.for_table(LinearSpec("model.other", 256, (11,), "float32")) is None


@pytest.mark.parametrize(("kind", "inputs"), [("Q4_K", 384), ("Q8_0", 48)])
def test_inputs_that_end_within_a_block_are_refused(kind: str, inputs: int) -> None:
    """A rank's share of a row-parallel layer."""
    narrow = LinearSpec("model.layers.0.mlp.down_proj", inputs, (8,), "float32")
    layer = method({narrow.name: kind}).for_layer(narrow)
    words = rf"mlp\.down_proj'.*\[8, {inputs}\].*blocks of {KINDS[kind].elements} \({kind}\).*"
    with pytest.raises(ConfigError, match=words + r"tensor_parallel_size.*--quantization none"):
        layer.create(narrow)


@pytest.mark.parametrize("wanted", ["int8", "int4_g32", "none"])
def test_another_method_takes_the_floats(wanted: str) -> None:
    types = {"model.embed_tokens": "Q4_0", **dict.fromkeys(PARTS, "Q4_0")}
    whole = method(types, requantize=wanted)
    alone = method({}, requantize=wanted).requantize
    assert type(whole.for_layer(spec())) is type(alone.for_layer(spec()))
    assert whole.for_table(LinearSpec("model.embed_tokens", 512, (9,), "float32")) is None
    raw = random_rows("Q4_0", 24, 16)
    (found,) = whole.decode([(f"{PARTS[0]}.weight", raw, Path("f"))], "float32", lambda _: False)
    assert torch.equal(found[1], their_floats("Q4_0", raw))


def test_a_method_of_another_format_is_refused_naming_both() -> None:
    with pytest.raises(ConfigError, match=r"model\.quantization = 'awq'.*'gguf'.*'int8'"):
        method({}, requantize="awq")
    with pytest.raises(ConfigError, match="'gguf' needs a GGUF file"):
        Gguf.from_config(None, bind_ops(KernelNeed(device="cpu", dtype="float32")))


def test_bytes_that_are_counted_are_the_files() -> None:
    layer = method({GATE_UP: "Q4_K"}).for_layer(LinearSpec(GATE_UP, 512, (8,), "float32"))
    assert layer.kept_bytes(spec()) is None
    assert layer.takes_views


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.kept_bytes])
def test_bytes_that_are_counted_are_those_of_the_packed_weight(name: str) -> None:
    """Types that take more memory than their file: codes, a byte for a group's scale or minimum, two for a
    block's."""
    weight = packed_weight(name, random_rows(name, rows=5, blocks=2))
    blocks = 5 * 512 // 256
    wanted = weight.values.numel() * weight.bits // 8
    if weight.block_scales is None:
        wanted += 2 * weight.scales.numel()
    else:
        wanted += weight.scales.numel() + 2 * weight.block_scales.numel()
    if weight.minimums is not None:
        wanted += weight.minimums.numel() + 2 * weight.block_minimums.numel()
    assert wanted == blocks * KINDS[name].kept_bytes > blocks * KINDS[name].num_bytes
    narrow = LinearSpec(GATE_UP, 512, (5,), "float32")
    assert BlockWeight(method({}).ops, name).kept_bytes(narrow) == wanted
