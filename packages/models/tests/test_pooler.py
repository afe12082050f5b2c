"""The pooler by itself, on hidden states made here, against ten lines of torch."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_pooling_info import DENSE, DENSE_CONFIG, NORMALIZE, run, sentence_transformer, write
from torch import Tensor

from headrace_core.batch import ForwardBatch
from headrace_core.errors import UnsupportedModel, WeightsError
from headrace_core.model import PoolingBatch
from headrace_core.pooling import PoolingParams
from headrace_models.loading.loader import load_model
from headrace_testing.model.decoders import build_context
from headrace_testing.model.pooling import pooling_batch

LENGTHS = (7, 1, 12, 3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def make(folder: Path, config: dict[str, Any] | None = None, **settings: Any) -> Any:
    """A model whose encoder does not matter, with the checkpoint's head."""
    small = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8,
             "hidden_act": "gelu"}  # fmt: skip
    info = run(folder, {**small, **(config or {})}, **settings)
    return load_model(info, build_context(info))


def states(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, 16, generator=generator) for length in LENGTHS]


def params(task: str, **fields: Any) -> PoolingParams:
    return PoolingParams(**{"normalize": task.endswith("embed"), **fields, "task": task})


def pool(model: Any, hidden: list[Tensor], wanted: list[PoolingParams], **ids: Any) -> list[Tensor]:
    tokens = ids.get("token_ids") or [[5] * len(rows) for rows in hidden]
    return list(model.pooler(pooling_batch(model, hidden, wanted, tokens)))


@pytest.mark.parametrize("kind", ["MEAN", "CLS", "LAST"])
def test_tokens_that_are_left_out(embedder: Path, kind: str) -> None:
    model, hidden = make(embedder, pooler_config={"pooling_type": kind}), states()
    counts = [3, 4, 0, None]
    wanted = [params("embed", normalize=False, num_left_out=count) for count in counts]
    rows = [model.pooler.rows(one) for one in wanted]
    assert (
        rows
        == {"MEAN": ["all"] * 4, "CLS": ["all", "all", "first", "first"], "LAST": ["last"] * 4}[
            kind
        ]
    )
    kept = [x[min(count or 0, len(x) - 1) :] for x, count in zip(hidden, counts)]
    expected = [{"MEAN": x.mean(0), "CLS": x[0], "LAST": x[-1]}[kind] for x in kept]
    cut = {"all": slice(None), "first": slice(0, 1), "last": slice(-1, None)}
    given = [x[cut[which]] for x, which in zip(hidden, rows)]
    results = list(model.pooler(batch_of(given, wanted)))
    torch.testing.assert_close(torch.stack(results), torch.stack(expected))


def batch_of(hidden: list[Tensor], wanted: list[PoolingParams]) -> PoolingBatch:
    """Rows as the pooler asked for them."""
    bounds = torch.tensor([0, *map(len, hidden)]).cumsum(0)
    return PoolingBatch(torch.cat(hidden), bounds, wanted, [[5] * len(x) for x in hidden])


def encoder_tensors() -> dict[str, Tensor]:
    layer = "encoder.layer.0."
    square = [f"{layer}attention.{name}" for name in
              ("self.query", "self.key", "self.value", "output.dense")]  # fmt: skip
    norms = [
        "embeddings.LayerNorm",
        f"{layer}attention.output.LayerNorm",
        f"{layer}output.LayerNorm",
    ]
    tensors = {
        "embeddings.word_embeddings.weight": torch.ones(99, 16),
        "embeddings.position_embeddings.weight": torch.ones(64, 16),
        "embeddings.token_type_embeddings.weight": torch.ones(2, 16),
        f"{layer}intermediate.dense.weight": torch.ones(8, 16),
        f"{layer}intermediate.dense.bias": torch.ones(8),
        f"{layer}output.dense.weight": torch.ones(16, 8),
        f"{layer}output.dense.bias": torch.ones(16),
    }
    tensors |= {f"{name}.weight": torch.ones(16, 16) for name in square}
    tensors |= {f"{name}.bias": torch.ones(16) for name in square}
    # The first checkpoints' names.
    tensors |= {f"{name}.gamma": torch.ones(16) for name in norms}
    return tensors | {f"{name}.beta": torch.ones(16) for name in norms}


@pytest.fixture
def embedder(folder: Path) -> Path:
    save_file(encoder_tensors(), folder / "model.safetensors")
    return folder


@pytest.fixture
def classifier(folder: Path) -> Path:
    head = {"classifier.weight": torch.randn(4, 16), "classifier.bias": torch.randn(4)}
    save_file({**encoder_tensors(), **head}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("kind", ["MEAN", "CLS", "LAST"])
def test_rows_that_are_needed(embedder: Path, kind: str) -> None:
    model = make(embedder, pooler_config={"pooling_type": kind})
    needed = {"MEAN": "all", "CLS": "first", "LAST": "last"}[kind]
    assert model.pooler.rows(params("embed")) == needed
    assert model.pooler.rows(params("token_embed")) == "all"


def test_the_mean_is_summed_in_float32(embedder: Path) -> None:
    """In bfloat16, 1 added to 256 is lost."""
    model = make(embedder, pooler_config={"pooling_type": "MEAN"})
    hidden = [torch.cat((torch.full((1, 16), 256.0), torch.ones(1023, 16))).bfloat16()]
    result = pool(model, hidden, [params("embed", normalize=False)])[0]
    assert torch.equal(result, torch.full((16,), 1279 / 1024))


def test_a_vector_of_zeros_stays_one(embedder: Path) -> None:
    result = pool(make(embedder), [torch.zeros(3, 16)], [params("embed")])[0]
    assert torch.equal(result, torch.zeros(16))


def test_tiny_and_huge_vectors_have_length_one(embedder: Path) -> None:
    for size in (1e-6, 1e12):
        result = pool(make(embedder), [torch.full((2, 16), size)], [params("embed")])[0]
        torch.testing.assert_close(result, torch.full((16,), 0.25), atol=1e-6, rtol=0)


def test_dense_layers_come_before_cut_and_norm(embedder: Path) -> None:
    sentence_transformer(embedder, "mean", DENSE, NORMALIZE)
    write(embedder, {"2_Dense/config.json": DENSE_CONFIG})
    weight, bias = torch.randn(12, 16), torch.randn(12)
    save_file(
        {"linear.weight": weight, "linear.bias": bias}, embedder / "2_Dense/model.safetensors"
    )
    model = make(embedder, {"is_matryoshka": True})
    hidden = states()
    wanted = [
        params("embed"),
        params("embed", dimensions=5),
        params("embed"),
        params("token_embed"),
    ]
    for rows, one, result in zip(hidden, wanted, pool(model, hidden, wanted)):
        x = rows if one.task == "token_embed" else rows.mean(0)
        x = torch.tanh(x @ weight.T + bias)[..., : one.dimensions]
        torch.testing.assert_close(result, x / x.norm(dim=-1, keepdim=True), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [({}, "2_Dense.linear.weight"), ({"linear.weight": (12, 15)}, r"\[12, 15\]"),
     ({"linear.weight": (12, 16), "linear.bias": (12,), "other": (1,)}, "2_Dense.other")],
)  # fmt: skip
def test_dense_weights_are_loaded_strictly(
    embedder: Path, tensors: dict[str, tuple[int, ...]], words: str
) -> None:
    sentence_transformer(embedder, "mean", DENSE)
    write(embedder, {"2_Dense/config.json": DENSE_CONFIG})
    held = {name: torch.ones(shape) for name, shape in tensors.items()}
    save_file(held or {"linear.bias": torch.ones(12)}, embedder / "2_Dense/model.safetensors")
    with pytest.raises(WeightsError, match=words):
        make(embedder)


def test_steps(classifier: Path) -> None:
    """Columns first, the activation over them, then the rows at the tag."""
    config = {"architectures": ["BertForTokenClassification"], "num_labels": 4}
    model = make(classifier, config, pooler_config={"pooling_type": "STEP"})
    hidden, tokens = states(), [[9, 5, 9, 5, 5, 9, 5], [5], [9] * 12, [5, 5, 9]]
    wanted = [
        params("token_classify", use_activation=True, step_tag_id=9, returned_token_ids=[2, 0]),
        params("token_classify", use_activation=True, step_tag_id=9),
        params("token_classify", use_activation=False, returned_token_ids=[3]),
        params("token_classify", use_activation=False, step_tag_id=9),
    ]
    results = pool(model, hidden, wanted, token_ids=tokens)
    head = model.pooler.head.classifier
    logits = [head(rows, [len(rows)]) for rows in hidden]
    expected = [
        torch.softmax(logits[0][:, [2, 0]], -1)[[0, 2, 5]],
        logits[1][:0],
        logits[2][:, [3]],
        logits[3][[2]],
    ]
    for result, other in zip(results, expected):
        torch.testing.assert_close(result, other, atol=1e-6, rtol=0)


def test_nobody_is_pooled(embedder: Path) -> None:
    model = make(embedder)
    empty = PoolingBatch(torch.empty(0, 16), torch.zeros(1, dtype=torch.int64), [], [])
    assert list(model.pooler(empty)) == []


def test_head_in_the_models_dtype(classifier: Path) -> None:
    config = {"architectures": ["BertForTokenClassification"], "num_labels": 4}
    wanted = [params("token_classify", use_activation=False)]
    hidden = [states()[2].bfloat16()]
    exact = pool(make(classifier, config, dtype="bfloat16"), hidden, wanted)[0]
    overrides = {"head_dtype": "model"}
    rough = pool(
        make(classifier, config, dtype="bfloat16", hf_overrides=overrides), hidden, wanted
    )[0]
    assert rough.dtype is torch.float32
    assert torch.equal(rough, rough.bfloat16().float())
    assert not torch.equal(exact, rough)
    torch.testing.assert_close(exact, rough, atol=0.1, rtol=0.02)


def test_the_first_checkpoints_names_of_norms_load(embedder: Path) -> None:
    model = make(embedder)
    assert torch.equal(model.embed.norm.weight, torch.ones(16))
    assert isinstance(model.embed, object)
    batch = ForwardBatch(
        input_ids=torch.tensor([1, 2]),
        positions=torch.arange(2),
        cu_seqlens_q=torch.tensor([0, 2], dtype=torch.int32),
        seq_lens=torch.tensor([2], dtype=torch.int32),
        max_seqlen_q=2,
        max_seqlen_k=2,
        groups=(),
        token_type_ids=torch.zeros(2, dtype=torch.int64),
    )
    assert model.forward(batch).shape == (2, 16)


def test_a_class_that_cannot_pool_is_refused(folder: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "hidden_act": "silu",
              "num_attention_heads": 2, "intermediate_size": 8}  # fmt: skip
    info = dataclasses.replace(run(folder, config, runner="pooling"), convert="none")
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM has no pooler"):
        load_model(info, build_context(info))
