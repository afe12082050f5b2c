"""gpt-oss in 4-bit floats is gpt-oss in the floats that they stand for."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.ops import KernelNeed, bind_ops
from headrace_core.parallel import Communicator
from headrace_core.platform import CpuPlatform
from headrace_models.loading.loader import load_model
from headrace_models.lora.adapters import Adapters
from headrace_models.quantization import quant_method
from headrace_models.resolve import resolve
from headrace_testing.model.decoders import PagedDriver, build_context, randomise, run_ranks

PROMPT = [5, 9, 77, 3, 41, 8, 100, 64, 31]


def dequantize(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """codes [N, B, 16] of E2M1, scales [N, B] -> [N, 32 B] float32."""
    sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    table = torch.cat([sizes, -sizes])
    values = torch.stack([table[(codes % 16).int()], table[(codes // 16).int()]], -1).flatten(2)
    return (values * 2.0 ** (scales.float() - 127)[..., None]).flatten(1)


def make_checkpoints(folder: Path) -> tuple[Path, Path]:
    """One of floats, and one of blocks that stand for them."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        vocab_size=131, hidden_size=64, intermediate_size=64, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        sliding_window=8, max_position_embeddings=128,
    )  # fmt: skip
    model = GptOssForCausalLM(config)
    randomise(model)
    plain, packed = folder / "plain", folder / "packed"
    model.save_pretrained(plain)
    floats = load_file(plain / "model.safetensors")
    blocks = {name: tensor for name, tensor in floats.items() if not name.endswith("_proj")}
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in floats if name.endswith("_proj")]:
        experts, inputs, outputs = floats[name].shape
        shape = (experts, outputs, inputs // 32)
        codes = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 125, shape, generator=generator, dtype=torch.uint8)
        blocks |= {f"{name}_blocks": codes, f"{name}_scales": scales}
        real = [dequantize(c, s).T for c, s in zip(codes, scales)]
        floats[name] = torch.stack(real).contiguous()
    save_file(floats, plain / "model.safetensors", metadata={"format": "pt"})
    packed.mkdir()
    settings = json.loads((plain / "config.json").read_text())
    settings["quantization_config"] = {
        "quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
    }  # fmt: skip
    (packed / "config.json").write_text(json.dumps(settings))
    save_file(blocks, packed / "model.safetensors", metadata={"format": "pt"})
    return plain, packed


@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_load_as_the_floats(tmp_path: Path, ranks: int) -> None:
    def logits(path: Path, communicator: Communicator | None = None) -> torch.Tensor:
        config = ModelConfig(model=str(path), dtype="float32", max_model_len=64)
        info = resolve(config, LoadConfig(), CpuPlatform())
        ops = bind_ops(KernelNeed("cpu", "float32"), choose={"*": "reference"})
        quant = quant_method(info, None, ops, device="cpu")
        context = build_context(info, ops=ops, quant=quant, communicator=communicator)
        return PagedDriver(load_model(info, context)).step({"a": PROMPT})

    plain, packed = make_checkpoints(tmp_path)
    expected = logits(plain)
    for found in run_ranks(ranks, lambda communicator: logits(packed, communicator)):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore")  # of PEFT, about what it stores
@pytest.mark.parametrize("kernels", ["reference", "native"])
def test_an_adapter_of_experts_in_blocks(tmp_path: Path, kernels: str) -> None:
    """As PEFT's on the floats that the blocks stand for; a request without an adapter is the base's."""
    import peft
    from transformers import GptOssForCausalLM

    plain, packed = make_checkpoints(tmp_path)
    model = GptOssForCausalLM.from_pretrained(
        plain, attn_implementation="eager", dtype=torch.float32
    )
    base = log_probabilities(model.eval())
    config = peft.LoraConfig(
        init_lora_weights=False, r=4, target_modules=["q_proj", "o_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
    )  # fmt: skip
    tuned = peft.get_peft_model(model, config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, factor in tuned.named_parameters():
            if ".lora_" in name:
                factor.copy_(torch.randn(factor.shape, generator=generator) / 8)
    tuned.save_pretrained(tmp_path / "adapter")
    expected = log_probabilities(tuned)

    info = resolve(
        ModelConfig(model=str(packed), dtype="float32", max_model_len=64),
        LoadConfig(),
        CpuPlatform(),
    )
    choose = {"*": "reference"} if kernels == "reference" else {}
    ops = bind_ops(KernelNeed("cpu", "float32"), choose=choose)
    quant = quant_method(info, None, ops, device="cpu", activations="float")
    slots = Adapters(ops, max_loras=1, max_lora_rank=8, dtype="float32", device="cpu", max_tokens=64,
                     max_logits_rows=64)  # fmt: skip
    context = dataclasses.replace(build_context(info, ops=ops, quant=quant), adapters=slots)
    own = load_model(info, context)
    slots.place(0, slots.read(str(tmp_path / "adapter")))
    rows = torch.tensor([0] * len(PROMPT) + [-1] * len(PROMPT), dtype=torch.int32)
    slots.choose(rows, rows)
    found = PagedDriver(own).step({"a": PROMPT, "b": PROMPT}).log_softmax(-1)
    assert float((expected - base).abs().max()) > 0.1
    torch.testing.assert_close(found[: len(PROMPT)], expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(found[len(PROMPT) :], base, atol=1e-4, rtol=0)


def log_probabilities(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    return found
