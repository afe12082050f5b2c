"""Writing what was trained as a checkpoint in LLaVA's Hugging Face layout."""

from __future__ import annotations

import copy
import json
import random
import shutil
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from vision_demo.network import PATCH
from vision_demo.pictures import SIZE, draw_scene, paint
from vision_demo.text import END_OF_TEXT, IM_END, IMAGE, SPECIAL, TEMPLATE
from vision_demo.training import Trainer, num_parameters

_CARD = Path(__file__).with_name("card.md")


def export(trainer: Trainer, out: Path) -> None:
    """Everything that `from_pretrained` reads, and a card that awaits the evaluation's figures."""
    out.mkdir(parents=True, exist_ok=True)
    model = copy.deepcopy(trainer.model).to(torch.bfloat16)
    model.generation_config.update(
        do_sample=False,
        eos_token_id=[SPECIAL.index(IM_END), SPECIAL.index(END_OF_TEXT)],
        pad_token_id=0,
    )
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # made private; a wheel would keep that
    trainer.tokenizer.save(str(out / "tokenizer.json"))
    shutil.copyfile(TEMPLATE, out / "chat_template.jinja")
    _write(
        out / "tokenizer_config.json",
        _tokenizer_config(model.config.text_config.max_position_embeddings),
    )
    _write(out / "preprocessor_config.json", _preprocessor_config())
    _write(out / "processor_config.json", _processor_config())
    (out / "README.md").write_text(_card(trainer), encoding="utf-8")


def sheet(rng: random.Random, columns: int = 12, rows: int = 8) -> Image.Image:
    """Pictures of the training, side by side."""
    whole = Image.new("RGB", (columns * SIZE, rows * SIZE))
    for place in range(columns * rows):
        at = (place % columns * SIZE, place // columns * SIZE)
        whole.paste(paint(draw_scene(rng), rng), at)
    return whole


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _card(trainer: Trainer) -> str:
    config = trainer.model.config
    return _CARD.read_text(encoding="utf-8").format(
        parameters=num_parameters(trainer.model) / 1e6,
        steps=trainer.step,
        batch=trainer.settings.batch,
        pictures=trainer.step * trainer.settings.batch / 1000,
        minutes=trainer.seconds / 60,
        seed=trainer.settings.seed,
        tower=config.vision_config.hidden_size,
        patch=PATCH,
        side=SIZE,
        width=config.text_config.hidden_size,
        vocabulary=config.text_config.vocab_size,
    )


def _preprocessor_config() -> dict[str, Any]:
    size = {"height": SIZE, "width": SIZE}
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": size,
        "resample": 3,
        "do_center_crop": False,
        "crop_size": size,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }


def _processor_config() -> dict[str, Any]:
    return {
        "processor_class": "LlavaProcessor",
        "image_token": IMAGE,
        "patch_size": PATCH,
        "num_additional_image_tokens": 1,
        "vision_feature_select_strategy": "default",
    }


def _tokenizer_config(positions: int) -> dict[str, Any]:
    added = {
        str(place): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for place, token in enumerate(SPECIAL)
    }
    return {
        "add_bos_token": False,
        "added_tokens_decoder": added,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": IM_END,
        "extra_special_tokens": {"image_token": IMAGE},
        "model_max_length": positions,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
