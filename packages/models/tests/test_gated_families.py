"""Gated decoders that transformers knows, each on a tiny config in which its own features matter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import test_kv_scales
import torch
from model_families_conformance import FamilyConformance
from safetensors.torch import load_file, save_file
from test_families import LLAMA3_ROPE, TINY

from headrace_core.errors import UnsupportedModel
from headrace_testing.model.decoders import PagedDriver


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


class TestMllama(GatedConformance):
    """Layers for images before, between and after those for text."""

    without_adapters = (r"layers\.[048]\.",)
    stem = "Mllama"
    own: ClassVar = {"num_hidden_layers": 9, "cross_attention_layers": [0, 4, 8],
                     "rope_parameters": LLAMA3_ROPE}  # fmt: skip

    def hf_config(self, **overrides: Any) -> Any:
        from transformers.models.mllama.configuration_mllama import MllamaTextConfig

        return MllamaTextConfig(**{**TINY, **self.own, **overrides})

    def test_its_weights_have_names(self, checkpoint: Any, model: Any) -> None:
        """Less than the files hold: no layer for images."""
        names = [name for name, _ in model.named_parameters()]
        assert len(set(names)) == len(names)
        assert not any(name.startswith(("layers.0.", "layers.4.", "layers.8.")) for name in names)

    @pytest.mark.parametrize("layers", [[9], [-1], list(range(9))])
    def test_layers_for_images_that_are_refused(
        self, checkpoint: Any, tmp_path: Path, layers: list[int]
    ) -> None:
        checkpoint.reference.save_pretrained(tmp_path)
        said = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(
            json.dumps({**said, "cross_attention_layers": layers})
        )
        with pytest.raises(UnsupportedModel, match="cross_attention_layers"):
            self.open(tmp_path)


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


PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25}


class TestCohere(GatedConformance):
    """Command R+: a LayerNorm with its own weight for every head."""

    stem = "Cohere"
    own: ClassVar = {"use_qk_norm": True, "logit_scale": 0.3, "layer_norm_eps": 0.03}


class TestCohereWithBiases(GatedConformance):
    stem = "Cohere"
    own: ClassVar = {"attention_bias": True, "logit_scale": 0.3}


class TestCohere2(GatedConformance):
    stem = "Cohere2"
    own: ClassVar = {"num_hidden_layers": 4, "sliding_window": 7, "logit_scale": 0.3}


class TestGlm(GatedConformance):
    stem = "Glm"
    own: ClassVar = {"head_dim": 24}


class TestGlm4(GatedConformance):
    stem = "Glm4"
    own: ClassVar = {"head_dim": 24, "rope_parameters": PARTIAL_ROPE, "attention_bias": False}


class TestHelium(GatedConformance):
    stem = "Helium"
    own: ClassVar = {"head_dim": 18, "attention_bias": True, "mlp_bias": True}


class TestErnie4_5(GatedConformance):
    stem = "Ernie4_5"
    own: ClassVar = {"head_dim": 24, "use_bias": True}


class TestOlmo(GatedConformance):
    stem = "Olmo"
    own: ClassVar = {"clip_qkv": 0.8, "attention_bias": True}


class TestOlmo2(GatedConformance):
    stem = "Olmo2"
    own: ClassVar = {"attention_bias": True, "rms_norm_eps": 0.03}


class TestOlmo3(GatedConformance):
    """The windows' base is not that of the full layer, which is scaled."""

    stem = "Olmo3"
    own: ClassVar = {
        "num_hidden_layers": 4, "sliding_window": 7,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 3000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    }  # fmt: skip


class TestStableLm(GatedConformance):
    stem = "StableLm"
    own: ClassVar = {"use_qkv_bias": True, "layer_norm_eps": 0.03, "hidden_size": 96}


class TestStableLm2(GatedConformance):
    """StableLM 2 12B: parallel halves, a LayerNorm stored for each head."""

    stem = "StableLm"
    own: ClassVar = {"use_parallel_residual": True, "qk_layernorm": True, "hidden_size": 96}


class TestHunYuanDense(GatedConformance):
    stem = "HunYuanDenseV1"
    own: ClassVar = {
        "head_dim": 22, "attention_bias": True,
        "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0,
                            "rope_theta": 500.0},
    }  # fmt: skip


class TestMinistral3(GatedConformance):
    """The prompt is longer than the original context, which queries feel."""

    stem = "Ministral3"
    own: ClassVar = {
        "head_dim": 22, "sliding_window": 21,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 500.0, "factor": 16.0, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 8,
            "llama_4_scaling_beta": 0.3,
        },
    }  # fmt: skip


class TestNanoChat(GatedConformance):
    stem = "NanoChat"
    own: ClassVar = {"final_logit_softcapping": 6.0, "attention_bias": True}


class TestNanoChatExtended(GatedConformance):
    """YaRN's factor on the rotation, which the norms behind it undo."""

    stem = "NanoChat"
    own: ClassVar = {
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0,
                            "original_max_position_embeddings": 16},
    }  # fmt: skip


class TestGraniteSWA(GatedConformance):
    """Three bases, one of them none."""

    stem = "GraniteSWA"
    own: ClassVar = {
        **MULTIPLIERS, "num_hidden_layers": 5, "sliding_window": 7,
        "layer_rope_theta": [500.0, 30.0, 0, 500.0, 0],
    }  # fmt: skip


class TestApertus(GatedConformance):
    stem = "Apertus"
    own: ClassVar = {"attention_bias": True, "rope_parameters": LLAMA3_ROPE}


class TestGemma3n(GatedConformance):
    """Two layers read the caches below, a window and none; sparse gates; a table that is too short."""

    no_stages = "a way of its own"
    without_adapters = ("altup_(un|proj)", "_coefs$", "per_layer_model")
    stem = "Gemma3n"
    own: ClassVar = {
        "num_hidden_layers": 5, "head_dim": 20, "sliding_window": 7, "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention",
                        "sliding_attention", "full_attention"],
        "intermediate_size": [100, 60, 100, 100, 80],
        "activation_sparsity_pattern": [0.8, 0.0, 0.6, 0.0, 0.0],
        "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 120, "altup_num_inputs": 3,
        "altup_active_idx": 1, "laurel_rank": 10, "final_logit_softcapping": 6.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 3000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    }  # fmt: skip

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import Gemma3nTextConfig

        return Gemma3nTextConfig(**{**TINY, **self.own, **overrides})


class TestGemma4(GatedConformance):
    """E2B: inputs for every layer, and wider MLPs above, where layers read the caches below."""

    no_stages = "a way of its own"
    without_adapters = ("per_layer_model",)
    stem = "Gemma4"
    own: ClassVar = {
        "num_hidden_layers": 5, "head_dim": 12, "global_head_dim": 20, "sliding_window": 7,
        "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": 131, "final_logit_softcapping": 6.0,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention",
                        "sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.4,
                               "rope_theta": 3000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    }  # fmt: skip

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import Gemma4TextConfig

        return Gemma4TextConfig(**{**TINY, **self.own, **overrides})


class TestGemma4Large(TestGemma4):
    """31B: no further inputs; layers without a window have few heads, whose values are their keys."""

    without_adapters = ()
    own: ClassVar = {
        **TestGemma4.own, "num_kv_shared_layers": 0, "use_double_wide_mlp": False,
        "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_key_value_heads": 4,
        "num_global_key_value_heads": 2, "use_bidirectional_attention": "vision",
    }  # fmt: skip


class TestGemma4Experts(TestGemma4Large):
    """26B-A4B: experts beside the MLP."""

    own: ClassVar = {
        **TestGemma4Large.own, "num_hidden_layers": 3, "enable_moe_block": True, "num_experts": 5,
        "top_k_experts": 2, "moe_intermediate_size": 40,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    }  # fmt: skip


class TestGemma4Unified(GatedConformance):
    """12B."""

    no_stages = "a way of its own"
    stem = "Gemma4Unified"
    own: ClassVar = {
        "num_hidden_layers": 4, "head_dim": 12, "global_head_dim": 20, "sliding_window": 7,
        "num_kv_shared_layers": 1, "rope_parameters": TestGemma4.own["rope_parameters"],
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }  # fmt: skip

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import Gemma4UnifiedTextConfig

        return Gemma4UnifiedTextConfig(**{**TINY, **self.own, **overrides})


class TestMellum(GatedConformance):
    """The second layer is dense."""

    stem = "Mellum"
    own: ClassVar = {
        "head_dim": 22, "attention_bias": True, "sliding_window": 7, "num_experts": 5,
        "num_experts_per_tok": 2, "moe_intermediate_size": 40,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 3000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    }  # fmt: skip


OLD_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500_000.0},
}
PUBLISHED: dict[str, tuple[GatedConformance, dict[str, Any], tuple[str, ...], dict[str, Any]]] = {
    "StableLM 3B 4E1T": (
        TestStableLm(), {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        ("layer_norm_eps", "rope_parameters"),
        {"architectures": ["StableLMEpochForCausalLM"], "norm_eps": 0.03, "rope_pct": 0.5},
    ),
    "OLMo 3": (
        TestOlmo3(), {"rope_parameters": OLD_ROPE}, ("rope_parameters", "layer_types"),
        {"rope_theta": 500_000.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    ),
    "EXAONE 4": (TestExaone4(), {}, ("layer_types",), {"sliding_window_pattern": "LLLG"}),
    "Command R7B": (TestCohere2(), {}, ("layer_types",), {"sliding_window_pattern": 4}),
    "GLM-4": (TestGlm(), {}, ("rope_parameters",), {"rope_theta": 10_000.0}),
    "Gemma 4 31B": (
        TestGemma4Large(), {}, ("per_layer_config",),
        {"global_head_dim": 20, "num_global_key_value_heads": 2},
    ),
}  # fmt: skip
"""Suite, what its config sets besides, keys that transformers writes, and what is published instead."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_configs_as_published(name: str, tmp_path: Path) -> None:
    suite, overrides, without, given = PUBLISHED[name]
    checkpoint = suite.make_checkpoint(tmp_path, **overrides)
    config = json.loads((tmp_path / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in without}
    (tmp_path / "config.json").write_text(json.dumps({**kept, **given}))
    prompt = suite.prompt(suite.prompt_len)
    logits = PagedDriver(suite.open(tmp_path)).step({"a": prompt})
    suite.assert_close(logits, checkpoint.logprobs(prompt))


@pytest.mark.parametrize("suite", [TestGemma3n(), TestGemma4()], ids=["3n", "4"])
def test_gemma_stores_keys_that_nobody_reads(suite: GatedConformance, tmp_path: Path) -> None:
    checkpoint = suite.make_checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.4.self_attn.{}.weight"
    unread = {name.format(kind): torch.ones(3, 2) for kind in ("k_proj", "v_proj", "k_norm")}
    assert not unread.keys() & tensors.keys()
    save_file({**tensors, **unread}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    prompt = suite.prompt(9)
    logits = PagedDriver(suite.open(tmp_path)).step({"a": prompt})
    suite.assert_close(logits, checkpoint.logprobs(prompt))


def test_layers_that_share_a_cache_share_its_scales(tmp_path: Path) -> None:
    suite = TestGemma4()
    checkpoint = suite.make_checkpoint(tmp_path)
    model = test_kv_scales.load((suite, tmp_path), test_kv_scales.reference_ops(), "int8")
    prompt = suite.prompt(test_kv_scales.PROMPT)
    test_kv_scales.measured(model, prompt)
    logits = PagedDriver(model).step({"a": prompt})
    specs = {name: layer.spec for name, layer in model.attention_layers().items()}
    shared = specs["model.layers.4.self_attn"]
    assert shared.kv_sharing_target == "model.layers.1.self_attn"
    assert shared.k_scale is specs[shared.kv_sharing_target].k_scale is not None
    logprobs = torch.log_softmax(logits, dim=-1)
    cosine = torch.cosine_similarity(logprobs, checkpoint.logprobs(prompt), dim=-1)
    assert float(cosine.min()) > 0.97


@pytest.mark.parametrize(
    ("suite", "given", "words"),
    [
        (TestExaone4(), {"sliding_window_pattern": "LXG"}, "'LXG': must be an integer, or letters"),
        (TestSmolLM3(), {"no_rope_layers": [1, 0]}, "no_rope_layers = .*a list of 3 numbers"),
        (TestApertus(), {"hidden_act": "silu"}, "hidden_act = 'silu': must be 'xielu'"),
        (TestMinistral3(), {"rope_parameters": {"llama_4_scaling_beta": -1}}, "beta = -1: must be"),
        (TestGemma3n(), {"num_kv_shared_layers": 5}, "no layer below has a cache that layer 0"),
        (TestGemma3n(), {"altup_active_idx": 3}, "altup_active_idx = 3: must be below"),
        (TestGemma3n(), {"intermediate_size": [7]}, "intermediate_size = .7.: must be a number"),
        (TestGemma3n(), {"activation_sparsity_pattern": [1, 0, 0, 0, 0]}, "from 0 to below 1"),
        (TestGemma4Large(), {"num_global_key_value_heads": 3, "per_layer_config": None},
         "num_global_key_value_heads = 3: must be a divisor"),
    ],
)  # fmt: skip
def test_wrong_values_are_named(
    suite: GatedConformance, given: dict[str, Any], words: str, tmp_path: Path
) -> None:
    suite.make_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    given = {**given, "sliding_window_pattern": given.get("sliding_window_pattern", 4)}
    unlisted = {"layer_types": None} if "L" in str(given["sliding_window_pattern"]) else {}
    (tmp_path / "config.json").write_text(json.dumps({**config, **unlisted, **given}))
    with pytest.raises(UnsupportedModel, match=words):
        suite.open(tmp_path)
