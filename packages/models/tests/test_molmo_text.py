"""The language model of Molmo beside Qwen2 and OLMo 2, whose numbers under Molmo's names it has."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import pytest
import torch
from relaid_conformance import RelaidConformance
from test_relaid_families import QKV, TINY, fused
from torch import Tensor

from headrace_core.errors import UnsupportedModel
from headrace_testing.model.decoders import Checkpoint

ANSWERS = 120
"""Tokens that the head has rows for, of 131."""
SPELLS = {
    r"^model\.layers": "model.transformer.blocks",
    r"^model\.norm": "model.transformer.ln_f",
    r"^lm_head": "model.transformer.ff_out",
    r"\.self_attn\.o_proj": ".attn_out",
    r"\.self_attn\.": ".",
    r"\.mlp\.down_proj": ".ff_out",
    r"\.mlp\.": ".",
    "input_layernorm": "attn_norm",
}
TABLE = "model.transformer.wte"


class MolmoConformance(RelaidConformance):
    published = "MolmoTextForCausalLM"
    flips_ties = False
    own: ClassVar[dict[str, Any]]
    norms: ClassVar[dict[str, str]]

    def config_of(self, config: dict[str, Any]) -> dict[str, Any]:
        kept = {key: value for key, value in config.items() if key != "rms_norm_eps"}
        both = 2 * config["intermediate_size"]
        return {
            **kept, **self.own, "model_type": "molmo", "embedding_size": ANSWERS, "intermediate_size": both,
            "layer_norm_eps": config["rms_norm_eps"], "layer_norm_type": "rms", "weight_tying": False,
        }  # fmt: skip

    def tensors_of(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        table = tensors.pop("model.embed_tokens.weight")
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:ANSWERS]
        tensors = fused(tensors, QKV, "att_proj")
        tensors = fused(tensors, ("up_proj", "gate_proj"), "ff_proj")
        spelled = {}
        for name, tensor in tensors.items():
            for pattern, own in {**SPELLS, **self.norms}.items():
                name = re.sub(pattern, own, name)
            spelled[name] = tensor
        first = {f"{TABLE}.embedding": table[:ANSWERS], f"{TABLE}.new_embedding": table[ANSWERS:]}
        return {**spelled, **first}

    def logits(self, model: Any, ids: Tensor, mask: Tensor | None) -> Tensor:
        found = super().logits(model, ids, mask).clone()
        found[..., ANSWERS:] = -3e4
        return found


class TestMolmo7D(MolmoConformance):
    own: ClassVar = {"qkv_bias": True, "norm_after": False, "attention_layer_norm": False}
    norms: ClassVar = {"post_attention_layernorm": "ff_norm"}

    def hf_class(self) -> Any:
        from transformers import Qwen2ForCausalLM

        return Qwen2ForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import Qwen2Config

        return Qwen2Config(**{**TINY, "rope_theta": 3000.0, **overrides})

    @pytest.mark.parametrize(
        ("change", "named"),
        [({"layer_norm_type": "low_precision"}, "layer_norm_type"), ({"clip_qkv": 8.0}, "clip_qkv"),
         ({"weight_tying": True}, "weight_tying"), ({"embedding_size": 131}, "vocab_size = 131")],
    )  # fmt: skip
    def test_refused(self, checkpoint: Checkpoint, change: dict[str, Any], named: str) -> None:
        with pytest.raises(UnsupportedModel, match=named):
            self.open(checkpoint.path, hf_overrides=change)

    def test_marks_are_never_answers(self, checkpoint: Checkpoint) -> None:
        model = self.open(checkpoint.path)
        found = model.compute_logits(torch.ones(2, TINY["hidden_size"]))
        assert float(found[:, ANSWERS:].max()) < float(found[:, :ANSWERS].min()) - 1e4


class TestMolmo7O(MolmoConformance):
    own: ClassVar = {"qkv_bias": False, "norm_after": True, "attention_layer_norm": True}
    norms: ClassVar = {
        "post_attention_layernorm": "attn_norm",
        "post_feedforward_layernorm": "ff_norm",
    }

    def hf_class(self) -> Any:
        from transformers import Olmo2ForCausalLM

        return Olmo2ForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import Olmo2Config

        return Olmo2Config(**{**TINY, **overrides})
