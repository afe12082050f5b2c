"""Adapters beside PEFT on the same files, in float32."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from adapter_files import choose, with_adapters
from torch import Tensor

from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.model import CausalLM
from headrace_core.platform import CpuPlatform
from headrace_models.loading.loader import load_model
from headrace_models.lora.adapters import Adapters
from headrace_models.resolve import resolve
from headrace_testing.model.decoders import PagedDriver, build_context, randomise

pytestmark = pytest.mark.filterwarnings("ignore")  # of PEFT, about what it stores

TOKENS = [5, 9, 3, 7, 8, 11, 2, 40, 41, 6]
SIZES: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT: dict[str, Any] = {
    "vocab_size": 131, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
MLA: dict[str, Any] = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4, "head_dim": 8,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "GPT2": GPT,
    "GPTNeoX": {**SIZES, "num_key_value_heads": None},
    "Mixtral": {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV3": {**SIZES, **MLA},
    "Qwen3Next": {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                  "shared_expert_intermediate_size": 24, "linear_num_key_heads": 2,
                  "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
                  "layer_types": ["linear_attention", "full_attention"]},
}  # fmt: skip
CLASSES = {"GPT2": "GPT2LMHeadModel"}
ALL = "all-linear"
TINY = ("q_proj", "v_proj")


def reference(family: str) -> Any:
    """A model of transformers with random weights."""
    name = CLASSES.get(family, f"{family}ForCausalLM")
    model_class = getattr(transformers, name)
    values = {k: v for k, v in OWN.get(family, SIZES).items() if v is not None}
    config = model_class.config_class(**values)
    made = model_class._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    randomise(made)
    return made


def add(model: Any, folder: Path, seed: int, **settings: Any) -> Tensor:
    """Write an adapter of random numbers by PEFT, whose log-probabilities [L, V] come back."""
    config = peft.LoraConfig(init_lora_weights=False, **settings)
    made = peft.get_peft_model(model, config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, factor in made.named_parameters():
            if ".lora_" in name:
                factor.copy_(
                    torch.randn(factor.shape, generator=generator) / factor.shape[-1] ** 0.5
                )
    made.save_pretrained(folder)
    with torch.inference_mode():
        found: Tensor = made(torch.tensor([TOKENS])).logits[0].log_softmax(-1)
    made.unload()
    return found


def opened(folder: Path, **slots: int) -> tuple[CausalLM, Adapters]:
    """A checkpoint's model with slots for adapters."""
    settings = ModelConfig(model=str(folder), max_model_len=64)
    info = resolve(settings, LoadConfig(), CpuPlatform())
    context, adapters = with_adapters(build_context(info), most=160, **slots)
    return load_model(info, context), adapters


def run(model: CausalLM, slots: Adapters, of_prompts: Sequence[int]) -> list[Tensor]:
    """Log-probabilities of the same prompt in several slots, in one batch."""
    choose(slots, [slot for slot in of_prompts for _ in TOKENS])
    logits = PagedDriver(model).step({str(i): TOKENS for i in range(len(of_prompts))})
    return list(logits.log_softmax(-1).split(len(TOKENS)))


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("Llama", {"r": 1, "target_modules": TINY}),
        ("Llama", {"r": 64, "lora_alpha": 16, "target_modules": ALL}),
        ("Llama", {"r": 256, "lora_alpha": 32, "use_rslora": True, "target_modules": ALL}),
        ("Llama", {"r": 8, "target_modules": ALL, "lora_alpha": 3,
                   "rank_pattern": {"q_proj": 3, r"layers\.1\.mlp\.up_proj": 5},
                   "alpha_pattern": {"0.self_attn.o_proj": 11.0}}),
        ("Llama", {"r": 8, "target_modules": ["lm_head", "embed_tokens", "o_proj"]}),
        ("Llama", {"r": 8, "target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]}),
        ("Qwen3", {"r": 8, "target_modules": ALL}),
        ("Phi3", {"r": 8, "target_modules": ["qkv_proj", "gate_up_proj", "down_proj"]}),
        ("GPT2", {"r": 8, "target_modules": ["c_attn", "c_proj", "c_fc", "wte"], "fan_in_fan_out": True}),
        ("GPTNeoX", {"r": 8, "target_modules": ALL}),
        ("Mixtral", {"r": 8, "target_modules": ALL}),
        ("Gemma2", {"r": 8, "target_modules": [*TINY, "embed_tokens"]}),
        ("Gemma3", {"r": 8, "target_modules": ["down_proj", "embed_tokens", "lm_head"]}),
        ("DeepseekV3", {"r": 8, "target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]}),
        ("Qwen3Next", {"r": 8, "target_modules": ALL}),
    ],
    ids=lambda value: value if isinstance(value, str) else f"r{value['r']}",
)  # fmt: skip
def test_log_probabilities_are_those_of_peft(
    tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    model = reference(family)
    model.save_pretrained(tmp_path / "base")
    with torch.inference_mode():
        base = model(torch.tensor([TOKENS])).logits[0].log_softmax(-1)
    expected = add(model, tmp_path / "adapter", 0, **settings)
    own, slots = opened(tmp_path / "base", max_loras=2, max_lora_rank=256)
    slots.place(1, slots.read(str(tmp_path / "adapter")))
    adapted, plain = run(own, slots, [1, -1])
    assert float((expected - base).abs().max()) > 0.1
    assert_close(adapted, expected)
    assert_close(plain, base)


def test_eight_adapters_and_the_base_in_one_batch(tmp_path: Path) -> None:
    """Each as alone; then the slots change their contents."""
    model = reference("Llama")
    model.save_pretrained(tmp_path / "base")
    own, slots = opened(tmp_path / "base", max_loras=8, max_lora_rank=64)
    alone, read = [run(own, slots, [-1])[0]], []
    slots.choose(None)
    assert torch.equal(run_plain(own), alone[0])
    for slot, rank in enumerate((1, 2, 4, 8, 16, 32, 64, 3)):
        targets = ALL if slot % 2 else list(TINY)
        folder = tmp_path / str(slot)
        expected = add(model, folder, slot, r=rank, lora_alpha=rank, target_modules=targets)
        read.append(slots.read(str(folder)))
        slots.place(slot, read[-1])
        alone.append(run(own, slots, [slot])[0])
        assert_close(alone[-1], expected)
    assert len({adapter.digest for adapter in read}) == 8
    assert slots.read(str(tmp_path / "3")).digest == read[3].digest
    for found, expected in zip(run(own, slots, [-1, *range(8)]), alone, strict=True):
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    slots.place(7, read[0])
    slots.place(0, read[7])
    swapped = run(own, slots, [7, 0, 1])
    for found, index in zip(swapped, (1, 8, 2), strict=True):
        torch.testing.assert_close(found, alone[index], atol=2e-5, rtol=0)


def run_plain(model: CausalLM) -> Tensor:
    return PagedDriver(model).step({"a": TOKENS}).log_softmax(-1)


def test_files_as_pickles_are_read(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = reference("Llama")
    model.save_pretrained(tmp_path / "base")
    add(model, tmp_path / "adapter", 0, r=2, target_modules=TINY)
    _, slots = opened(tmp_path / "base")
    stored = tmp_path / "adapter" / "adapter_model.safetensors"
    first = slots.read(str(tmp_path / "adapter"))
    torch.save(load_file(stored), stored.with_suffix(".bin"))
    stored.unlink()
    second = slots.read(str(tmp_path / "adapter"))
    assert second.digest == first.digest
    assert second.num_bytes == first.num_bytes == 2 * 4 * 2 * (2 * 64 + 64 + 32)
    assert dataclasses.is_dataclass(second)


GPT_OSS: dict[str, Any] = {
    **SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
}  # fmt: skip
LONGCAT: dict[str, Any] = {
    **SIZES, "num_layers": 1, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 24, "q_lora_rank": 24,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
    "num_attention_heads": 4, "n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 3,
    "head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip
STACKED: dict[str, dict[str, Any]] = {"GptOss": GPT_OSS, "LongcatFlash": LONGCAT}


@pytest.mark.parametrize("family", ["Mixtral", "GptOss", "LongcatFlash"])
def test_experts_that_are_one_parameter(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Biases of experts stay as they are; tokens of experts that give back what they get keep it."""
    if family in STACKED:
        monkeypatch.setitem(OWN, family, STACKED[family])
    model = reference(family)
    model.save_pretrained(tmp_path / "base")
    with torch.inference_mode():
        base = model(torch.tensor([TOKENS])).logits[0].log_softmax(-1)
    expected = add(
        model, tmp_path / "adapter", 0, r=4, target_modules=["o_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
    )  # fmt: skip
    only = add(
        model, tmp_path / "only", 1, r=3, lora_alpha=5, target_modules=[],
        target_parameters=["experts.down_proj"],
    )  # fmt: skip
    own, slots = opened(tmp_path / "base", max_loras=2, max_lora_rank=8)
    for slot, name in enumerate(("adapter", "only")):
        slots.place(slot, slots.read(str(tmp_path / name)))
    found = run(own, slots, [0, -1, 1, 0])
    assert float((expected - base).abs().max()) > 0.1
    assert float((only - base).abs().max()) > 0.1
    for one, wanted in zip(found, (expected, base, only, expected), strict=True):
        assert_close(one, wanted)
