"""The GPTs and their kin against transformers, on tiny configs in which each of their features matters."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from model_families_conformance import FamilyConformance
from relaid_conformance import RelaidConformance, add, alibi_mask, renamed, rewrite
from torch import Tensor

from headrace_core.errors import UnsupportedModel, WeightsError
from headrace_models.layers.attention.alibi import alibi_slopes, alibi_slopes_around
from headrace_testing.model.decoders import Checkpoint, PagedDriver, build_context

IDS: dict[str, Any] = {"vocab_size": 131, "bos_token_id": 1, "eos_token_id": 2}
TINY: dict[str, Any] = {
    **IDS,
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
}
GPT2_TINY: dict[str, Any] = {
    **IDS, "n_embd": 72, "n_layer": 3, "n_head": 4, "n_positions": 96, "n_inner": 100,
}  # fmt: skip


class TestGPT2ByLayer(FamilyConformance):
    """Scores that are less the higher the layer."""

    def hf_class(self) -> Any:
        from transformers import GPT2LMHeadModel

        return GPT2LMHeadModel

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import GPT2Config

        own = {"scale_attn_by_inverse_layer_idx": True}
        return GPT2Config(**{**GPT2_TINY, **own, **overrides})


class TestGPTBigCode(FamilyConformance):
    """All heads share one key and value."""

    def hf_class(self) -> Any:
        from transformers import GPTBigCodeForCausalLM

        return GPTBigCodeForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import GPTBigCodeConfig

        return GPTBigCodeConfig(**{**GPT2_TINY, **overrides})


class TestGPTBigCodeOfManyKeys(TestGPTBigCode):
    """Stored head by head."""

    def hf_config(self, **overrides: Any) -> Any:
        return super().hf_config(**{"multi_query": False, **overrides})


class TestStarcoder2(FamilyConformance):
    def hf_class(self) -> Any:
        from transformers import Starcoder2ForCausalLM

        return Starcoder2ForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import Starcoder2Config

        own = {"num_key_value_heads": 2, "sliding_window": 9, "norm_epsilon": 1e-3}
        return Starcoder2Config(**{**TINY, **own, **overrides})


class TestGPTJ(FamilyConformance):
    """A third of each head turns."""

    def hf_class(self) -> Any:
        from transformers import GPTJForCausalLM

        return GPTJForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import GPTJConfig

        return GPTJConfig(**{**GPT2_TINY, "rotary_dim": 6, **overrides})


class TestCodeGen(FamilyConformance):
    def hf_class(self) -> Any:
        from transformers import CodeGenForCausalLM

        return CodeGenForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import CodeGenConfig

        return CodeGenConfig(**{**GPT2_TINY, "n_ctx": 96, "n_head": 8, "n_embd": 80, "rotary_dim": 6,
                                **overrides})  # fmt: skip


class TestGPTNeoX(FamilyConformance):
    def hf_class(self) -> Any:
        from transformers import GPTNeoXForCausalLM

        return GPTNeoXForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import GPTNeoXConfig

        own = {"rotary_pct": 0.34, "rotary_emb_base": 500, "layer_norm_eps": 1e-3}
        return GPTNeoXConfig(**{**TINY, **own, **overrides})


class TestGPTNeoXInSequence(TestGPTNeoX):
    """One half after the other; the config as transformers 4 wrote it."""

    def hf_config(self, **overrides: Any) -> Any:
        own = {"use_parallel_residual": False, "attention_bias": False}
        return super().hf_config(**{**own, **overrides})

    def make_checkpoint(self, folder: Path, seed: int = 0, **overrides: Any) -> Checkpoint:
        made = super().make_checkpoint(folder, seed, **overrides)
        rewrite(folder, drop=("rope_parameters",), rotary_pct=0.34, rotary_emb_base=500)
        return made


class TestGPTNeoXJapanese(FamilyConformance):
    def hf_class(self) -> Any:
        from transformers import GPTNeoXJapaneseForCausalLM

        return GPTNeoXJapaneseForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import GPTNeoXJapaneseConfig

        own = {"intermediate_multiple_size": 2, "rotary_pct": 0.34, "rotary_emb_base": 300}
        return GPTNeoXJapaneseConfig(**{**TINY, **own, **overrides})


class TestGPTNeo(FamilyConformance):
    """Windows on two layers of three."""

    def hf_class(self) -> Any:
        from transformers import GPTNeoForCausalLM

        return GPTNeoForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import GPTNeoConfig

        own = {"num_layers": 3, "num_heads": 4, "hidden_size": 72, "intermediate_size": 100,
               "max_position_embeddings": 96, "window_size": 9,
               "attention_types": [[["local"], 2], [["global"], 1]]}  # fmt: skip
        return GPTNeoConfig(**{**IDS, **own, **overrides})


class TestPhi(FamilyConformance):
    def hf_class(self) -> Any:
        from transformers import PhiForCausalLM

        return PhiForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import PhiConfig

        own = {"num_key_value_heads": 2, "qk_layernorm": True, "partial_rotary_factor": 0.56}
        return PhiConfig(**{**TINY, **own, **overrides})


class TestPersimmon(FamilyConformance):
    def hf_class(self) -> Any:
        from transformers import PersimmonForCausalLM

        return PersimmonForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import PersimmonConfig

        own = {"num_hidden_layers": 2, "partial_rotary_factor": 0.67}
        return PersimmonConfig(**{**TINY, **own, **overrides})


class TestBloom(FamilyConformance):
    """As many heads as no power of two."""

    def hf_class(self) -> Any:
        from transformers import BloomForCausalLM

        return BloomForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import BloomConfig

        own = {"hidden_size": 72, "n_layer": 3, "n_head": 6}
        return BloomConfig(**{**IDS, **own, **overrides})


class TestMpt(FamilyConformance):
    """As many heads as no power of two, clipped projections, scores scaled by the config."""

    def hf_class(self) -> Any:
        from transformers import MptForCausalLM

        return MptForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import MptConfig

        own = {"d_model": 72, "n_layers": 3, "n_heads": 6, "max_seq_len": 96,
               "attn_config": {"clip_qkv": 1.5, "softmax_scale": 0.4}}  # fmt: skip
        return MptConfig(**{**IDS, **own, **overrides})

    @pytest.mark.parametrize("asked", [{"alibi": False}, {"prefix_lm": True}, {"qk_ln": True}])
    def test_what_it_does_not_do(self, checkpoint: Checkpoint, asked: dict[str, Any]) -> None:
        overrides = {"attn_config": asked}
        with pytest.raises(UnsupportedModel, match=next(iter(asked))):
            self.open(checkpoint.path, hf_overrides=overrides)


class TestFalcon7B(FamilyConformance):
    """One key-value head, one norm for both halves."""

    def hf_class(self) -> Any:
        from transformers import FalconForCausalLM

        return FalconForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import FalconConfig

        own = {**TINY, "ffn_hidden_size": 100}
        del own["intermediate_size"]
        return FalconConfig(**{**own, **overrides})


class TestFalcon40B(TestFalcon7B):
    """Grouped heads, a norm for each half, biases."""

    def hf_config(self, **overrides: Any) -> Any:
        own = {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}
        return super().hf_config(**{**own, **overrides})


class TestFalcon11B(TestFalcon40B):
    """Grouped heads, one norm."""

    def hf_config(self, **overrides: Any) -> Any:
        return super().hf_config(**{"num_ln_in_parallel_attn": 1, **overrides})


class TestFalconRW(TestFalcon7B):
    """ALiBi, one half after the other. As many heads as a power of two, for which the reference's
    slopes are exact in the bfloat16 that it rounds them to; and its fused attention, for its own adds
    ALiBi twice."""

    def hf_config(self, **overrides: Any) -> Any:
        own = {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}
        return super().hf_config(**{**own, **overrides})

    def make_checkpoint(self, folder: Path, seed: int = 0, **overrides: Any) -> Checkpoint:
        made = super().make_checkpoint(folder, seed, **overrides)
        made.reference.config._attn_implementation = "sdpa"
        return made


class TestBioGpt(FamilyConformance):
    def hf_class(self) -> Any:
        from transformers import BioGptForCausalLM

        return BioGptForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import BioGptConfig

        return BioGptConfig(**{**TINY, **overrides})


class TestXGLM(FamilyConformance):
    def hf_class(self) -> Any:
        from transformers import XGLMForCausalLM

        return XGLMForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import XGLMConfig

        own = {"d_model": 72, "num_layers": 3, "attention_heads": 4, "ffn_dim": 100,
               "max_position_embeddings": 96}  # fmt: skip
        return XGLMConfig(**{**IDS, **own, **overrides})


class TestOPT(FamilyConformance):
    def hf_class(self) -> Any:
        from transformers import OPTForCausalLM

        return OPTForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import OPTConfig

        own = {**TINY, "ffn_dim": 100, "word_embed_proj_dim": 72}
        del own["intermediate_size"]
        return OPTConfig(**{**own, **overrides})


class TestOPT350M(TestOPT):
    """Norms behind the halves, a smaller embedding."""

    without_adapters = ("project_(in|out)",)

    def hf_config(self, **overrides: Any) -> Any:
        own = {"do_layer_norm_before": False, "word_embed_proj_dim": 44}
        return super().hf_config(**{**own, **overrides})


class TestGalactica(TestOPT):
    """Norms without weights, no biases."""

    def hf_config(self, **overrides: Any) -> Any:
        own = {"enable_bias": False, "layer_norm_elementwise_affine": False,
               "activation_function": "gelu"}  # fmt: skip
        return super().hf_config(**{**own, **overrides})


class TestOpenAIGPT(FamilyConformance):
    def hf_class(self) -> Any:
        from transformers import OpenAIGPTLMHeadModel

        return OpenAIGPTLMHeadModel

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import OpenAIGPTConfig

        own = {**GPT2_TINY}
        del own["n_inner"]
        return OpenAIGPTConfig(**{**own, **overrides})


class TestCTRL(FamilyConformance):
    def hf_class(self) -> Any:
        from transformers import CTRLLMHeadModel

        return CTRLLMHeadModel

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import CTRLConfig

        own = {**GPT2_TINY, "dff": 100}
        del own["n_inner"]
        return CTRLConfig(**{**own, **overrides})


class TestModernBertDecoder(FamilyConformance):
    without_adapters = (r"lm_head\.dense",)

    def hf_class(self) -> Any:
        from transformers import ModernBertDecoderForCausalLM

        return ModernBertDecoderForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import ModernBertDecoderConfig

        own = {"local_attention": 14, "num_hidden_layers": 4, "norm_bias": True, "mlp_bias": True,
               "attention_bias": True, "classifier_bias": True, "pad_token_id": 0, "cls_token_id": 1,
               "sep_token_id": 2, "global_rope_theta": 900.0, "local_rope_theta": 50.0}  # fmt: skip
        return ModernBertDecoderConfig(**{**TINY, **own, **overrides})


class TestJAIS(RelaidConformance):
    """GPT-2 whose MLPs are gated and whose mask takes away by distance."""

    published = "JAISLMHeadModel"
    flips_ties = False
    multipliers: ClassVar[dict[str, Any]] = {
        "embeddings_scale": 2.5,
        "width_scale": 0.6,
        "scale_qk_dot_by_d": True,
    }

    def hf_class(self) -> Any:
        from transformers import GPT2LMHeadModel

        return GPT2LMHeadModel

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import GPT2Config

        own = {"n_head": 6, "tie_word_embeddings": False}
        return GPT2Config(**{**GPT2_TINY, **own, **overrides})

    def prepare(self, reference: Any) -> None:
        for block in reference.transformer.h:
            block.mlp = SwiGLU(72, 100)
            block.attn.scaling = 1 / 12

    def finish(self, reference: Any) -> None:
        reference.transformer.wpe.weight.zero_()
        words = reference.transformer.wte.weight
        reference.lm_head.weight.copy_(words / 2.5 * 0.6)

    def mask(self, length: int) -> Tensor:
        return alibi_mask(alibi_slopes(6), length)

    def config_of(self, config: dict[str, Any]) -> dict[str, Any]:
        own = {"activation_function": "swiglu", "position_embedding_type": "alibi",
               "tie_word_embeddings": True}  # fmt: skip
        return {**config, **own, **self.multipliers, "model_type": "jais"}

    def tensors_of(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        del tensors["transformer.wpe.weight"], tensors["lm_head.weight"]
        words = tensors.pop("transformer.wte.weight") / 2.5
        return {**tensors, "transformer.wte.weight": words}


class TestJAISFamily(TestJAIS):
    """The later models' names of the multipliers."""

    multipliers: ClassVar[dict[str, Any]] = {
        "mup_embeddings_scale": 2.5,
        "mup_output_alpha": 1.5,
        "mup_width_scale": 0.4,
        "mup_scale_qk_dot_by_d": True,
    }


class SwiGLU(torch.nn.Module):
    """As Jais has it: what ``c_fc2`` gives is the gate."""

    def __init__(self, size: int, inner: int) -> None:
        from transformers.pytorch_utils import Conv1D

        super().__init__()
        self.c_fc, self.c_fc2, self.c_proj = (
            Conv1D(inner, size),
            Conv1D(inner, size),
            Conv1D(size, inner),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c_proj(self.c_fc(x) * torch.nn.functional.silu(self.c_fc2(x)))
        return out


def test_slopes_are_the_authors() -> None:
    """Of 8 and of 12 heads, as Press et al. print them."""
    halves = [2.0**-power for power in range(1, 9)]
    between = [2.0 ** -(power + 0.5) for power in range(4)]
    torch.testing.assert_close(alibi_slopes(8), torch.tensor(halves))
    torch.testing.assert_close(alibi_slopes(12), torch.tensor(halves + between))


def test_slopes_of_mpt() -> None:
    """Of 6 heads: of the series of 8 the second, fourth, ..., then the first and third."""
    series = [2.0**-power for power in (2, 4, 6, 8, 1, 3)]
    torch.testing.assert_close(alibi_slopes_around(6, 8), torch.tensor(series))
    torch.testing.assert_close(
        alibi_slopes_around(4, 8), torch.tensor([0.25, 0.0625, 2**-6, 2**-8])
    )


class TestPublishedNames:
    """Files of the hub that differ from what transformers writes."""

    @pytest.mark.parametrize(
        ("suite", "prefix"),
        [(TestBloom, "transformer."), (TestOPT350M, "model."), (TestOpenAIGPT, "transformer.")],
    )
    def test_without_prefix(self, tmp_path: Path, suite: Any, prefix: str) -> None:
        made = suite().make_checkpoint(tmp_path)
        renamed(tmp_path, lambda name: name.removeprefix(prefix))
        self.check(suite(), made)

    def test_the_first_bloom(self, tmp_path: Path) -> None:
        made = TestBloom().make_checkpoint(tmp_path)
        rewrite(tmp_path, drop=("hidden_size", "n_head"), n_embed=72, num_attention_heads=6)
        self.check(TestBloom(), made)

    def test_the_first_falcon(self, tmp_path: Path) -> None:
        made = TestFalcon40B().make_checkpoint(tmp_path)
        rewrite(
            tmp_path,
            drop=("num_kv_heads", "num_hidden_layers", "num_attention_heads",
                  "new_decoder_architecture", "num_ln_in_parallel_attn"),
            architectures=["RWForCausalLM"], model_type="RefinedWeb", n_layer=3, n_head=4, n_head_kv=2,
        )  # fmt: skip
        self.check(TestFalcon40B(), made)

    def test_mpt_by_its_own_name(self, tmp_path: Path) -> None:
        made = TestMpt().make_checkpoint(tmp_path)
        rewrite(tmp_path, architectures=["MPTForCausalLM"])
        self.check(TestMpt(), made)

    def test_masks_are_passed_over(self, tmp_path: Path) -> None:
        made = TestGPTNeoX().make_checkpoint(tmp_path)
        mask = torch.ones((1, 1, 96, 96), dtype=torch.bool)
        add(tmp_path, {"gpt_neox.layers.1.attention.bias": mask})
        self.check(TestGPTNeoX(), made)

    def check(self, suite: Any, made: Checkpoint) -> None:
        prompt = suite.prompt(17)
        logits = PagedDriver(suite.open(made.path)).step({"a": prompt})
        suite.assert_close(logits, made.logprobs(prompt))


def test_groups_that_do_not_divide(tmp_path: Path) -> None:
    suite = TestCodeGen()
    suite.make_checkpoint(tmp_path)
    rewrite(tmp_path, n_embd=54, n_head=3)
    info = suite.resolve(tmp_path, max_model_len=64)
    with pytest.raises(WeightsError, match=r"qkv_proj: parts of \[54, 54, 54\] rows are not 4"):
        suite.load(info, build_context(info), load_format="dummy")


@pytest.mark.parametrize(
    ("suite", "settings", "word"),
    [
        (TestGPTNeo, {"attention_types": [[["global"], 2]]}, "attention_types"),
        (TestGPTNeo, {"attention_types": 7}, "attention_types"),
        (TestBloom, {"apply_residual_connection_post_layernorm": True}, "post_layernorm"),
        (TestOPT, {"_remove_final_layer_norm": True}, "_remove_final_layer_norm"),
        (TestGPTBigCode, {"n_embd": "many"}, "n_embd"),
    ],
)
def test_configs_that_are_refused(
    tmp_path: Path, suite: Any, settings: dict[str, Any], word: str
) -> None:
    suite().make_checkpoint(tmp_path)
    rewrite(tmp_path, **settings)
    with pytest.raises(UnsupportedModel, match=word):
        suite().open(tmp_path)
