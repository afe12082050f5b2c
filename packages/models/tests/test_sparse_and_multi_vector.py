"""SPLADE, BGE-M3 and ColBERT against transformers' hidden states and a few lines of torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import test_encoders
import test_rotary_encoders
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from headrace_core.errors import UnsupportedModel
from headrace_testing.model.decoders import Checkpoint

BERT = test_encoders.TestBert
ROBERTA = test_encoders.TestRoberta
TRANSFORMER = {"type": "sentence_transformers.models.Transformer", "path": ""}


def write(path: Path, value: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


def rename(folder: Path, architecture: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    write(folder / "config.json", {**config, "architectures": [architecture]})


def add_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    old = load_file(folder / "model.safetensors")
    save_file({**old, **tensors}, folder / "model.safetensors", metadata={"format": "pt"})


def linear(size: int, width: int, seed: int = 5) -> Tensor:
    return torch.randn(size, width, generator=torch.Generator().manual_seed(seed)) / width**0.5


class _BertWords(BERT):
    makes: Any = "logits"

    def hf_class(self) -> Any:
        from transformers import BertForMaskedLM

        return BertForMaskedLM


class TestSplade:
    Suite: Any = _BertWords

    def make(self, folder: Path, **overrides: Any) -> Checkpoint:
        return self.Suite().make_checkpoint(folder, **overrides)

    def write_modules(self, folder: Path, strategy: str, activation: str) -> None:
        kind = "sentence_transformers.sparse_encoder.models"
        write(
            folder / "modules.json",
            [
                {"type": f"{kind}.MLMTransformer", "path": ""},
                {"type": f"{kind}.SpladePooling", "path": "1_SpladePooling"},
            ],
        )
        write(
            folder / "1_SpladePooling/config.json",
            {"pooling_strategy": strategy, "activation_function": activation},
        )

    def embeddings(self, folder: Path, **settings: Any) -> list[Tensor]:
        suite = self.Suite()
        prompts = [*suite.prompts(), suite.prompt(40, seed=9)]
        wanted = [suite.params("embed", normalize=False)] * len(prompts)
        return list(suite.pooled(suite.open(folder, **settings), prompts, wanted))

    def weights(self, checkpoint: Checkpoint) -> list[Tensor]:
        """log(1 + relu(logits)) [n, V] of each prompt, by transformers."""
        suite = self.Suite()
        prompts = [*suite.prompts(), suite.prompt(40, seed=9)]
        return [suite.expected(checkpoint, prompt).relu().log1p() for prompt in prompts]

    @pytest.mark.parametrize("tied", [True, False])
    def test_by_override(self, tmp_path: Path, tied: bool) -> None:
        checkpoint = self.make(tmp_path, tie_word_embeddings=tied)
        overrides = {"architectures": ["BertSpladeSparseEmbeddingModel"]}
        results = self.embeddings(tmp_path, hf_overrides=overrides)
        for result, rows in zip(results, self.weights(checkpoint)):
            torch.testing.assert_close(result, rows.amax(0), atol=1e-4, rtol=0)
        info = self.Suite().resolve(tmp_path, hf_overrides=overrides)
        assert info.pooling is not None
        assert (info.tasks, info.runner) == (("embed",), "pooling")
        assert info.pooling.sparse
        assert not info.pooling.normalize
        assert info.pooling.embedding_size == 131

    @pytest.mark.parametrize("strategy", ["max", "sum"])
    @pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
    def test_as_sentence_transformers_store_it(
        self, tmp_path: Path, strategy: str, activation: str
    ) -> None:
        checkpoint = self.make(tmp_path)
        self.write_modules(tmp_path, strategy, activation)
        for result, rows in zip(self.embeddings(tmp_path), self.weights(checkpoint)):
            rows = rows.log1p() if activation == "log1p_relu" else rows
            expected = rows.sum(0) if strategy == "sum" else rows.amax(0)
            torch.testing.assert_close(result, expected, atol=2e-4, rtol=1e-5)

    def test_a_plain_masked_language_model_is_refused(self, tmp_path: Path) -> None:
        self.make(tmp_path)
        with pytest.raises(UnsupportedModel, match="SpladePooling"):
            self.Suite().resolve(tmp_path)

    def test_many_tokens_at_once_equal_few(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.make(tmp_path)
        overrides = {"architectures": ["BertSpladeSparseEmbeddingModel"]}
        whole = self.embeddings(tmp_path, hf_overrides=overrides)
        monkeypatch.setattr("headrace_models.pooling.sparse._ROWS", 7)
        for few, many in zip(self.embeddings(tmp_path, hf_overrides=overrides), whole):
            torch.testing.assert_close(few, many, atol=1e-5, rtol=0)


class _DistilBertWords(test_encoders.TestDistilBert):
    makes: Any = "logits"

    def hf_class(self) -> Any:
        from transformers import DistilBertForMaskedLM

        return DistilBertForMaskedLM


class TestDistilBertSplade(TestSplade):
    """Known by its modules alone."""

    Suite: Any = _DistilBertWords

    @pytest.mark.parametrize("tied", [True, False])
    def test_by_override(self, tmp_path: Path, tied: bool) -> None:
        checkpoint = self.make(tmp_path, tie_word_embeddings=tied)
        self.write_modules(tmp_path, "max", "relu")
        for result, rows in zip(self.embeddings(tmp_path), self.weights(checkpoint)):
            torch.testing.assert_close(result, rows.amax(0), atol=1e-4, rtol=0)

    def test_many_tokens_at_once_equal_few(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.skip("the same code as BERT's")


class _RobertaWords(test_encoders._Roberta):
    makes: Any = "logits"

    def hf_class(self) -> Any:
        from transformers import RobertaForMaskedLM

        return RobertaForMaskedLM


class TestRobertaSplade(TestDistilBertSplade):
    """As granite-embedding-30m-sparse."""

    Suite: Any = _RobertaWords

    def test_a_plain_masked_language_model_is_refused(self, tmp_path: Path) -> None:
        """Not this one, which embeds as its encoder."""
        self.make(tmp_path)
        info = self.Suite().resolve(tmp_path)
        assert info.architecture == "RobertaForMaskedLM"
        assert info.pooling is not None
        assert not info.pooling.sparse


class TestBgeM3:
    """Tokens 0 and 2 begin and end a text."""

    overrides: ClassVar[dict[str, Any]] = {"architectures": ["BgeM3EmbeddingModel"]}

    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> Checkpoint:
        found = ROBERTA().make_checkpoint(tmp_path, bos_token_id=0, eos_token_id=2)
        heads = {
            "sparse_linear.weight": linear(1, 36),
            "sparse_linear.bias": torch.tensor([0.1]),
            "colbert_linear.weight": linear(36, 36, seed=6),
            "colbert_linear.bias": linear(36, 1, seed=7)[:, 0],
        }
        add_tensors(tmp_path, heads)
        return found

    def test_three_ways_in_one_batch(self, checkpoint: Checkpoint) -> None:
        suite = ROBERTA()
        model = suite.open(checkpoint.path, hf_overrides=self.overrides)
        heads = load_file(checkpoint.path / "model.safetensors")
        prompts = [[0, *prompt, 2] for prompt in suite.prompts()]
        wanted = [
            suite.params("token_embed", normalize=True),
            suite.params("embed", normalize=True),
            suite.params("token_classify", use_activation=True),
            suite.params("embed", normalize=True),
            suite.params("token_embed", normalize=True),
        ]
        for params, prompt, result in zip(wanted, prompts, suite.pooled(model, prompts, wanted)):
            states = suite.expected(checkpoint, prompt)
            if params.task == "embed":
                expected = functional.normalize(states[0], dim=0)
            elif params.task == "token_embed":
                vectors = functional.linear(
                    states[1:], heads["colbert_linear.weight"], heads["colbert_linear.bias"]
                )
                expected = functional.normalize(vectors, dim=-1)
            else:
                weights = functional.linear(
                    states[1:-1], heads["sparse_linear.weight"], heads["sparse_linear.bias"]
                )
                expected = weights.relu()
            suite.assert_close(result, expected)

    def test_what_it_can_do(self, checkpoint: Checkpoint) -> None:
        info = ROBERTA().resolve(checkpoint.path, hf_overrides=self.overrides)
        assert info.tasks == ("embed", "token_embed", "token_classify")
        assert info.pooling is not None
        assert info.pooling.scoring == "cosine"


class TestColbert:
    def check(
        self, checkpoint: Checkpoint, folder: Path, weight: Tensor, suite: Any = None
    ) -> None:
        """Vectors of all tokens are the projection's, of length 1."""
        suite = suite or BERT()
        model, prompts = suite.open(folder), suite.prompts()
        wanted = [suite.params("token_embed", normalize=True)] * len(prompts)
        for result, prompt in zip(suite.pooled(model, prompts, wanted), prompts):
            vectors = suite.expected(checkpoint, prompt) @ weight.T
            suite.assert_close(result, functional.normalize(vectors, dim=-1))

    def vocabulary(self, folder: Path, **tokens: int) -> None:
        content = {"model": {"type": "WordPiece", "vocab": tokens}, "added_tokens": []}
        write(folder / "tokenizer.json", content)

    def test_as_its_authors_store_it(self, tmp_path: Path) -> None:
        checkpoint, weight = BERT().make_checkpoint(tmp_path), linear(20, 36)
        rename(tmp_path, "HF_ColBERT")
        tensors = load_file(tmp_path / "model.safetensors")
        named = {f"bert.{name}": tensor for name, tensor in tensors.items()}
        save_file({**named, "linear.weight": weight}, tmp_path / "model.safetensors")
        self.vocabulary(tmp_path, **{"[unused0]": 1, "[unused1]": 2, "!": 9, ",": 10})
        self.check(checkpoint, tmp_path, weight)
        info = BERT().resolve(tmp_path)
        assert info.tasks == ("token_embed",)
        pooling = info.pooling
        assert pooling is not None
        assert (pooling.scoring, pooling.embedding_size, pooling.normalize) == (
            "late_interaction", 20, True
        )  # fmt: skip
        late = pooling.late_interaction
        assert late is not None
        assert (late.query_marker_id, late.document_marker_id) == (1, 2)
        assert (late.query_length, late.document_length) == (32, 80)
        assert (late.expand_queries, late.attend_to_expansion) == (True, False)
        assert set(late.skip_ids) == {9, 10}
        write(
            tmp_path / "artifact.metadata",
            {"query_token_id": "[unused1]", "query_maxlen": 16, "doc_maxlen": 60,
             "attend_to_mask_tokens": True, "mask_punctuation": False},
        )  # fmt: skip
        late = BERT().resolve(tmp_path).pooling.late_interaction  # type: ignore[union-attr]
        assert late is not None
        assert (late.query_marker_id, late.query_length, late.document_length) == (1 + 1, 16, 60)
        assert late.attend_to_expansion
        assert late.skip_ids == ()

    @pytest.mark.parametrize(
        "suite", [BERT, test_rotary_encoders.TestModernBert], ids=["bert", "modernbert"]
    )
    def test_as_pylate_stores_it(self, tmp_path: Path, suite: Any) -> None:
        checkpoint = suite().make_checkpoint(tmp_path)
        weight = linear(20, checkpoint.reference.config.hidden_size)
        write(
            tmp_path / "modules.json",
            [TRANSFORMER, {"type": "pylate.models.Dense.Dense", "path": "1_Dense"}],
        )
        self.dense(tmp_path, weight)
        write(
            tmp_path / "config_sentence_transformers.json",
            {"query_prefix": "[Q] ", "document_prefix": "[D] ", "query_length": 24,
             "document_length": 50, "attend_to_expansion_tokens": True,
             "skiplist_words": ["!", "?"]},
        )  # fmt: skip
        self.vocabulary(tmp_path, **{"[Q] ": 3, "[D]": 4, "!": 9})
        self.check(checkpoint, tmp_path, weight, suite())
        late = suite().resolve(tmp_path).pooling.late_interaction
        assert (late.query_marker, late.query_marker_id, late.document_marker_id) == ("[Q] ", 3, 4)
        assert (late.query_length, late.document_length) == (24, 50)
        assert (late.expand_queries, late.attend_to_expansion) == (True, True)
        assert (late.skip_words, late.skip_ids) == (("!", "?"), (9,))

    def test_as_sentence_transformers_store_it(self, tmp_path: Path) -> None:
        checkpoint, weight = BERT().make_checkpoint(tmp_path), linear(20, 36)
        kind = "sentence_transformers"
        write(
            tmp_path / "modules.json",
            [
                TRANSFORMER,
                {"type": f"{kind}.base.modules.dense.Dense", "path": "1_Dense"},
                {
                    "type": f"{kind}.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask",
                    "path": "2_MultiVectorMask",
                },
                {"type": f"{kind}.sentence_transformer.modules.normalize.Normalize", "path": "3"},
            ],
        )
        self.dense(tmp_path, weight, module_input_name="token_embeddings")
        write(tmp_path / "2_MultiVectorMask/config.json", {"skiplist_words": ["!"]})
        write(
            tmp_path / "config_sentence_transformers.json",
            {"prompts": {"query": "[Q] ", "document": "[D] "}},
        )
        write(
            tmp_path / "sentence_bert_config.json",
            {"query_expansion": {"strategy": "fixed", "attend": False, "length": 20},
             "document_length": 40},
        )  # fmt: skip
        self.vocabulary(tmp_path, **{"[Q]": 3, "[D]": 4, "!": 9})
        self.check(checkpoint, tmp_path, weight)
        late = BERT().resolve(tmp_path).pooling.late_interaction  # type: ignore[union-attr]
        assert late is not None
        assert (late.query_marker_id, late.document_marker_id) == (3, 4)
        assert (late.query_length, late.document_length, late.skip_ids) == (20, 40, (9,))
        assert (late.expand_queries, late.attend_to_expansion) == (True, False)
        assert late.expansion_id is None

    def expanded(self, folder: Path, token: object) -> None:
        """A checkpoint that fills queries up with this token."""
        BERT().make_checkpoint(folder)
        dense = {"type": "pylate.models.Dense.Dense", "path": "1_Dense"}
        write(folder / "modules.json", [TRANSFORMER, dense])
        self.dense(folder, linear(20, 36))
        expansion = {"strategy": "fixed", "length": 20, "token": token}
        write(folder / "sentence_bert_config.json", {"query_expansion": expansion})
        self.vocabulary(folder, **{"[Q]": 3, "[FILL]": 7})

    def test_the_token_that_fills_queries_up(self, tmp_path: Path) -> None:
        self.expanded(tmp_path, "[FILL]")
        late = BERT().resolve(tmp_path).pooling.late_interaction  # type: ignore[union-attr]
        assert late is not None
        assert late.expansion_id == 7

    @pytest.mark.parametrize("token", ["[GONE]", 9, ["!"]])
    def test_a_filler_that_is_no_token(self, tmp_path: Path, token: object) -> None:
        self.expanded(tmp_path, token)
        with pytest.raises(UnsupportedModel, match=r"query_expansion\.token"):
            BERT().resolve(tmp_path)

    def dense(self, folder: Path, weight: Tensor, **config: Any) -> None:
        own = {"in_features": weight.shape[1], "out_features": weight.shape[0], "bias": False,
               "activation_function": "torch.nn.modules.linear.Identity"}  # fmt: skip
        write(folder / "1_Dense/config.json", {**own, **config})
        save_file({"linear.weight": weight}, folder / "1_Dense/model.safetensors")

    @pytest.mark.parametrize("words", [True, 3, ["!", 4], {"!": 1}])
    def test_words_to_be_skipped_must_be_words(self, tmp_path: Path, words: object) -> None:
        self.test_as_pylate_stores_it(tmp_path, BERT)
        file = tmp_path / "config_sentence_transformers.json"
        write(file, {**json.loads(file.read_text()), "skiplist_words": words})
        with pytest.raises(UnsupportedModel, match="must be a list of words"):
            BERT().resolve(tmp_path)
