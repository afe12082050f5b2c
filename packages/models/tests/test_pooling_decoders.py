"""Decoders as embedders, against transformers on tiny configs; windows and rotary scaling matter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import test_families as families
import test_gpt_families as gpts
import test_relaid_families as relaid
from pooling_decoders import PoolingDecoderConformance

from headrace_core.errors import ConfigError, UnsupportedModel
from headrace_testing.model.decoders import Checkpoint


class TestQwen3Model(PoolingDecoderConformance):
    reference = "Qwen3Model"

    def test_a_language_model_embeds(self, tmp_path: Path) -> None:
        """Its head is passed over, tied or not."""
        import transformers

        for tied in (False, True):
            folder = tmp_path / str(tied)
            self.reference = "Qwen3ForCausalLM"
            whole = self.make_checkpoint(folder, tie_word_embeddings=tied)
            info = self.resolve(folder, runner="pooling")
            assert (info.runner, info.convert, info.architecture) == (
                "pooling", "embed", "Qwen3ForCausalLM"
            )  # fmt: skip
            base = Checkpoint(whole.reference.model, folder)
            assert isinstance(base.reference, transformers.Qwen3Model)
            prompts = self.prompts()
            for states, prompt in zip(self.hidden(self.open(folder), prompts), prompts):
                self.assert_close(states, self.expected(base, prompt))

    def test_by_itself_a_language_model_generates(self, tmp_path: Path) -> None:
        self.reference = "Qwen3ForCausalLM"
        self.make_checkpoint(tmp_path)
        assert self.resolve(tmp_path).runner == "generate"

    def test_it_must_be_converted(self, checkpoint: Checkpoint) -> None:
        with pytest.raises(ConfigError, match="auto, embed or classify"):
            self.resolve(checkpoint.path, convert="none")


class TestQwen2Model(PoolingDecoderConformance):
    reference = "Qwen2Model"
    generating = families.TestQwen2


class TestLlamaModel(PoolingDecoderConformance):
    reference = "LlamaModel"
    generating = families.TestLlama


class TestMistralModel(PoolingDecoderConformance):
    reference = "MistralModel"
    generating = families.TestMistral


class TestGemmaModel(PoolingDecoderConformance):
    reference = "GemmaModel"
    generating = families.TestGemma


class TestGemma2Model(PoolingDecoderConformance):
    reference = "Gemma2Model"
    generating = families.TestGemma2


class TestGemma3TextModel(PoolingDecoderConformance):
    reference = "Gemma3TextModel"
    generating = families.TestGemma3


class TestBloomModel(PoolingDecoderConformance):
    """ALiBi, which looks back only."""

    reference = "BloomModel"
    generating = gpts.TestBloom
    prefix = "transformer."


class TestOPTModel(PoolingDecoderConformance):
    reference = "OPTModel"
    generating = gpts.TestOPT

    def test_a_smaller_embedding_is_refused(self, tmp_path: Path) -> None:
        suite = gpts.TestOPT350M()
        suite.make_checkpoint(tmp_path)
        with pytest.raises(UnsupportedModel, match="word_embed_proj_dim = 44"):
            suite.open(tmp_path, runner="pooling")


class TestPhi3Model(PoolingDecoderConformance):
    reference = "Phi3Model"
    generating = families.TestPhi3


class TestGPT2Model(PoolingDecoderConformance):
    reference = "GPT2Model"
    generating = families.TestGPT2
    prefix = "transformer."


class TestMixtralModel(PoolingDecoderConformance):
    reference = "MixtralModel"
    generating = families.TestMixtral
    a_matrix = ".1.self_attn"


class _Bidirectional(PoolingDecoderConformance):
    causal: ClassVar[bool] = False

    def hf_config(self, **overrides: Any) -> Any:
        return super().hf_config(**{"is_causal": False, **overrides})


class TestBidirectionalLlama(_Bidirectional):
    """NVIDIA's retrievers: the name says it, and the config which rows are pooled."""

    reference = "LlamaModel"
    generating = families.TestLlama
    default_pooling = "MEAN"

    def make_checkpoint(self, folder: Path, seed: int = 0, **overrides: Any) -> Checkpoint:
        own = {"architectures": ["LlamaBidirectionalModel"], "pooling": "avg"}
        found = super().make_checkpoint(folder, seed, **overrides)
        found.reference.config.update(own)
        found.reference.config.save_pretrained(folder)
        rename_architecture(folder, "LlamaBidirectionalModel")
        return found


class TestBidirectionalQwen2(_Bidirectional):
    """gte-Qwen2: the config says it."""

    reference = "Qwen2Model"
    generating = families.TestQwen2


class TestBidirectionalGemma3(_Bidirectional):
    """embeddinggemma. Windows reach to both sides."""

    reference = "Gemma3TextModel"
    generating = families.TestGemma3

    def hf_config(self, **overrides: Any) -> Any:
        own = {"use_bidirectional_attention": True, "sliding_window": 8}
        return PoolingDecoderConformance.hf_config(self, **{**own, **overrides})


class TestGritLM:
    """Instructions are attended to and left out of the mean."""

    overrides: ClassVar[dict[str, Any]] = {"architectures": ["GritLM"]}

    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> Checkpoint:
        suite = _Bidirectional()
        suite.reference, suite.generating = "MistralModel", families.TestMistral
        found = suite.make_checkpoint(tmp_path, sliding_window=None)
        pieces = {"<": 40, "|": 41, "embed": 42, ">": 43, "<0x0A>": 44}
        content = {"model": {"type": "BPE", "vocab": pieces}, "added_tokens": []}
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        return found

    def test_against_transformers(self, checkpoint: Checkpoint) -> None:
        suite = _Bidirectional()
        model = suite.open(checkpoint.path, hf_overrides=self.overrides)
        marker = [40, 41, 42, 41, 43, 44]
        prompts = [[1, 7, 8, *marker, 9, 10, 11], [1, *marker, 12], [1, 5, 6], [1, *marker]]
        starts = [9, 7, 1, 6]
        wanted = [suite.params("embed", normalize=False)] * len(prompts)
        for result, prompt, start in zip(suite.pooled(model, prompts, wanted), prompts, starts):
            suite.assert_close(result, suite.expected(checkpoint, prompt)[start:].mean(0))

    def test_what_it_can_do(self, checkpoint: Checkpoint) -> None:
        info = _Bidirectional().resolve(checkpoint.path, hf_overrides=self.overrides)
        assert (info.runner, info.tasks) == ("pooling", ("embed",))


@pytest.mark.parametrize("suite", [relaid.TestChatGLM, relaid.TestOuro, gpts.TestModernBertDecoder])
def test_what_only_a_language_model_has_is_passed_over(tmp_path: Path, suite: Any) -> None:
    """A head of another name, its dense layer, a family's own left-overs."""
    suite().make_checkpoint(tmp_path)
    assert hasattr(suite().open(tmp_path, runner="pooling"), "pooler")


def test_a_bidirectional_decoder_generates_nothing(tmp_path: Path) -> None:
    suite = TestBidirectionalQwen2()
    suite.reference = "Qwen2ForCausalLM"
    suite.make_checkpoint(tmp_path)
    with pytest.raises(UnsupportedModel, match="--runner pooling"):
        suite.open(tmp_path, runner="generate")


def rename_architecture(folder: Path, name: str) -> None:
    """Have ``config.json`` name another class."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "architectures": [name]}))
