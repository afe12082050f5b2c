"""Tiny checkpoints of encoders of texts and images with random weights, made by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from speech_checkpoints import save_tokenizer

from headrace_testing.model.decoders import randomise

BEGIN, END, PAD = "<|startoftext|>", "<|endoftext|>", "<pad>"
TOWER: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 3,
    "image_size": 28, "patch_size": 7,
}  # fmt: skip
TEXT: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4,
}  # fmt: skip


def put_around(folder: Path, ids: dict[str, int], begin: str, end: str) -> None:
    """Have the tokenizer put special tokens around each text; "": none."""
    from tokenizers import Tokenizer, processors

    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    around = [name for name in (begin, end) if name]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*([begin] if begin else []), "$A", end],
        special_tokens=[(name, ids[name]) for name in around],
    )
    tokenizer.save(file)
    named = {"bos_token": begin, "eos_token": end, "pad_token": PAD}
    named = {key: name for key, name in named.items() if name in ids}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))


def save_clip(folder: Path) -> Any:
    """CLIP without a chat template; 32 tokens at most. Returns the model that is the oracle."""
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

    ids = save_tokenizer(folder, (BEGIN, END))
    put_around(folder, ids, BEGIN, END)
    text = {
        **TEXT, "max_position_embeddings": 32, "bos_token_id": ids[BEGIN], "eos_token_id": ids[END],
        "pad_token_id": ids[END],
    }  # fmt: skip
    torch.manual_seed(0)
    model: Any = CLIPModel(CLIPConfig(text_config=text, vision_config=TOWER, projection_dim=40))
    randomise(model.eval())
    model.save_pretrained(folder)
    square = {"height": 28, "width": 28}
    CLIPImageProcessor(size={"shortest_edge": 28}, crop_size=square).save_pretrained(folder)
    return model


def save_siglip(folder: Path) -> Any:
    """SigLIP without a chat template; 24 tokens. Its tokenizer fills texts up with a token that the config
    does not name, as SigLIP 2's does. Returns the model that is the oracle."""
    from transformers import SiglipConfig, SiglipImageProcessor, SiglipModel

    ids = save_tokenizer(folder, (END, PAD))
    put_around(folder, ids, "", END)
    text = {**TEXT, "max_position_embeddings": 24, "projection_size": TOWER["hidden_size"]}
    torch.manual_seed(0)
    model: Any = SiglipModel(SiglipConfig(text_config=text, vision_config=TOWER))
    randomise(model.eval())
    model.save_pretrained(folder)
    SiglipImageProcessor(size={"height": 28, "width": 28}).save_pretrained(folder)
    return model
