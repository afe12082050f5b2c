"""gpt-oss in 4-bit floats is gpt-oss in the floats that they stand for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.ops import KernelNeed, bind_ops
from headrace_core.parallel import Communicator
from headrace_core.platform import CpuPlatform
from headrace_models.loading.loader import load_model
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
