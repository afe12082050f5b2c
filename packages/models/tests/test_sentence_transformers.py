"""Whole Sentence Transformers repositories, saved by the library itself, against its ``encode``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor

from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.platform import CpuPlatform
from headrace_core.pooling import PoolingParams
from headrace_models.loading.loader import load_model
from headrace_models.resolve import resolve
from headrace_testing.model.decoders import build_context, randomise
from headrace_testing.model.pooling import flat_batch, pooling_batch

st = pytest.importorskip("sentence_transformers", reason="needs sentence-transformers")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

WORDS = [f"w{index}" for index in range(60)]
TEXTS = [" ".join(WORDS[(7 * i + 3 * j) % 60] for j in range(1 + 5 * i % 23)) for i in range(16)]


def make_tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocab = {word: index for index, word in enumerate([*names, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
        sep_token="[SEP]", mask_token="[MASK]", model_max_length=48,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip


def make_bert(folder: Path, **config: Any) -> Path:
    from transformers import BertConfig, BertForSequenceClassification, BertModel

    sizes = {"vocab_size": 65, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2,
             "num_attention_heads": 3, "max_position_embeddings": 48}  # fmt: skip
    kind = BertForSequenceClassification if "num_labels" in config else BertModel
    model = kind(BertConfig(**{**sizes, **config})).eval()
    randomise(model)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def ours(path: Path, ids: list[list[int]], segments: list[list[int]], task: str) -> Tensor:
    """The checkpoint's results, asked for as input processing does."""
    info = resolve(ModelConfig(model=str(path)), LoadConfig(), CpuPlatform())
    assert info.pooling is not None
    one = PoolingParams()
    one.verify(task, info.pooling)
    model: Any = load_model(info, build_context(info))
    params = [one] * len(ids)
    with torch.inference_mode():
        hidden = model.forward(flat_batch(ids, segments)).split([len(i) for i in ids])
        return torch.stack(list(model.pooler(pooling_batch(model, hidden, params, ids))))


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("mode", ["mean", "cls", "lasttoken"])
@pytest.mark.parametrize("dense", [(), (20,), (30, 10)])
def test_embeddings(tmp_path: Path, mode: str, normalized: bool, dense: tuple[int, ...]) -> None:
    from sentence_transformers import models as modules

    parts: list[Any] = [modules.Transformer(str(make_bert(tmp_path / "bert")))]
    parts.append(modules.Pooling(24, mode))
    size, activations = 24, [torch.nn.Tanh(), torch.nn.Identity()]
    for out, activation in zip(dense, activations):
        parts.append(modules.Dense(size, out, bias=out != 10, activation_function=activation))
        size = out
    if normalized:
        parts.append(modules.Normalize())
    theirs = st.SentenceTransformer(modules=parts, device="cpu")
    theirs.save(str(tmp_path / "st"))
    tokens = theirs.tokenizer(TEXTS)
    result = ours(tmp_path / "st", tokens["input_ids"], tokens["token_type_ids"], "embed")
    expected = torch.tensor(theirs.encode(TEXTS, batch_size=5))
    torch.testing.assert_close(result, expected, atol=1e-5 * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize("activation", [None, torch.nn.Identity(), torch.nn.Tanh()])
def test_cross_encoder(tmp_path: Path, activation: torch.nn.Module | None) -> None:
    bert = make_bert(tmp_path / "bert", num_labels=1)
    theirs = st.CrossEncoder(str(bert), device="cpu", activation_fn=activation)
    theirs.save(str(tmp_path / "ce"))
    pairs = list(zip(TEXTS[:8], TEXTS[8:]))
    tokens = theirs.tokenizer(*map(list, zip(*pairs)))
    assert any(1 in segments for segments in tokens["token_type_ids"])
    result = ours(tmp_path / "ce", tokens["input_ids"], tokens["token_type_ids"], "score")
    expected = torch.tensor(theirs.predict(pairs))
    torch.testing.assert_close(result[:, 0], expected, atol=1e-5, rtol=1e-5)
