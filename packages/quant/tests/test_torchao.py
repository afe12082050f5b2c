"""Layers that TorchAO quantized, and one layout of it by an own packer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from headrace_core.errors import ConfigError, WeightsError
from headrace_core.linear import LinearSpec
from headrace_core.ops import KernelNeed, bind_ops
from headrace_quant.torchao import TorchAO
from headrace_reference.quantized import dequantized
from headrace_testing.model.quant_methods import QuantConformance

OPS = bind_ops(KernelNeed("cpu", "float32"), choose={"*": "reference"})
FILE = Path("model.safetensors")
LIBRARY = Path(__file__).parent / "data" / "torchao-0.18.0.safetensors"
"""Layers [16, 96] that torchao 0.18.0 quantized, by case: its tensors, ``meant`` by its own dequantization;
the file's metadata has the configuration of each."""
with safe_open(LIBRARY, "pt") as _file:
    CONFIGS: dict[str, Any] = {case: json.loads(text) for case, text in _file.metadata().items()}
    TENSORS = {name: _file.get_tensor(name) for name in _file.keys()}  # noqa: SIM118


def config(default: Any, **fields: Any) -> dict[str, Any]:
    """As transformers writes it."""
    return {
        "quant_method": "torchao", "quant_type": {"default": default}, "modules_to_not_convert": None,
        "include_input_output_embeddings": False, "untie_embedding_weights": False, **fields,
    }  # fmt: skip


def decoded(method: TorchAO, tensors: dict[str, Tensor], module: str) -> dict[str, Tensor]:
    stored = [(f"{module}.{suffix}", tensor, FILE) for suffix, tensor in tensors.items()]
    found = method.decode(stored, "float32", lambda _: False)
    return {name.removeprefix(f"{module}."): tensor for name, tensor, _ in found}


def library(case: str) -> tuple[dict[str, Tensor], Tensor]:
    start = f"{case}."
    tensors = {n.removeprefix(start): t for n, t in TENSORS.items() if n.startswith(start)}
    return tensors, tensors.pop("meant")


def real(case: str, tensors: dict[str, Tensor]) -> Tensor:
    method = TorchAO.from_config(config(CONFIGS[case]), OPS)
    spec = LinearSpec("m.o", 96, (16,), "float32")
    layer = method.for_layer(spec)
    arrived = decoded(method, tensors, "m.o")
    wanted = {name: one.shape for name, one in layer.create(spec).items()}
    assert wanted == {name: tuple(tensor.shape) for name, tensor in arrived.items()}
    return dequantized(layer.finish(spec, arrived).data[0])


@pytest.mark.parametrize("case", sorted(CONFIGS))
def test_the_librarys_layers(case: str) -> None:
    tensors, meant = library(case)
    torch.testing.assert_close(real(case, tensors), meant, rtol=3e-7, atol=1e-9)


@pytest.mark.parametrize("case", sorted(CONFIGS))
def test_misread_layers_show(case: str) -> None:
    """Zero points off by one, scales turned."""
    for name in ("_weight_zero_point", "_weight_scale"):
        tensors, meant = library(case)
        if name not in tensors or (name == "_weight_zero_point" and not tensors[name].any()):
            continue
        found = tensors[name]
        is_scale = name == "_weight_scale"
        tensors[name] = found.flatten().roll(1).view(found.shape) if is_scale else found + 1
        error = (real(case, tensors) - meant).abs().max()
        assert float(error) > 0.001 * float(meant.abs().max()), name


class TestNibbles(QuantConformance):
    """``Int4WeightOnlyConfig``: a minimum for each group, in floats."""

    name = "torchao"
    in_features = 96
    ignores = "lm_head"
    config: ClassVar = config(
        {"_type": "Int4WeightOnlyConfig", "_version": 2, "_data": {
            "group_size": 32, "int4_packing_format": {"_type": "Int4PackingFormat", "_data": "PLAIN"},
        }}
    )  # fmt: skip
    refused: ClassVar = {
        "quant_type": "int8_weight_only", "modules_to_not_convert": "lm_head",
        "include_input_output_embeddings": True, "quant_type.default._type": "UIntXWeightOnlyConfig",
        "quant_type.default._data.int4_packing_format": "tile_packed_to_4d",
        "quant_type.default._data.group_size": 4,
    }  # fmt: skip

    def make_tensors(self, spec: LinearSpec, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        groups = weight.view(len(weight), -1, 32)
        least, most = groups.amin(-1), groups.amax(-1)
        scales = ((most - least) / 15).clamp(min=1e-6)
        codes = ((groups - least[..., None]) / scales[..., None]).round().clamp(0, 15) - 8
        zeros = least + 8 * scales
        meant = (codes * scales[..., None] + zeros[..., None]).view(weight.shape)
        nibbles = codes.view(weight.shape).to(torch.int8) & 15
        tensors = {
            "_weight_qdata": nibbles[:, ::2] | nibbles[:, 1::2] << 4,
            "_weight_scale": scales.T.contiguous(), "_weight_zero_point": zeros.T.contiguous(),
        }  # fmt: skip
        method = self.method()
        assert isinstance(method, TorchAO)
        return decoded(method, tensors, spec.name), meant


@pytest.mark.parametrize(
    ("case", "path", "value"),
    [
        ("int4", "weight_dtype", {"_type": "torch.dtype", "_data": "int1"}),
        ("int4", "intx_packing_format", {"_type": "IntxPackingFormat", "_data": "OPAQUE_ATEN"}),
        ("int8", "granularity", {"_type": "PerTensor", "_data": {}}),
        ("int8-activations", "act_mapping_type", {"_type": "MappingType", "_data": "ASYMMETRIC"}),
        ("float8", "weight_dtype", {"_type": "torch.dtype", "_data": "float8_e5m2"}),
        ("float8", "granularity", {"_type": "PerGroup", "_data": {"group_size": 32}}),
    ],
)
def test_refusals(case: str, path: str, value: Any) -> None:
    changed = {**CONFIGS[case], "_data": {**CONFIGS[case]["_data"], path: value}}
    with pytest.raises(ConfigError, match=rf"quant_type\.default\._data\.{path}"):
        TorchAO.from_config(config(changed), OPS)


def test_configurations_by_name() -> None:
    entries = {
        "_default": CONFIGS["int4"], "m.head": None, "re:m\\..*_proj": CONFIGS["float8"],
        "m.up.weight": CONFIGS["int8"],
    }  # fmt: skip
    found = TorchAO.from_config(
        config({"_type": "FqnToConfig", "_data": {"fqn_to_config": entries}}), OPS
    )

    def kinds(name: str) -> dict[str, str | None]:
        spec = LinearSpec(name, 96, (16,), "float32")
        return {key: one.dtype for key, one in found.for_layer(spec).create(spec).items()}

    assert kinds("m.head") == kinds("lm_head") == {"weight": None}
    assert kinds("m.q_proj")["weight"] == "float8_e4m3fn"
    assert kinds("m.up") == {"_weight_qdata": "int8", "_weight_scale": "float32"}
    assert kinds("m.down")["_weight_zero_point"] == "int8"


def test_one_scale_of_fp8() -> None:
    per_tensor = {"_type": "PerTensor", "_data": {}}
    default = {
        "_type": "Float8DynamicActivationFloat8WeightConfig",
        "_data": {"granularity": [per_tensor, per_tensor]},
    }
    method = TorchAO.from_config(config(default), OPS)
    spec = LinearSpec("m.o", 96, (16,), "float32")
    layer = method.for_layer(spec)
    codes = TENSORS["float8._weight_qdata"]
    tensors = {"_weight_qdata": codes, "_weight_scale": torch.full((1, 1), 0.25)}
    state = layer.finish(spec, decoded(method, tensors, "m.o"))
    assert torch.equal(dequantized(state.data[0]), codes.float() / 4)


def test_zero_points_of_symmetric_weights_must_be_zero() -> None:
    tensors, _ = library("int8")
    tensors["_weight_zero_point"] += 1
    with pytest.raises(WeightsError, match=r"m\.o\._weight_zero_point.*symmetric"):
        real("int8", tensors)


def test_it_needs_a_checkpoint() -> None:
    with pytest.raises(ConfigError, match="needs a checkpoint made with it"):
        TorchAO.from_config(None, OPS)


@pytest.mark.parametrize("kind", ["Int7WeightOnlyConfig", ["Int8WeightOnlyConfig"], None, 8])
def test_a_type_that_is_no_configuration(kind: Any) -> None:
    with pytest.raises(ConfigError, match=r"quant_type\.default\._type = "):
        TorchAO.from_config(config({**CONFIGS["int8"], "_type": kind}), OPS)


def test_a_newer_version_is_told(caplog: pytest.LogCaptureFixture) -> None:
    for version in CONFIGS["int8"]["_version"], 99:
        TorchAO.from_config(config({**CONFIGS["int8"], "_version": version}), OPS)
    (record,) = caplog.records
    assert "quant_type.default._version = 99: versions up to 2 are known" in record.getMessage()
