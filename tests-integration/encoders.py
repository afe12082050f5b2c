"""Tiny encoders with random weights and a tokenizer trained here: one that embeds, one that scores."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch

WORDS = [
    "river", "water", "wheel", "mill", "stone", "grain", "flour", "bread", "dam", "gate", "flow",
    "race", "head", "tail", "power", "engine", "light", "city", "night", "road", "snow", "summer",
]  # fmt: skip
HIDDEN = 32
MAX_LENGTH = 64


def sentence(seed: int, length: int = 8) -> str:
    """Words, always the same ones for a seed."""
    return " ".join(random.Random(seed).choices(WORDS, k=length))


CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"


def save_tokenizer(folder: Path, chat_template: str | None = None) -> None:
    """A WordPiece tokenizer as BERT's, that marks the two texts of a pair."""
    from tokenizers import (
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )
    from transformers import PreTrainedTokenizerFast

    tokenizer: Any = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=special)
    tokenizer.train_from_iterator([sentence(i) for i in range(200)], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", tokenizer.token_to_id("[CLS]")),
                        ("[SEP]", tokenizer.token_to_id("[SEP]"))],
    )  # fmt: skip
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=MAX_LENGTH, pad_token="[PAD]",
        unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]",
        chat_template=chat_template,
    )  # fmt: skip
    fast.save_pretrained(folder)


def save_encoder(folder: Path, *, labels: int = 0) -> torch.nn.Module:
    """A BERT checkpoint in ``folder``; returns the model that is the oracle.

    Args:
        labels: of a head that classifies; 0: it embeds, by normalised means of any size, and has a
            chat template.
    """
    import transformers

    torch.manual_seed(labels)
    config = transformers.BertConfig(
        vocab_size=300, hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=MAX_LENGTH, num_labels=labels or 2,
        initializer_range=0.3,
    )  # fmt: skip
    kind = transformers.BertForSequenceClassification if labels else transformers.BertModel
    model = kind(config).eval()
    model.save_pretrained(folder)
    save_tokenizer(folder, None if labels else CHAT_TEMPLATE)
    if not labels:
        _make_sentence_transformer(folder)
    return model


def _make_sentence_transformer(folder: Path) -> None:
    """The files of Sentence Transformers: means, normalised."""
    names = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (path, name) in enumerate(names.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": HIDDEN, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "is_matryoshka": True}))
