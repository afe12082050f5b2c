"""A tiny InstructBLIP with random weights, made by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from image_checkpoints import TEXT, finish
from speech_checkpoints import save_tokenizer

_WORDS = ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "the", "water", "runs", "in", "race", "wheel")


def save_former_tokenizer(folder: Path) -> None:
    """A few words in small letters between two marks, as BERT's has it."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(_WORDS)}, "[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    made.enable_truncation(5)
    made.enable_padding(length=5)
    (folder / "qformer_tokenizer").mkdir(parents=True)
    made.save(str(folder / "qformer_tokenizer" / "tokenizer.json"))


def save_instructblip(folder: Path) -> Any:
    """Images of 5 tokens that depend on the text, in front of a Llama; returns transformers' model."""
    from transformers import InstructBlipConfig, InstructBlipForConditionalGeneration
    from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

    ids = save_tokenizer(folder, ("<|endoftext|>", "<image>"))
    save_former_tokenizer(folder)
    end = ids["<|endoftext|>"]
    vision = {
        "hidden_size": 36, "intermediate_size": 50, "num_hidden_layers": 2, "num_attention_heads": 3,
        "image_size": 28, "patch_size": 7,
    }  # fmt: skip
    former = {
        "hidden_size": 24, "num_attention_heads": 2, "intermediate_size": 40, "vocab_size": len(_WORDS),
        "max_position_embeddings": 40, "num_hidden_layers": 2,
    }  # fmt: skip
    text = {**TEXT, "model_type": "llama", "eos_token_id": end, "bos_token_id": None}
    torch.manual_seed(0)
    config = InstructBlipConfig(
        vision_config=vision, qformer_config=former, text_config=text, num_query_tokens=5,
        image_token_index=ids["<image>"],
    )  # fmt: skip
    BlipImageProcessorPil(size={"height": 28, "width": 28}).save_pretrained(folder)
    model = finish(folder, InstructBlipForConditionalGeneration(config), "<image>", end)
    model.language_model.generation_config.eos_token_id = None  # it may go on
    return model
