"""Tiny checkpoints of models that pool, made by transformers with random weights, tokenizers trained
in place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
import torch
from servers import RunningServer, serving

WORDS = (  # noqa: SIM905 - a list is harder to read
    "a quick brown fox jumps over the lazy dog while seven large bears sleep in quiet woods and "
    "rivers run down to a wide blue sea under stars that nobody counts any more"
).split()
SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]


def text(length: int, seed: int) -> str:
    """So many words."""
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(WORDS), (length,), generator=generator).tolist()
    return " ".join(WORDS[i] for i in picks)


def write_tokenizer(folder: Path, *, marked: bool) -> int:
    """Words as tokens; with [CLS] and [SEP] around texts and between them if ``marked``.

    Returns:
        the vocabulary's size.
    """
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=200, special_tokens=SPECIAL, show_progress=False
    )
    backend.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    if marked:
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
        )  # fmt: skip
    backend.save(str(folder / "tokenizer.json"))
    names = {"pad": "[PAD]", "cls": "[CLS]", "sep": "[SEP]", "unk": "[UNK]", "mask": "[MASK]"}
    config: dict[str, Any] = {f"{name}_token": token for name, token in names.items()}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return int(backend.get_vocab_size())


def _randomise(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.15 if parameter.dim() > 1 else 0.1
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    return model.eval()


def bert(folder: Path, labels: int = 0) -> Any:
    """A BERT that embeds by the mean of its tokens, or classifies; returns transformers' model."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=write_tokenizer(folder, marked=True), hidden_size=32, intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=128,
        num_labels=labels or 2,
    )  # fmt: skip
    torch.manual_seed(1)
    if labels:
        model: Any = transformers.BertForSequenceClassification(config)
    else:
        model = transformers.BertModel(config, add_pooling_layer=False)
        sentence_transformers(folder, 32, "mean_tokens")
    _randomise(model, 7).save_pretrained(folder)
    return model


@contextmanager
def serving_bert(folder: Path, *words: str) -> Iterator[RunningServer]:
    """Make a BERT that embeds, and serve it."""
    bert(folder)
    with serving(str(folder), *words) as server:
        yield server


def qwen3(folder: Path) -> Any:
    """A Qwen3 whose last token is the embedding; returns transformers' model."""
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=write_tokenizer(folder, marked=False), hidden_size=64, intermediate_size=96,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(2)
    model: Any = _randomise(transformers.Qwen3ForCausalLM(config), 8)
    model.save_pretrained(folder)
    sentence_transformers(folder, 64, "lasttoken")
    return model.model


def sentence_transformers(folder: Path, size: int, mode: str) -> None:
    """Transformer, pooling of one mode, normalisation."""
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(
            (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
        )
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    modes = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "lasttoken")
    pooling: dict[str, Any] = {"word_embedding_dimension": size}
    pooling |= {f"pooling_mode_{name}": name == mode for name in modes}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


@torch.no_grad()
def states(model: Any, token_ids: list[int], token_type_ids: list[int] | None = None) -> Any:
    """[tokens, hidden size]; transformers' final states of one prompt."""
    given = {"input_ids": torch.tensor([token_ids])}
    if token_type_ids is not None:
        given["token_type_ids"] = torch.tensor([token_type_ids])
    return model(**given).last_hidden_state[0]
