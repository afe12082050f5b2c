"""xLSTM against transformers."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from model_families_conformance import FamilyConformance
from relaid_conformance import rewrite
from safetensors.torch import load_file, save_file

from headrace_core.errors import UnsupportedModel
from headrace_core.model import CausalLM
from headrace_testing.model.decoders import Checkpoint, PagedDriver, ThreadRank, build_context

FUSED = {
    "qkv_opreact": ("q", "k", "v", "ogate_preact"),
    "ifgate_preact": ("igate_preact", "fgate_preact"),
    "proj_up_gate_z": ("proj_up_gate", "proj_up"),
}


class TestXLSTM(FamilyConformance):
    """Keys narrower than values, caps that matter."""

    flips_ties = False

    def hf_class(self) -> Any:
        from transformers import xLSTMForCausalLM

        return xLSTMForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import xLSTMConfig

        own = {
            "vocab_size": 131, "hidden_size": 128, "num_hidden_layers": 2, "num_blocks": 2,
            "num_heads": 4, "qk_dim_factor": 0.5, "ffn_proj_factor": 1.3, "gate_soft_cap": 3.0,
            "ffn_round_up_to_multiple_of": 8, "output_logit_soft_cap": 4.0, "chunk_size": 16,
            "norm_eps": 1e-5, "autocast_kernel_dtype": "float32", "pad_token_id": 0,
            "bos_token_id": 1, "eos_token_id": 2,
        }  # fmt: skip
        return xLSTMConfig(**{**own, **overrides})

    def test_fused_projections(
        self, checkpoint: Checkpoint, model: CausalLM, tmp_path: Path
    ) -> None:
        """transformers makes no such model; checkpoints may be so."""
        checkpoint.reference.save_pretrained(tmp_path)
        file = tmp_path / "model.safetensors"
        tensors = load_file(file)
        for whole, parts in FUSED.items():
            last = f".{parts[0]}"
            for name in [n for n in tensors if n.rpartition(".")[0].endswith(last)]:
                layer, suffix = name.rsplit(last, 1)
                pieces = [tensors.pop(f"{layer}.{part}{suffix}") for part in parts]
                tensors[f"{layer}.{whole}{suffix}"] = torch.cat(pieces)
        save_file(tensors, file, metadata={"format": "pt"})
        rewrite(tmp_path, weight_mode="fused")
        prompt = self.prompt(9)
        logits = PagedDriver(self.open(tmp_path)).step({"a": prompt})
        assert torch.equal(logits, PagedDriver(model).step({"a": prompt}))

    @pytest.mark.parametrize("factor", [1e-9, 1e20])
    def test_heads_of_no_sensible_size_are_refused(
        self, checkpoint: Checkpoint, factor: float
    ) -> None:
        for name in ("qk_dim_factor", "v_dim_factor"):
            with pytest.raises(UnsupportedModel, match="num_heads = 4: must divide"):
                self.open(checkpoint.path, hf_overrides={name: factor})
        with pytest.raises(UnsupportedModel, match="ffn_proj_factor gives"):
            self.open(checkpoint.path, hf_overrides={"ffn_proj_factor": 1e20})

    def test_more_ranks_than_heads_are_refused(self, checkpoint: Checkpoint) -> None:
        """They would have the same heads, and a sum of both."""
        info = self.resolve(checkpoint.path, max_model_len=self.max_model_len)
        rank = ThreadRank(0, [None] * 8, threading.Barrier(8))
        with pytest.raises(UnsupportedModel, match=r"heads = 4 must be divisible by .* = 8"):
            self.load(info, build_context(info, communicator=rank), load_format="dummy")
