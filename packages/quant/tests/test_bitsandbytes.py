"""NF4, FP4 and LLM.int8, against bitsandbytes' own files and a packer of the tests' own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from headrace_core import plugins
from headrace_core.errors import ConfigError, WeightsError
from headrace_core.linear import LinearSpec, QuantMethod
from headrace_core.ops import KernelNeed, bind_ops
from headrace_quant.bitsandbytes import BitsAndBytes
from headrace_quant.code_books import FP4, NF4
from headrace_reference.quantized import dequantized
from headrace_testing.model.quant_methods import QuantConformance

OPS = bind_ops(KernelNeed("cpu", "float32"), choose={"*": "reference"})
LIBRARY = load_file(Path(__file__).parent / "data" / "bitsandbytes-0.50.2.safetensors")
"""Weights that bitsandbytes 0.50.2 packed, by case: its tensors, ``meant`` by its own dequantization (the
generic one: that for CPUs misreads blocks that straddle rows), and ``floats`` that it rounded."""
CASES = sorted({name.rpartition(".meant")[0] for name in LIBRARY if name.endswith(".meant")})
BOOKS = {"nf4": NF4, "fp4": FP4}
FILE = Path("model.safetensors")


def config(kind: str = "nf4", **fields: Any) -> dict[str, Any]:
    """As transformers writes it."""
    bits = {"load_in_4bit": kind != "int8", "load_in_8bit": kind == "int8"}
    return {
        "quant_method": "bitsandbytes", "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8", "bnb_4bit_quant_type": "nf4" if kind == "int8" else kind,
        "bnb_4bit_use_double_quant": False, "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False, "llm_int8_skip_modules": None, "llm_int8_threshold": 6.0,
        **bits, **{f"_{key}": value for key, value in bits.items()}, **fields,
    }  # fmt: skip


def packed(
    weight: Tensor, kind: str, block: int = 64, *, nested: int | None = None
) -> tuple[dict[str, Tensor], Tensor]:
    """weight [N, K] -> a module's tensors, and what they mean; code by code.

    Args:
        nested: blocks that share a scale of their scales: double quantization.
    """
    book, flat = torch.tensor(BOOKS[kind]), weight.flatten()
    largest = torch.stack([part.abs().max() for part in flat.split(block)])
    state: dict[str, Any] = {
        "quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": list(weight.shape),
    }  # fmt: skip
    tensors = {"weight.absmax": largest, "weight.quant_map": book}
    if nested is not None:
        levels = torch.arange(-128, 128) / 128
        offset = float(largest.mean())
        outer = torch.stack([(part - offset).abs().max() for part in largest.split(nested)])
        where = torch.arange(len(largest)) // nested
        steps = ((largest - offset) / outer[where])[:, None] - levels
        chosen = steps.abs().argmin(1)
        tensors = {
            **tensors, "weight.absmax": chosen.to(torch.uint8), "weight.nested_absmax": outer,
            "weight.nested_quant_map": levels,
        }  # fmt: skip
        state |= {"nested_blocksize": nested, "nested_dtype": "float32", "nested_offset": offset}
        largest = levels[chosen] * outer[where] + offset
    scale = largest[torch.arange(len(flat)) // block]
    codes = (flat[:, None] - book * scale[:, None]).abs().argmin(1)
    octets = torch.tensor([16 * int(a) + int(b) for a, b in codes.view(-1, 2)], dtype=torch.uint8)
    text = json.dumps(state).encode()
    tensors |= {
        "weight": octets[:, None],
        f"weight.quant_state.bitsandbytes__{kind}": torch.tensor(list(text), dtype=torch.uint8),
    }
    return tensors, (book[codes] * scale).view(weight.shape)


def decoded(
    tensors: Mapping[str, Tensor], method: QuantMethod, module: str = "m.q"
) -> dict[str, Tensor]:
    stored = [(f"{module}.{suffix}", tensor, FILE) for suffix, tensor in tensors.items()]
    found = method.decode(stored, "float32", lambda _: False)
    return {name.removeprefix(f"{module}."): tensor for name, tensor, _ in found}


def real(method: QuantMethod, tensors: dict[str, Tensor], shape: torch.Size) -> Tensor:
    """The weight that a layer of one module multiplies with."""
    spec = LinearSpec("m.q", shape[1], (shape[0],), "float32")
    layer = method.for_layer(spec)
    tensors = decoded(tensors, method)
    wanted = {name: one.shape for name, one in layer.create(spec).items()}
    assert wanted == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return dequantized(layer.finish(spec, tensors).data[0])


class BlockConformance(QuantConformance):
    name = "bitsandbytes"
    kind: ClassVar[str] = "nf4"
    nested: ClassVar[int | None] = None
    in_features = 96
    config: ClassVar = config()
    ignores = "lm_head"
    refused: ClassVar = {
        "quant_method": "bitsandbytez", "bnb_4bit_quant_type": "nf5", "load_in_8bit": True,
        "llm_int8_has_fp16_weight": True, "llm_int8_skip_modules": "lm_head", "bits": 4,
    }  # fmt: skip

    def make_tensors(self, spec: LinearSpec, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        tensors, meant = packed(weight, self.kind, nested=self.nested)
        return decoded(tensors, self.method()), meant


class TestNF4(BlockConformance):
    """Blocks straddle rows."""


class TestFP4Twice(BlockConformance):
    kind, nested = "fp4", 8
    in_features = 128
    config: ClassVar = config("fp4", bnb_4bit_use_double_quant=True)


class TestInt8(QuantConformance):
    name = "bitsandbytes"
    config: ClassVar = config("int8", llm_int8_skip_modules=["lm_head", "o_proj"])
    ignores = "model.layers.3.self_attn.o_proj"
    refused: ClassVar = {"load_in_4bit": True}

    def make_tensors(self, spec: LinearSpec, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        largest = weight.abs().amax(1)
        codes = (weight * 127 / largest.clamp(min=1e-9)[:, None]).round().to(torch.int8)
        tensors = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0).byte()}
        return decoded(tensors, self.method()), codes * largest[:, None] / 127


@pytest.mark.parametrize("case", CASES)
def test_the_librarys_files(case: str) -> None:
    kind = case.partition(".")[0]
    tensors = {
        name.removeprefix(f"{case}."): tensor
        for name, tensor in LIBRARY.items()
        if name.startswith(f"{case}.") and not name.endswith((".meant", ".floats"))
    }
    meant = LIBRARY[f"{case}.meant"]
    found = real(BitsAndBytes.from_config(config(kind), OPS), tensors, meant.shape)
    torch.testing.assert_close(found, meant, rtol=2e-7, atol=0)
    if kind == "int8":
        return
    octets = tensors["weight"]
    tensors["weight"] = (octets >> 4) | (octets << 4)  # the halves of each byte swapped
    other = real(BitsAndBytes.from_config(config(kind), OPS), tensors, meant.shape)
    assert float((other - meant).abs().max()) > 0.1


@pytest.mark.parametrize("case", [case for case in CASES if f"{case}.floats" in LIBRARY])
def test_floats_are_rounded_as_by_the_library(case: str) -> None:
    """Where its blocks end with the rows; elsewhere within half of the widest gap of the code book."""
    floats, meant = LIBRARY[f"{case}.floats"], LIBRARY[f"{case}.meant"]
    method: type[QuantMethod] = plugins.load("headrace.quantization", case.partition(".")[0])
    spec = LinearSpec("m.q", floats.shape[1], (floats.shape[0],), "float32")
    layer = method.from_config(None, OPS).for_layer(spec)
    assert layer.kept_bytes(spec) == floats.numel() // 2 + 8 * floats.shape[0]
    found = dequantized(layer.finish(spec, {"weight": floats}).data[0])
    if floats.shape[1] % 64 == 0:
        torch.testing.assert_close(found, meant, rtol=2e-7, atol=0)
    bound = 0.17 * floats.abs().amax(1, keepdim=True)
    assert bool(((found - floats).abs() <= bound).all())


class OnlineConformance(QuantConformance):
    config = None
    in_features = 72
    ignores = "lm_head"
    book: ClassVar[tuple[float, ...]]

    def make_tensors(self, spec: LinearSpec, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        generator = torch.Generator().manual_seed(3)
        codes = torch.randint(0, 16, weight.shape, generator=generator)
        codes[:, ::64] = self.book.index(1.0)
        weight = torch.tensor(self.book)[codes].bfloat16().float()
        weight *= torch.exp2(torch.arange(len(weight)) % 5 - 4.0)[:, None]
        spec = LinearSpec("m", weight.shape[1], (len(weight),), "float32")
        method: type[QuantMethod] = plugins.load("headrace.quantization", self.name)
        layer = method.from_config(None, OPS).for_layer(spec)
        meant = dequantized(layer.finish(spec, {"weight": weight}).data[0])
        assert float((meant - weight).abs().max()) < 0.004  # bfloat16's share of the code book
        return {"weight": weight}, meant

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_weights_that_are_no_numbers_are_refused(self, bad: float) -> None:
        spec = self.spec()
        weight = self.weight(spec)
        weight[3, 4] = bad
        with pytest.raises(WeightsError, match="gate_up_proj"):
            self.method().for_layer(spec).finish(spec, {"weight": weight})


class TestOnlineNF4(OnlineConformance):
    name, book = "nf4", NF4


class TestOnlineBitsAndBytes(OnlineConformance):
    name, book = "bitsandbytes", NF4


class TestOnlineFP4(OnlineConformance):
    name, book = "fp4", FP4


def test_online_names_read_no_codes() -> None:
    for name in ("nf4", "fp4"):
        method: type[QuantMethod] = plugins.load("headrace.quantization", name)
        with pytest.raises(ConfigError, match=f"'awq'.*{name!r} rounds"):
            method.from_config({"quant_method": "awq"}, OPS)


@pytest.mark.parametrize(("block", "storage"), [(128, "uint8"), (256, "bfloat16")])
def test_larger_blocks_and_other_storage(block: int, storage: str) -> None:
    weight = torch.randn(6, 96, generator=torch.Generator().manual_seed(1))
    tensors, meant = packed(weight, "nf4", block)
    kind = getattr(torch, storage)
    tensors["weight"] = tensors["weight"].flatten().view(kind)[:, None]
    method = BitsAndBytes.from_config(config(bnb_4bit_quant_storage=storage), OPS)
    torch.testing.assert_close(real(method, tensors, weight.shape), meant, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("inputs", "size"), [(192, 64), (96, 32), (80, 16), (72, None)])
def test_groups_of_a_ranks_rows(inputs: int, size: int | None) -> None:
    """Blocks are cut again where a rank's rows end within one."""
    method = BitsAndBytes.from_config(config(), OPS)
    spec = LinearSpec("m.q", inputs, (8,), "float32")
    layer = method.for_layer(spec)
    if size is None:
        with pytest.raises(
            ConfigError, match=r"'m\.q\.weight'.*in_features = 72.*tensor_parallel_size"
        ):
            layer.create(spec)
        return
    assert layer.create(spec)["weight_scale"].shape == (8, inputs // size)
    whole = torch.randn(8, 2 * inputs, generator=torch.Generator().manual_seed(1))
    tensors, meant = packed(whole, "nf4")
    rows = decoded(tensors, method)
    mine = {name: t.chunk(2, 1)[1] if t.dim() == 2 else t for name, t in rows.items()}
    found = dequantized(layer.finish(spec, mine).data[0])
    torch.testing.assert_close(found, meant[:, inputs:], rtol=1e-6, atol=0)


def test_kept_bytes_are_the_files() -> None:
    for nested in (None, 256):
        weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
        tensors, _ = packed(weight, "nf4", nested=nested)
        stored = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        found = decoded(tensors, BitsAndBytes.from_config(config(), OPS))
        kept = sum(tensor.numel() * tensor.element_size() for tensor in found.values())
        assert kept <= 1.15 * stored


class TestFaults:
    def refused(self, match: str, fields: dict[str, Any] | None = None, **changed: Any) -> None:
        weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
        tensors, _ = packed(weight, "nf4")
        state = "weight.quant_state.bitsandbytes__nf4"
        for key, value in changed.items():
            name = {"state": state, "weight": "weight"}.get(key, f"weight.{key}")
            if value is None:
                del tensors[name]
            else:
                tensors[name] = value
        if fields is not None:
            text = json.dumps({"shape": [4, 64], "blocksize": 64, **fields}).encode()
            tensors[state] = torch.tensor(list(text), dtype=torch.uint8)
        with pytest.raises(WeightsError, match=match):
            decoded(tensors, BitsAndBytes.from_config(config(), OPS))

    def test_missing_parts(self) -> None:
        self.refused(
            r"'m\.q' is in 4 bits, but there is no tensor m\.q\.weight\.quant_state", state=None
        )
        self.refused(r"no tensor m\.q\.weight\.absmax", absmax=None)
        nested = {"nested_offset": 0.5}
        self.refused(r"nested_absmax, m\.q\.weight\.nested_quant_map", nested)

    def test_contradictions(self) -> None:
        self.refused(r"128 bytes, and 4 scales.*a weight \[4, 32\]", {"shape": [4, 32]})
        self.refused("128 bytes, and 3 scales", absmax=torch.ones(3))
        self.refused("blocksize = 32: must be a multiple of 64", {"blocksize": 32})
        self.refused(r"m\.q\.weight' has dtype int8", weight=torch.ones(128, 1).to(torch.int8))
        self.refused("no JSON object", state=torch.tensor([1, 2], dtype=torch.uint8))

    def test_double_quantization(self) -> None:
        """Scales of scales, and their code book, are floats in as many places as there must be."""
        fields = {"nested_offset": 0.5, "nested_blocksize": 256}
        whole = {
            "absmax": torch.zeros(4, dtype=torch.uint8), "nested_absmax": torch.ones(1),
            "nested_quant_map": torch.ones(256),
        }  # fmt: skip
        for name, wrong in (
            ("absmax", torch.ones(4)), ("nested_absmax", torch.ones(2)),
            ("nested_quant_map", torch.ones(16)),
        ):  # fmt: skip
            self.refused(
                r"'m\.q\.weight': .*must be torch\.uint8, \[1\] and \[256\]",
                fields,
                **{**whole, name: wrong},
            )
        whole["nested_absmax"] = torch.ones(1, dtype=torch.int64)
        self.refused(r"nested_absmax' is torch\.int64: must be floats", fields, **whole)
        self.refused(
            r"absmax' is torch\.uint8: must be floats", absmax=torch.ones(4, dtype=torch.uint8)
        )

    def test_another_kind_than_the_configs(self) -> None:
        tensors, _ = packed(torch.ones(4, 64), "fp4")
        with pytest.raises(WeightsError, match=r"in fp4.*'nf4' \(bnb_4bit_quant_type\)"):
            decoded(tensors, BitsAndBytes.from_config(config(), OPS))

    def test_layouts_of_gpus(self) -> None:
        tensors = {"weight_format": torch.tensor(2).byte()}
        with pytest.raises(WeightsError, match=r"weight_format' = \[2\]: must be 0"):
            decoded(tensors, BitsAndBytes.from_config(config("int8"), OPS))

    def test_magnitudes_below_zero(self) -> None:
        spec = LinearSpec("m.q", 8, (2,), "float32")
        layer = BitsAndBytes.from_config(config("int8"), OPS).for_layer(spec)
        with pytest.raises(WeightsError, match=r"m\.q.*SCB"):
            layer.finish(
                spec, {"weight": torch.ones(2, 8).to(torch.int8), "SCB": torch.tensor([1.0, -1.0])}
            )


def test_floats_of_one_row_are_floats() -> None:
    method = BitsAndBytes.from_config(config(llm_int8_skip_modules=[]), OPS)
    weight = torch.randn(1, 64)
    assert decoded({"weight": weight}, method)["weight"] is weight
