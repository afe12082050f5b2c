"""Gated decoders that transformers knows, each on a tiny config in which its own features matter."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from model_families_conformance import FamilyConformance
from test_families import LLAMA3_ROPE, TINY

pytestmark = pytest.mark.spec("MODEL-TEXTGEN-LLAMA")


class GatedConformance(FamilyConformance):
    """What is left for a class: what transformers calls the family, and what its config sets."""

    stem: ClassVar[str]
    own: ClassVar[dict[str, Any]] = {}

    def hf_class(self) -> Any:
        import transformers

        return getattr(transformers, f"{self.stem}ForCausalLM")

    def hf_config(self, **overrides: Any) -> Any:
        import transformers

        make = getattr(transformers, f"{self.stem}Config")
        return make(**{**TINY, **self.own, **overrides})


class TestArcee(GatedConformance):
    stem = "Arcee"
    own: ClassVar = {"head_dim": 22, "attention_bias": True, "mlp_bias": True}


class TestNemotron(GatedConformance):
    """A quarter of each head turns; the default is a half."""

    stem = "Nemotron"
    own: ClassVar = {
        "head_dim": 24, "attention_bias": True, "norm_eps": 0.03,
        "rope_parameters": {"rope_theta": 500.0, "rope_type": "default",
                            "partial_rotary_factor": 0.25},
    }  # fmt: skip


class TestNemotronByDefault(GatedConformance):
    stem = "Nemotron"
    own: ClassVar = {"head_dim": 24, "mlp_bias": True}


class TestJais2(GatedConformance):
    stem = "Jais2"
    own: ClassVar = {"head_dim": 22, "layer_norm_eps": 0.03}


class TestSeedOss(GatedConformance):
    stem = "SeedOss"
    own: ClassVar = {"head_dim": 22, "attention_out_bias": True, "mlp_bias": True}


class TestCwm(GatedConformance):
    stem = "Cwm"
    own: ClassVar = {
        "num_hidden_layers": 5, "head_dim": 22, "sliding_window": 7, "rope_parameters": LLAMA3_ROPE,
    }  # fmt: skip


class TestMinistral(GatedConformance):
    stem = "Ministral"
    own: ClassVar = {
        "head_dim": 22, "sliding_window": 7,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    }  # fmt: skip


MULTIPLIERS = {
    "embedding_multiplier": 3.0, "logits_scaling": 0.7, "residual_multiplier": 0.4,
    "attention_multiplier": 0.3,
}  # fmt: skip


class TestGranite(GatedConformance):
    stem = "Granite"
    own: ClassVar = {**MULTIPLIERS, "attention_bias": True, "mlp_bias": True}


class TestHyperCLOVAX(GatedConformance):
    stem = "HyperCLOVAX"
    own: ClassVar = {**MULTIPLIERS, "head_dim": 22, "attention_multiplier": None}


class TestHyperCLOVAXWithoutPostNorm(GatedConformance):
    stem = "HyperCLOVAX"
    own: ClassVar = {**MULTIPLIERS, "use_post_norm": False}


@pytest.mark.spec("MODEL-TEXTGEN-GEMMA-COHERE-GLM")
class TestVaultGemma(GatedConformance):
    stem = "VaultGemma"
    own: ClassVar = {
        "head_dim": 20, "sliding_window": 7, "query_pre_attn_scalar": 30,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 6.0,
    }  # fmt: skip


class TestSmolLM3(GatedConformance):
    """The third layer has no positions, and as windows are used, one."""

    stem = "SmolLM3"
    own: ClassVar = {
        "no_rope_layer_interval": 3, "attention_bias": True, "use_sliding_window": True,
        "sliding_window": 7,
    }  # fmt: skip


class TestExaone4(GatedConformance):
    stem = "Exaone4"
    own: ClassVar = {"num_hidden_layers": 4, "sliding_window": 7, "rope_parameters": LLAMA3_ROPE}


class TestExaone4WithoutWindows(GatedConformance):
    """EXAONE 4.0 1.2B."""

    stem = "Exaone4"
    own: ClassVar = {"sliding_window": None, "layer_types": ["full_attention"] * 3}
