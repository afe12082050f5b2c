"""``LLM.apply_model`` with functions that look at weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM
from headrace_testing.model.decoders import randomise

SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "bos_token_id": 1, "eos_token_id": 2, "attention_bias": True,
}  # fmt: skip
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "num_threads": 1, "max_model_len": 64, "skip_tokenizer_init": True,
    "kv_cache_memory_bytes": 4 << 20, "use_tqdm_on_load": False,
}  # fmt: skip


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def llama(request: Any, tmp_path_factory: Any) -> tuple[Path, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(**SIZES, tie_word_embeddings=request.param)
    model = LlamaForCausalLM._from_config(config, dtype=torch.float32)
    randomise(model.eval())
    model.save_pretrained(folder)
    return folder, model


def total(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("implementation", ["headrace", "transformers"])
def test_parameters_of_a_plain_model(llama: tuple[Path, Any], implementation: str) -> None:
    folder, reference = llama
    with LLM(str(folder), model_impl=implementation, **SETTINGS) as llm:
        [count] = llm.apply_model(total)
        [named] = llm.apply_model(lambda model: dict(model.named_parameters()))
        [state] = llm.apply_model(lambda model: model.state_dict())
        [(device, dtype)] = llm.apply_model(
            lambda model: next((p.device.type, p.dtype) for p in model.parameters())
        )
        assert count == total(reference)
        assert (device, dtype) == ("cpu", torch.float32)
        assert list(named) == list(state)
        own = dict(reference.named_parameters())
        [qkv] = [t for n, t in named.items() if "0" in n.split(".") and n.endswith("weight") and
                 t.shape == (64, 32)]  # fmt: skip
        parts = [own[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qkv"]
        torch.testing.assert_close(qkv, torch.cat(parts), rtol=0, atol=0)
        norms = [t for n, t in named.items() if t.shape == (32,) and "norm" in n]
        assert len(norms) == 5
        assert torch.equal(norms[-1], own["model.norm.weight"])
        tables = [t for t in state.values() if t.shape == (128, 32)]
        assert torch.equal(tables[0], own["model.embed_tokens.weight"])
        assert len(tables) == (1 if reference.config.tie_word_embeddings else 2)


def test_parameters_of_a_quantized_model(llama: tuple[Path, Any]) -> None:
    """Weights that are integers come as the kernels hold them."""
    with LLM(str(llama[0]), quantization="int8", **SETTINGS) as llm:
        [kinds] = llm.apply_model(
            lambda model: {name: (p.dtype, p.numel()) for name, p in model.named_parameters()}
        )
    assert {dtype for dtype, _ in kinds.values()} >= {torch.float32, torch.uint8}
    assert all(size for _, size in kinds.values())
    assert len(kinds) == len(set(kinds))
