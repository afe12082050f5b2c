from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from headrace_core.errors import ConfigError, WeightsError
from headrace_core.linear import LinearSpec
from headrace_quant.bits import unpack_rows
from headrace_quant.gptq import GPTQ, GPTQWeight
from headrace_quant.none import PlainWeight
from headrace_testing.model.quant_methods import QuantConformance
from headrace_testing.model.quantized_layers import gptq_tensors


def config(**fields: Any) -> dict[str, Any]:
    """As GPTQModel writes it."""
    return {
        "quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True,
        "lm_head": False, "checkpoint_format": "gptq", "pack_dtype": "int32",
        "true_sequential": True, "damp_percent": 0.05, "meta": {"quantizer": ["gptqmodel:5.0.0"]},
        **fields,
    }  # fmt: skip


class GPTQConformance(QuantConformance):
    name = "gptq"
    in_features = 128
    out_parts = (64, 32)
    bits: ClassVar[int] = 4
    symmetric: ClassVar[bool] = True
    sorts: ClassVar[bool] = False
    version: ClassVar[str] = "gptq"
    group_size: ClassVar[int] = 32
    ignores = "lm_head"

    def make_tensors(self, spec: LinearSpec, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        return gptq_tensors(
            weight,
            bits=self.bits,
            group_size=spec.in_features if self.group_size == -1 else self.group_size,
            symmetric=self.symmetric,
            by_importance=self.sorts,
            less_one=self.version == "gptq",
        )

    def test_zero_points_count(self) -> None:
        """One off, and the product is another."""
        spec = self.spec()
        tensors, _ = self.make_tensors(spec, self.weight(spec))
        x = torch.randn(3, spec.in_features)
        other = "gptq_v2" if self.version == "gptq" else "gptq"
        layers = [
            self.method(config={**self.config, "checkpoint_format": version}).for_layer(spec)
            for version in (self.version, other)
        ]
        first, second = (
            layer.apply(layer.finish(spec, {k: v.clone() for k, v in tensors.items()}), x)
            for layer in layers
        )
        assert not torch.allclose(first, second, atol=1e-2)


def case(bits: int, symmetric: bool, sorts: bool, version: str, group_size: int) -> type:
    return type(
        f"TestBits{bits}{'Sym' if symmetric else 'Asym'}{'Sorted' if sorts else ''}"
        f"{version.title().replace('_', '')}Group{group_size if group_size > 0 else 'All'}",
        (GPTQConformance,),
        {
            "__module__": __name__,
            "bits": bits, "symmetric": symmetric, "sorts": sorts, "version": version,
            "group_size": group_size,
            "config": config(
                bits=bits, sym=symmetric, desc_act=sorts, checkpoint_format=version, group_size=group_size
            ),
        },
    )  # fmt: skip


for chosen in (
    *((bits, True, bits in (3, 8), "gptq", 32) for bits in (2, 3, 4, 8)),
    *((bits, False, bits in (2, 4), "gptq", 32) for bits in (2, 3, 4, 8)),
    *((bits, bits > 3, bits == 8, "gptq_v2", 32) for bits in (2, 3, 4, 8)),
    (4, True, True, "gptq_v2", 128),
    (4, False, False, "gptq", -1),
    (8, True, False, "gptq", -1),
):
    made = case(*chosen)
    globals()[made.__name__] = made


class TestRefusals(GPTQConformance):
    config = config()
    refused: ClassVar = {
        "bits": 5,
        "group_size": 4,
        "checkpoint_format": "marlin",
        "pack_dtype": "int16",
        "desc_act": "yes",
        "dynamic": [],
        "modules_in_block_to_quantize": [[3]],
    }


def layers_of(method: GPTQ, *names: str) -> list[type]:
    return [type(method.for_layer(LinearSpec(name, 64, (64,), "float32"))) for name in names]


def test_the_first_rule_that_matches_decides() -> None:
    method = GPTQConformance.method(
        TestRefusals(),
        config=config(
            dynamic={
                r"-:model\.layers\.0\..*": {},
                r"+:.*\.1\.mlp\..*": {"bits": 8, "group_size": -1},
                r".*\.down_proj": {"bits": 2},
            }
        ),
    )
    assert layers_of(method, "model.layers.0.mlp.down_proj") == [PlainWeight]
    forms = [
        method.for_layer(LinearSpec(f"model.layers.{i}.mlp.down_proj", 64, (64,), "float32")).form
        for i in (1, 2)
    ]
    assert [(f.bits, f.group_size) for f in forms] == [(8, None), (2, 32)]
    assert layers_of(method, "model.layers.10.mlp.up_proj") == [GPTQWeight]


def test_the_head_is_quantized_where_the_config_says_so() -> None:
    for says, kind in ((False, PlainWeight), (True, GPTQWeight)):
        method = GPTQConformance.method(TestRefusals(), config=config(lm_head=says))
        assert layers_of(method, "lm_head") == [kind]


def test_modules_outside_the_named_ones_are_plain() -> None:
    method = GPTQConformance.method(
        TestRefusals(),
        config=config(modules_in_block_to_quantize=[["self_attn.q_proj"], ["mlp.up_proj"]]),
    )
    names = ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj")
    assert layers_of(method, *names) == [GPTQWeight, PlainWeight]


def test_groups_of_other_sizes_are_told() -> None:
    suite = TestRefusals()
    spec = suite.spec()
    tensors, _ = suite.make_tensors(spec, suite.weight(spec))
    tensors["g_idx"][:3] = 1
    with pytest.raises(WeightsError, match="g_idx"):
        suite.method().for_layer(spec).finish(spec, tensors)


@pytest.mark.parametrize(("inputs", "outputs"), [(40, 64), (64, 12)])
def test_words_that_do_not_end_with_the_layer_are_refused(inputs: int, outputs: int) -> None:
    spec = LinearSpec("a.b", inputs, (outputs,), "float32")
    layer = GPTQConformance.method(TestRefusals(), config=config(group_size=8)).for_layer(spec)
    if inputs == 40:
        layer = GPTQConformance.method(TestRefusals(), config=config(bits=3, group_size=8))
        layer = layer.for_layer(spec)
    with pytest.raises(ConfigError, match=r"a\.b"):
        layer.create(spec)


def test_a_layer_sorted_by_importance_needs_one_rank() -> None:
    spec = LinearSpec("a.b", 64, (64,), "float32")
    for sorts in (False, True):
        method = GPTQConformance.method(TestRefusals(), config=config(desc_act=sorts))
        assert method.for_layer(spec).needs_whole is sorts


def test_a_ranks_groups_begin_anywhere() -> None:
    suite = TestRefusals()
    spec = suite.spec()
    tensors, _ = suite.make_tensors(spec, suite.weight(spec))
    layer = suite.method().for_layer(spec)
    x = torch.randn(2, spec.in_features)
    expected = layer.apply(layer.finish(spec, {k: v.clone() for k, v in tensors.items()}), x)
    tensors["g_idx"] += 4  # the second of two ranks
    assert torch.equal(layer.apply(layer.finish(spec, tensors), x), expected)


def test_three_bits_straddle_words() -> None:
    """Against Python's own integers."""
    values = [(7 * i + i // 5) % 8 for i in range(64)]
    run = sum(value << (3 * place) for place, value in enumerate(values))
    words = [(run >> (32 * i)) & 0xFFFFFFFF for i in range(6)]
    signed = torch.tensor([[w - 2**32 if w >= 2**31 else w for w in words]], dtype=torch.int32)
    assert unpack_rows(signed, 3).tolist() == [values]
