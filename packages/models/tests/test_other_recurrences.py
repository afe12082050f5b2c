"""Families with recurrences of their own kinds, or with latent attention beside them, against
transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_families_conformance import FamilyConformance
from test_recurrent_families import ATTENTION, TINY

from headrace_testing.model.decoders import Checkpoint


class TestKimiLinear(FamilyConformance):
    """Both mixers, a dense layer, groups of experts; names as transformers writes them."""

    flips_ties = False

    def hf_class(self) -> Any:
        from transformers import KimiLinearForCausalLM

        return KimiLinearForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import KimiLinearConfig

        own = {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"], "kv_lora_rank": 12,
            "qk_rope_head_dim": 6, "qk_nope_head_dim": 10, "v_head_dim": 14, "n_group": 2,
            "topk_group": 1, "num_local_experts": 6, "num_experts_per_tok": 2,
            "moe_intermediate_size": 20, "n_shared_experts": 2, "linear_head_dim": 18,
            "linear_num_heads": 2, "linear_conv_kernel_dim": 3,
        }  # fmt: skip
        return KimiLinearConfig(
            **{**TINY, **ATTENTION, "num_key_value_heads": 4, **own, **overrides}
        )


class TestRecurrentGemma(FamilyConformance):
    """Windows shorter than the prompt, one key-value head."""

    def hf_class(self) -> Any:
        from transformers import RecurrentGemmaForCausalLM

        return RecurrentGemmaForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import RecurrentGemmaConfig

        own = {"attention_window_size": 9, "conv1d_width": 3, "logits_soft_cap": 5.0,
               "block_types": ["recurrent", "attention"], "num_key_value_heads": 1}  # fmt: skip
        kept = {k: v for k, v in ATTENTION.items() if k != "max_position_embeddings"}
        return RecurrentGemmaConfig(**{**TINY, **kept, **own, **overrides})


class TestRwkv(FamilyConformance):
    """The inner width of the MLPs is another than by default."""

    def hf_class(self) -> Any:
        from transformers import RwkvForCausalLM

        return RwkvForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import RwkvConfig

        own = {"attention_hidden_size": 48, "intermediate_size": 60, "rescale_every": 0,
               "context_length": 64}  # fmt: skip
        return RwkvConfig(**{**TINY, **own, **overrides})


class TestRwkvHalved(TestRwkv):
    """transformers halves the stream once, and the weights of what follows."""

    def hf_config(self, **overrides: Any) -> Any:
        return super().hf_config(**{"rescale_every": 2, **overrides})

    def test_sharded_checkpoint_equals_single(self, *_: Any) -> None:
        pytest.skip("the reference's own weights are halved by now")

    def test_an_adapter_of_all_linear_modules(self, *_: Any) -> None:
        pytest.skip("the reference's own weights are halved by now")


class TestZamba(FamilyConformance):
    """Two layers share a transformer; two heads in each mixer."""

    no_stages = "a way of its own"
    without_adapters = ("shared_transf",)
    flips_ties = False  # the reference would untie the transformers too

    def make_checkpoint(self, folder: Path, seed: int = 0, **overrides: Any) -> Checkpoint:
        """With smaller weights: float32 is not enough for larger ones, for transformers either."""
        made = super().make_checkpoint(folder, seed, **overrides)
        with torch.no_grad():
            for name, parameter in made.reference.named_parameters():
                if parameter.dim() > 1 and not name.endswith(("A_log", "embed_tokens.weight")):
                    parameter.mul_(0.4)
        made.reference.save_pretrained(folder)
        return made

    def hf_class(self) -> Any:
        from transformers import ZambaForCausalLM

        return ZambaForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import ZambaConfig

        own = {"layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
               "num_hidden_layers": 4, "mamba_d_state": 6, "mamba_d_conv": 3, "mamba_dt_rank": 5,
               "mamba_proj_bias": True}  # fmt: skip
        return ZambaConfig(**{**TINY, **ATTENTION, **own, **overrides})


class TestZamba2(TestZamba):
    """Two transformers in turns, with rotary positions and both kinds of adapters."""

    def hf_class(self) -> Any:
        from transformers import Zamba2ForCausalLM

        return Zamba2ForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import Zamba2Config

        own = {"layers_block_type": ["hybrid", "hybrid", "hybrid"],
               "num_hidden_layers": 3, "mamba_d_state": 6, "mamba_d_conv": 3, "n_mamba_heads": 6,
               "mamba_ngroups": 2, "chunk_size": 8, "num_mem_blocks": 2, "adapter_rank": 7,
               "use_shared_attention_adapter": True, "use_mem_rope": True, "num_key_value_heads": 4,
               "add_bias_linear": True}  # fmt: skip
        return Zamba2Config(**{**TINY, **ATTENTION, **own, **overrides})
