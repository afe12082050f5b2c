"""Single layers of every way of storing over two ranks in threads: outputs that are cut, a gate and an up
that are one layer, and inputs that are cut. What a whole model gets wrong shows here in one product."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoints import IntegerConformance
from quantized_formats import PROOFS, PlainModel
from stored_variants import GptOss
from test_rounded_models import OF_EXPERTS, RoundedConformance
from torch import Tensor

from headrace_core.errors import UnsupportedModel
from headrace_core.linear import QuantMethod
from headrace_core.model import BuildContext, ModelInfo, WeightRule
from headrace_core.parallel import Communicator
from headrace_models.layers.base import Layer, WeightLayer, walk
from headrace_models.layers.linear import Linear, column_parallel, row_parallel
from headrace_models.loading.loader import HARMLESS, Built, fill
from headrace_models.loading.mapping import WeightMap
from headrace_models.loading.packed_tensors import decoded
from headrace_models.quantization import quant_method
from headrace_testing.model.decoders import build_context, run_ranks

pytestmark = pytest.mark.days(3)

OUTPUTS, INPUTS, TOKENS = 192, 256, 7
FUSED = ("gate_proj", "up_proj")


class TwoLayers(Layer):
    """Gate and up in one layer, and a down projection; they are not called one after the other."""

    def __init__(self, context: Any, prefix: str) -> None:
        names = tuple(f"{prefix}.{part}" for part in FUSED)
        self.fused: Linear = column_parallel(
            context, f"{prefix}.gate_up_proj", INPUTS, [OUTPUTS] * 2, part_names=names
        )
        self.down: Linear = row_parallel(context, f"{prefix}.down_proj", INPUTS, OUTPUTS)

    def attention_layers(self) -> dict[str, Any]:
        return {}


def _suites() -> Iterator[tuple[str, Any]]:
    """Every suite of the table that makes single layers, once. Those of GGUF write whole files; their models
    run over two ranks."""
    seen: set[type] = set()
    for name, proof in PROOFS.items():
        for suite in proof.suites():
            is_layered = issubclass(suite, RoundedConformance) or (
                issubclass(suite, IntegerConformance)
                and suite.module is not IntegerConformance.module
            )
            if not is_layered or suite in seen or getattr(suite, "is_transposed", False):
                continue
            if issubclass(suite, GptOss | PlainModel):
                continue
            seen.add(suite)
            yield f"{name} {suite.__name__}", suite


SUITES = dict(_suites())


def _weight(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(OUTPUTS, INPUTS, generator=generator) * torch.rand(
        OUTPUTS, 1, generator=generator
    )


def _prefix(suite: Any) -> str:
    config = suite.hf_config()
    has_experts = bool(getattr(config, "num_experts", 0))
    return "model.layers.0.mlp.experts.1" if has_experts else "model.layers.0.mlp"


@pytest.mark.keep(12, every_value=False)
@pytest.mark.parametrize("name", SUITES)
def test_two_ranks_are_one(name: str) -> None:
    suite: Any = SUITES[name]()
    prefix, is_rounded = _prefix(suite), isinstance(suite, RoundedConformance)
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for seed, part in enumerate((*FUSED, "down_proj")):
        module = f"{prefix}.{part}"
        if is_rounded:
            tensors, meant[part] = {"weight": _weight(seed)}, _weight(seed)
        else:
            tensors, meant[part] = suite.module(module, _weight(seed))
        stored |= {f"{module}.{key}": tensor for key, tensor in tensors.items()}
    block = {} if is_rounded else {"quantization_config": suite.quantization}
    info = ModelInfo("m", Path(), "A", block, {}, "float32", 8, 9, ())
    x = torch.randn(TOKENS, INPUTS, generator=torch.Generator().manual_seed(9))

    def work(group: Communicator) -> tuple[Tensor, Tensor]:
        context = build_context(info, communicator=group)
        quant = suite.quant(info, context) if is_rounded else quant_method(
            info, None, context.ops, device="cpu", activations="float"
        )  # fmt: skip
        model: Any = TwoLayers(_with(context, quant), prefix)
        leaves = {path: leaf for path, leaf in walk(model) if isinstance(leaf, WeightLayer)}
        weights = WeightMap(
            [
                WeightRule(f"{prefix}.gate_proj", "fused"),
                WeightRule(f"{prefix}.up_proj", "fused", part=1),
                WeightRule(f"{prefix}.down_proj", "down"),
            ],
            leaves,
        )
        built = Built(model, info, leaves, weights, HARMLESS)
        tensors = decoded(
            [(key, tensor.clone(), Path("f")) for key, tensor in stored.items()],
            lambda each: quant.decode(each, "float32", built.passes_over),
            weights.is_transposed,
        )
        fill(built, _with(context, quant), tensors)
        share = x.chunk(group.world_size, 1)[group.rank].contiguous()
        fused = model.fused(x)
        parts = [group.all_gather(part.contiguous()) for part in fused.chunk(2, -1)]
        return torch.cat(parts, -1), model.down(share)

    if suite.tensor_parallel == 1:
        with pytest.raises(UnsupportedModel, match="tensor_parallel_size = 2"):
            run_ranks(2, work)
        return
    if is_rounded:
        context = build_context(info)
        quant = suite.quant(info, context)
        for part, weight in list(meant.items()):
            meant[part] = suite.rounded(quant, f"{prefix}.{part}", weight, 2)
    entered = getattr(
        suite, "entered", lambda each: each
    )  # as activations are rounded, each rank's by itself
    shares = zip(x.chunk(2, 1), meant["down_proj"].chunk(2, 1), strict=True)
    expected = torch.cat([entered(x) @ meant[part].T for part in FUSED], 1)
    summed = sum(entered(share) @ weight.T for share, weight in shares)
    for fused, down in run_ranks(2, work):
        torch.testing.assert_close(fused, expected, atol=1e-3, rtol=1e-4)
        torch.testing.assert_close(down, summed, atol=1e-3, rtol=1e-4)


def _with(context: BuildContext, quant: QuantMethod) -> BuildContext:
    return dataclasses.replace(context, quant=quant)


def test_every_method_has_a_layer() -> None:
    named = {name.partition(" ")[0] for name in SUITES}
    assert {*PROOFS} - named <= {"gguf", "fp8", "none"}, named
    assert named >= {*OF_EXPERTS} - {"bitsandbytes"}
