"""Adapters on quantized bases: as on transformers' model with the floats that the bits stand for."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoints import DENSE, MIXTURE

from headrace_core import plugins
from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.model import ModelInfo
from headrace_core.ops import KernelNeed, bind_ops
from headrace_core.platform import CpuPlatform
from headrace_models.layers.base import walk
from headrace_models.layers.linear import Linear
from headrace_models.loading.loader import load_model
from headrace_models.loading.quantized_copy import write_quantized
from headrace_models.lora.adapters import Adapters
from headrace_models.quantization import quant_method
from headrace_models.resolve import resolve
from headrace_testing.model.adapters import linear_modules, merged, write_adapter
from headrace_testing.model.decoders import Checkpoint, PagedDriver, build_context, randomise

PROMPT = [5, 9, 3, 7, 8, 11, 2, 40]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("base")
    model = LlamaForCausalLM._from_config(
        LlamaConfig(**DENSE), attn_implementation="eager", dtype=torch.float32
    )
    randomise(model.eval())
    model.save_pretrained(folder)
    return Checkpoint(model, folder)


def opened(folder: Path, quantization: str | None) -> tuple[Any, Adapters]:
    """A model whose activations enter as they are, and its slots."""
    info = resolved(folder)
    context = build_context(info)
    method = quant_method(info, quantization, context.ops, device="cpu", activations="float")
    slots = Adapters(
        context.ops, max_loras=2, max_lora_rank=8, dtype="float32", device="cpu", max_tokens=64,
        max_logits_rows=64,
    )  # fmt: skip
    return load_model(info, dataclasses.replace(context, quant=method, adapters=slots)), slots


def resolved(folder: Path, dtype: str = "float32") -> ModelInfo:
    settings = ModelConfig(model=str(folder), max_model_len=64, dtype=dtype)
    return resolve(settings, LoadConfig(), CpuPlatform())


def with_floats_of(model: Any, reference: Any) -> Any:
    """The reference with the weights that the model's layers multiply by."""
    made = merged(reference, {})
    for _, layer in walk(model):
        if isinstance(layer, Linear):
            spec = layer.spec
            weight = layer.method.apply(layer.state, torch.eye(spec.in_features)).T
            names = spec.part_names or (spec.name,)
            for name, rows in zip(names, weight.split(spec.out_parts), strict=True):
                made.get_submodule(name).weight.data.copy_(rows)
    return made


@pytest.mark.parametrize(
    ("encoder", "quantization"),
    [("q4_0", None), ("q8_0", None), ("awq", None), (None, "int8"), (None, "bitsandbytes")],
)
def test_an_adapter_on_a_quantized_base(
    base: Checkpoint, tmp_path: Path, encoder: str | None, quantization: str | None
) -> None:
    folder = base.path
    if encoder is not None:
        folder, info = tmp_path / "base", resolved(base.path)
        write_quantized(
            info, build_context(info), plugins.load("headrace.weight_encoders", encoder)(), folder
        )
    model, slots = opened(folder, quantization)
    floats = with_floats_of(model, base.reference)
    added = write_adapter(tmp_path / "adapter", linear_modules(base.reference))
    slots.place(0, slots.read(str(tmp_path / "adapter")))
    rows = torch.tensor([0] * len(PROMPT) + [-1] * len(PROMPT), dtype=torch.int32)
    slots.choose(rows, rows)
    found = PagedDriver(model).step({"a": PROMPT, "b": PROMPT}).log_softmax(-1)
    expected = Checkpoint(merged(floats, added), folder).logprobs(PROMPT)
    plain = Checkpoint(floats, folder).logprobs(PROMPT)
    assert float((plain - base.logprobs(PROMPT)).abs().max()) > 1e-2
    assert float((plain - expected).abs().max()) > 0.1
    torch.testing.assert_close(found[: len(PROMPT)], expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(found[len(PROMPT) :], plain, atol=1e-4, rtol=0)


def stacked(model: Any) -> dict[str, tuple[int, int]]:
    """Names and sizes of the matrices of all experts of a mixture, one by one."""
    found: dict[str, tuple[int, int]] = {}
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            count, wide, hidden = module.gate_up_proj.shape
            for index in range(count):
                for part in ("gate_proj", "up_proj"):
                    found[f"{name}.{index}.{part}"] = wide // 2, hidden
                found[f"{name}.{index}.down_proj"] = hidden, wide // 2
    return found


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = tmp_path_factory.mktemp("mixture")
    model = Qwen3MoeForCausalLM._from_config(
        Qwen3MoeConfig(**MIXTURE), attn_implementation="eager", dtype=torch.float32
    )
    randomise(model.eval())
    model.save_pretrained(folder)
    return Checkpoint(model, folder)


@pytest.mark.parametrize(
    ("name", "quantization", "dtype"),
    [
        ("base", None, "float32"),
        ("base", "int8", "bfloat16"),
        ("mixture", None, "float32"),
        ("mixture", "int8", "float32"),
        ("mixture", "bitsandbytes", "bfloat16"),
    ],
)
def test_adapters_side_by_side_bit_for_bit(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    name: str,
    quantization: str | None,
    dtype: str,
) -> None:
    """With native kernels a request's logits are the same bits alone and among others, of other adapters and
    of none; what experts' adapters add does not touch those of others."""
    checkpoint: Checkpoint = request.getfixturevalue(name)
    info = resolved(checkpoint.path, dtype)
    context = build_context(info, ops=bind_ops(KernelNeed(device="cpu", dtype=dtype)))
    method = quant_method(info, quantization, context.ops, device="cpu")
    slots = Adapters(
        context.ops, max_loras=8, max_lora_rank=8, dtype=dtype, device="cpu", max_tokens=128,
        max_logits_rows=128,
    )  # fmt: skip
    model = load_model(info, dataclasses.replace(context, quant=method, adapters=slots))
    alone = [logits_of(model, slots, [-1])]
    linear, experts = linear_modules(checkpoint.reference), stacked(checkpoint.reference)
    targets = [linear, experts or linear, {**linear, **experts}, dict([*linear.items()][:2])]
    for slot, modules in enumerate([*targets, *targets]):
        write_adapter(tmp_path / str(slot), modules, rank=slot + 1, seed=slot)
        slots.place(slot, slots.read(str(tmp_path / str(slot))))
        alone.append(logits_of(model, slots, [slot]))
        assert not torch.equal(alone[-1][0], alone[0][0])
    assert slots.runs_eagerly is bool(experts)
    order = [2, 7, -1, 0, 3, 5, 1, 6, 4, -1]
    for slot, found in zip(order, logits_of(model, slots, order), strict=True):
        assert torch.equal(found, alone[slot + 1][0]), slot


def logits_of(model: Any, slots: Adapters, of_prompts: list[int]) -> list[torch.Tensor]:
    rows = torch.tensor([slot for slot in of_prompts for _ in PROMPT], dtype=torch.int32)
    slots.choose(rows, rows)
    logits = PagedDriver(model).step({str(i): PROMPT for i in range(len(of_prompts))})
    return list(logits.split(len(PROMPT)))


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_an_adapter_of_a_head_that_is_the_table(tmp_path: Path, quantization: str | None) -> None:
    """It changes the head's product, and not the input vectors."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM._from_config(
        LlamaConfig(**DENSE, tie_word_embeddings=True), dtype=torch.float32
    )
    randomise(model)
    model.save_pretrained(tmp_path)
    own, slots = opened(tmp_path, quantization)
    term = write_adapter(tmp_path / "adapter", {"lm_head": (160, 128)})["lm_head"]
    slots.place(1, slots.read(str(tmp_path / "adapter")))
    batch = PagedDriver(own).batch({"a": PROMPT})
    slots.choose(None)
    with torch.inference_mode():
        hidden = own.forward(batch)
        plain = own.compute_logits(hidden)
        rows = torch.tensor([1, -1] * 4, dtype=torch.int32)
        slots.choose(rows, rows)
        found = own.compute_logits(hidden)
    assert torch.equal(found[1::2], plain[1::2])
    torch.testing.assert_close(found[::2], (plain + hidden @ term.T)[::2], atol=1e-4, rtol=0)
