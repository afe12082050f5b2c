"""Decoders with heads that classify, score and reward, against transformers on tiny configs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import test_families as families
import torch
from pooling_decoders import PoolingDecoderConformance
from torch import nn

from headrace_core.errors import ConfigError, UnsupportedModel, WeightsError
from headrace_testing.model.decoders import Checkpoint, randomise


class TestQwen3ForSequenceClassification(PoolingDecoderConformance):
    makes = "labels"
    reference = "Qwen3ForSequenceClassification"

    def test_head_in_the_models_dtype(self, checkpoint: Checkpoint) -> None:
        for head, expected in (("float32", torch.float32), ("model", torch.bfloat16)):
            model = self.open(checkpoint.path, dtype="bfloat16", hf_overrides={"head_dtype": head})
            weight = model.pooler.head.classifier.out
            assert getattr(torch, weight.dtype) is expected

    def test_a_language_model_has_no_classifier(self, tmp_path: Path) -> None:
        self.reference = "Qwen3ForCausalLM"
        self.make_checkpoint(tmp_path)
        with pytest.raises(ConfigError, match="classifier_from_token"):
            self.resolve(tmp_path, runner="pooling", convert="classify")
        # Named a classifier it loads none: never a random one.
        names = {"architectures": ["Qwen3ForSequenceClassification"]}
        with pytest.raises(WeightsError, match=r"(score|classifier)\.weight"):
            self.open(tmp_path, hf_overrides=names)


class TestLlamaForSequenceClassification(PoolingDecoderConformance):
    makes = "labels"
    reference = "LlamaForSequenceClassification"
    generating = families.TestLlama


class TestMistralForSequenceClassification(PoolingDecoderConformance):
    makes = "labels"
    reference = "MistralForSequenceClassification"
    generating = families.TestMistral


class TestQwen2ForSequenceClassification(PoolingDecoderConformance):
    makes = "labels"
    reference = "Qwen2ForSequenceClassification"
    generating = families.TestQwen2


class TestGemmaForSequenceClassification(PoolingDecoderConformance):
    makes = "labels"
    reference = "GemmaForSequenceClassification"
    generating = families.TestGemma


class TestGemma3ForSequenceClassification(PoolingDecoderConformance):
    makes = "labels"
    reference = "Gemma3TextForSequenceClassification"
    generating = families.TestGemma3


class TestGPT2ForSequenceClassification(PoolingDecoderConformance):
    makes = "labels"
    reference = "GPT2ForSequenceClassification"
    generating = families.TestGPT2
    prefix = ""

    def hf_config(self, **overrides: Any) -> Any:
        return super().hf_config(**{"pad_token_id": 0, **overrides})


class TestQwen2ForTokenClassification(PoolingDecoderConformance):
    makes, default_pooling = "token labels", "ALL"
    reference = "Qwen2ForTokenClassification"
    generating = families.TestQwen2


class TestGPT2ForTokenClassification(PoolingDecoderConformance):
    makes, default_pooling = "token labels", "ALL"
    reference = "GPT2ForTokenClassification"
    generating = families.TestGPT2
    prefix = ""


class TestReward(PoolingDecoderConformance):
    """Qwen2.5-Math-RM: a score for each token, out of two layers; its class is not in transformers."""

    makes: ClassVar[Any] = "token labels"
    default_pooling = "ALL"
    reference = "Qwen2Model"
    generating = families.TestQwen2
    architecture: ClassVar[str] = "Qwen2ForRewardModel"
    labels: ClassVar[int] = 1
    prefix = ""
    a_matrix = "model.layers.1."

    def make_checkpoint(self, folder: Path, seed: int = 0, **overrides: Any) -> Checkpoint:
        from transformers import Qwen2Model, Qwen2PreTrainedModel

        labels = self.labels

        class RewardModel(Qwen2PreTrainedModel):
            def __init__(self, config: Any) -> None:
                super().__init__(config)
                size = config.hidden_size
                self.model = Qwen2Model(config)
                self.score = nn.Sequential(
                    nn.Linear(size, size), nn.ReLU(), nn.Linear(size, labels)
                )
                self.post_init()

            def forward(self, ids: Any) -> Any:
                from transformers.modeling_outputs import TokenClassifierOutput

                return TokenClassifierOutput(logits=self.score(self.model(ids).last_hidden_state))

        reference = RewardModel._from_config(
            self.hf_config(**overrides), attn_implementation="eager", dtype=torch.float32
        ).eval()
        randomise(reference, seed)
        reference.save_pretrained(folder)
        path = folder / "config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps({**config, "architectures": [self.architecture]}))
        return Checkpoint(reference, folder)

    def test_probabilities(self, checkpoint: Checkpoint, model: Any) -> None:
        """A reward is the logit itself."""
        prompts = self.prompts()
        results = self.pooled(model, prompts, [self.params(use_activation=True)] * len(prompts))
        for result, prompt in zip(results, prompts):
            self.assert_close(result, self.expected(checkpoint, prompt))


class TestProcessReward(TestReward):
    """Qwen2.5-Math-PRM: two labels where a step ends."""

    architecture = "Qwen2ForProcessRewardModel"
    labels = 2
    default_pooling = "STEP"

    def test_probabilities(self, checkpoint: Checkpoint, model: Any) -> None:
        prompts = [[*prompt, 7, *prompt, 7] for prompt in self.prompts()]
        wanted = self.params(use_activation=True, step_tag_id=7)
        for result, prompt in zip(self.pooled(model, prompts, [wanted] * len(prompts)), prompts):
            ends = [index for index, token in enumerate(prompt) if token == 7]
            probabilities = torch.softmax(self.expected(checkpoint, prompt), dim=-1)
            self.assert_close(result, probabilities[ends])

    def test_what_ends_a_step(self, checkpoint: Checkpoint) -> None:
        info = self.resolve(checkpoint.path)
        assert info.pooling is not None
        assert (info.pooling.step_tag_id, info.pooling.num_labels) == (151_651, 2)
        other = self.resolve(checkpoint.path, pooler_config={"step_tag_id": 7})
        assert other.pooling is not None
        assert other.pooling.step_tag_id == 7


VOCABULARY = {"no": 11, "yes": 12, "Yes": 13, "0": 14, "1": 15, "maybe": 16}


def write_tokenizer(folder: Path) -> None:
    """As much of a tokenizer as names tokens."""
    content = {"model": {"type": "BPE", "vocab": VOCABULARY}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(content))


class TestReranker:
    """Scores made of a language model's head, tied and untied."""

    def make(self, folder: Path, *, tied: bool, seed: int = 0) -> Checkpoint:
        suite = TestQwen3ForSequenceClassification()
        suite.reference = "Qwen3ForCausalLM"
        found = suite.make_checkpoint(folder, seed, tie_word_embeddings=tied)
        write_tokenizer(folder)
        return found

    def overrides(self, **fields: Any) -> dict[str, Any]:
        return {"architectures": ["Qwen3ForSequenceClassification"], **fields}

    def scores(self, folder: Path, overrides: dict[str, Any], prompts: Any) -> Sequence[Any]:
        suite = TestQwen3ForSequenceClassification()
        model = suite.open(folder, hf_overrides=overrides)
        task = "score" if "score" in model.pooler.tasks else "classify"
        wanted = [suite.params(task, use_activation=True)] * len(prompts)
        return suite.pooled(model, prompts, wanted)

    @pytest.mark.parametrize("tied", [False, True])
    @pytest.mark.parametrize(
        "fields",
        [
            {"classifier_from_token": ["no", "yes"], "method": "from_2_way_softmax"},
            {"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True},
            {"is_original_qwen3_reranker": True},
        ],
    )
    def test_two_tokens(self, tmp_path: Path, tied: bool, fields: dict[str, Any]) -> None:
        checkpoint = self.make(tmp_path, tied=tied)
        prompts = TestQwen3ForSequenceClassification().prompts()
        for score, prompt in zip(self.scores(tmp_path, self.overrides(**fields), prompts), prompts):
            both = checkpoint.logprobs(prompt)[-1][[11, 12]]
            torch.testing.assert_close(score, torch.softmax(both, 0)[1:], atol=1e-5, rtol=0)

    @pytest.mark.parametrize("tied", [False, True])
    def test_one_token(self, tmp_path: Path, tied: bool) -> None:
        checkpoint = self.make(tmp_path, tied=tied)
        prompts = TestQwen3ForSequenceClassification().prompts()
        overrides = self.overrides(classifier_from_token=["Yes"])
        for score, prompt in zip(self.scores(tmp_path, overrides, prompts), prompts):
            with torch.inference_mode():
                logit = checkpoint.reference(torch.tensor([prompt])).logits[0, -1, 13]
            torch.testing.assert_close(score, torch.sigmoid(logit)[None], atol=1e-5, rtol=0)

    def test_a_label_for_each_token(self, tmp_path: Path) -> None:
        checkpoint = self.make(tmp_path, tied=False)
        overrides = self.overrides(classifier_from_token=["no", "maybe", "yes"])
        prompt = [5, 6, 7, 8]
        (row,) = self.scores(tmp_path, overrides, [prompt])
        logprobs = checkpoint.logprobs(prompt)[-1][[11, 16, 12]]
        torch.testing.assert_close(row, torch.softmax(logprobs, 0), atol=1e-5, rtol=0)
        info = TestQwen3ForSequenceClassification().resolve(tmp_path, hf_overrides=overrides)
        assert info.pooling is not None
        assert info.pooling.labels == ("no", "maybe", "yes")

    def test_a_language_model_itself(self, tmp_path: Path) -> None:
        """Without the other architecture's name, ``--convert classify`` does it."""
        self.make(tmp_path, tied=True)
        suite = TestQwen3ForSequenceClassification()
        overrides = {"is_original_qwen3_reranker": True}
        info = suite.resolve(tmp_path, runner="pooling", convert="classify", hf_overrides=overrides)
        assert info.tasks == ("classify", "score", "token_classify")

    def test_a_string_that_is_not_one_token(self, tmp_path: Path) -> None:
        self.make(tmp_path, tied=True)
        overrides = self.overrides(classifier_from_token=["YES"])
        with pytest.raises(ConfigError, match="'YES' is not one token"):
            self.scores(tmp_path, overrides, [[5]])

    def test_without_a_tokenizer(self, tmp_path: Path) -> None:
        self.make(tmp_path, tied=True)
        (tmp_path / "tokenizer.json").unlink()
        with pytest.raises(UnsupportedModel, match=r"tokenizer\.json"):
            self.scores(tmp_path, self.overrides(classifier_from_token=["Yes"]), [[5]])


class TestSteps:
    """Math-shepherd: a few columns of a language model's logits, where a step ends."""

    @pytest.mark.parametrize("tied", [False, True])
    def test_against_its_logits(self, tmp_path: Path, tied: bool) -> None:
        suite = TestLlamaForSequenceClassification()
        suite.reference = "LlamaForCausalLM"
        checkpoint = suite.make_checkpoint(tmp_path, tie_word_embeddings=tied)
        settings = {"pooling_type": "STEP", "step_tag_id": 9, "returned_token_ids": [40, 41]}
        info = suite.resolve(tmp_path, runner="pooling", pooler_config=settings)
        assert info.tasks == ("token_classify",)
        model = suite.open(tmp_path, pooler_config=settings)
        prompts = [[5, 6, 9, 7, 9], [9], [8, 7]]
        wanted = suite.params(
            "token_classify", use_activation=True, step_tag_id=9, returned_token_ids=[40, 41]
        )
        expected = [torch.softmax(checkpoint.logprobs(p)[:, [40, 41]], -1) for p in prompts]
        for result, rows, prompt in zip(
            suite.pooled(model, prompts, [wanted] * 3), expected, prompts
        ):
            ends = [index for index, token in enumerate(prompt) if token == 9]
            torch.testing.assert_close(result, rows[ends], atol=1e-5, rtol=0)
