"""ZAYA against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_families_conformance import FamilyConformance

from headrace_core.errors import UnsupportedModel
from headrace_testing.model.decoders import Checkpoint


class TestZaya(FamilyConformance):
    """Two convolutions of other lengths, a window shorter than the prompt, tokens that skip the experts."""

    no_stages = "a way of its own"
    tensor_parallel = 1

    def hf_class(self) -> Any:
        from transformers import ZayaForCausalLM

        return ZayaForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import ZayaConfig

        own = {
            "vocab_size": 131, "hidden_size": 48, "num_hidden_layers": 3, "head_dim": 12,
            "num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 20,
            "num_experts": 5, "router_hidden_size": 14, "cca_time0": 3, "cca_time1": 3,
            "layer_types": ["hybrid", "hybrid_sliding", "hybrid"], "sliding_window": 9,
            "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "pad_token_id": 0,
            "bos_token_id": 1, "eos_token_id": 2,
        }  # fmt: skip
        return ZayaConfig(**{**own, **overrides})

    def make_checkpoint(self, folder: Path, seed: int = 0, **overrides: Any) -> Checkpoint:
        made = super().make_checkpoint(folder, seed, **overrides)
        for layer in made.reference.model.layers:
            biases = layer.mlp.gate.balancing_biases
            biases.copy_(torch.linspace(-0.2, 0.2, biases.shape[0]))
        made.reference.save_pretrained(folder)
        return made

    def test_some_skip_the_experts(self, checkpoint: Checkpoint) -> None:
        prompt = torch.tensor([self.prompt(self.prompt_len)])
        chosen = []
        hooks = [
            layer.mlp.gate.register_forward_hook(lambda *call: chosen.append(call[2][1]))
            for layer in checkpoint.reference.model.layers
        ]
        checkpoint.reference(prompt)
        for hook in hooks:
            hook.remove()
        skipped = torch.cat(chosen) == 0
        assert bool(skipped.any())
        assert not bool(skipped.all())

    def test_no_matrix_of_gigabytes(self, checkpoint: Checkpoint) -> None:
        with pytest.raises(UnsupportedModel, match="channels of queries and keys: must be at most"):
            self.open(checkpoint.path, hf_overrides={"num_attention_heads": 2**20})
