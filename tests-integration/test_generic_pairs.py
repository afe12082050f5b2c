"""Tiny models with their own processors, by transformers' code in the whole engine: what the one makes is
what the other takes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from image_checkpoints import picture
from test_generic_processors import (
    CROPPED,
    LLAVA,
    SQUARE,
    needs_torchvision,
    tokenizer,
)

from headrace import LLM, SamplingParams
from headrace_testing.model.decoders import randomise

sys.path.insert(0, str(Path(__file__).parent.parent / "packages" / "models" / "tests"))
import every_image_model as survey

pytestmark = pytest.mark.filterwarnings("ignore")
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "num_threads": 1, "block_size": 8, "max_model_len": 200, "enforce_eager": True,
    "kv_cache_memory_bytes": 16 << 20, "use_tqdm_on_load": False, "max_num_batched_tokens": 24,
}  # fmt: skip


def deepseek_vl() -> Any:
    return transformers.DeepseekVLProcessor(
        image_processor=transformers.DeepseekVLImageProcessor(size=SQUARE),
        tokenizer=tokenizer(image_token="<image_placeholder>"), num_image_tokens=16,
    )  # fmt: skip


def deepseek_vl_hybrid() -> Any:
    return transformers.DeepseekVLHybridProcessor(
        image_processor=transformers.DeepseekVLHybridImageProcessor(
            size=SQUARE, high_res_size={"height": 64, "width": 64}
        ),
        tokenizer=tokenizer(image_token="<image_placeholder>"), num_image_tokens=16,
    )  # fmt: skip


def janus() -> Any:
    named = {
        "image_token": "<image_placeholder>", "boi_token": "<begin_of_image>",
        "eoi_token": "<end_of_image>",
    }  # fmt: skip
    return transformers.JanusProcessor(
        image_processor=transformers.JanusImageProcessor(size=SQUARE, min_size=14),
        tokenizer=tokenizer(**named), num_image_tokens=16, use_default_system_prompt=False,
    )  # fmt: skip


def qianfan_ocr() -> Any:
    named = {
        "context_image_token": "<IMG_CONTEXT>", "start_image_token": "<img>",
        "end_image_token": "</img>", "image_token": "<image>",
    }  # fmt: skip
    return transformers.QianfanOCRProcessor(
        image_processor=transformers.GotOcr2ImageProcessor(size=SQUARE, max_patches=3),
        tokenizer=tokenizer(**named), image_seq_length=4,
    )  # fmt: skip


def video_llava() -> Any:
    return transformers.VideoLlavaProcessor(
        image_processor=transformers.VideoLlavaImageProcessor(**CROPPED),
        video_processor=transformers.VideoLlavaVideoProcessor(),
        tokenizer=tokenizer("<image>", "<video>"), **LLAVA,
    )  # fmt: skip


def llama4() -> Any:
    special = (
        "<|image|>", "<|image_start|>", "<|image_end|>", "<|patch|>", "<|tile_x_separator|>",
        "<|tile_y_separator|>",
    )  # fmt: skip
    return transformers.Llama4Processor(
        image_processor=transformers.Llama4ImageProcessor(size=SQUARE, max_patches=4),
        tokenizer=tokenizer(*special), patch_size=7,
    )  # fmt: skip


def glm4v() -> Any:
    return transformers.Glm4vProcessor(
        image_processor=transformers.Glm4vImageProcessor(
            patch_size=7, size={"shortest_edge": 14 * 14 * 4, "longest_edge": 14 * 14 * 24}
        ),
        tokenizer=tokenizer(image_token="<|image|>", video_token="<|video|>"),
        video_processor=transformers.Glm4vVideoProcessor(),
    )


PAIRS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "deepseek_vl": (deepseek_vl, "<image_placeholder>", "<image_placeholder>"),
    "deepseek_vl_hybrid": (deepseek_vl_hybrid, "<image_placeholder>", "<image_placeholder>"),
    "janus": (janus, "<image_placeholder>", "<image_placeholder>"),
    "qianfan_ocr": (qianfan_ocr, "<image>", "<IMG_CONTEXT>"),
    "video_llava": (video_llava, "<image>", "<image>"),
    "llama4": (llama4, "<|image|>", "<|patch|>"),
    "glm4v": (glm4v, "<|image|>", "<|image|>"),
}
"""Family -> its processor, the placeholder of prompts, and the token whose places take vectors."""
_TORCHVISION = ("video_llava", "llama4", "glm4v")


def save(kind: str, folder: Path) -> tuple[Any, Any, str]:
    """A checkpoint; its processor, transformers' model, and the placeholder."""
    build, mark, vector = PAIRS[kind]
    processor = build()
    number = processor.tokenizer.convert_tokens_to_ids(vector)
    model_class = getattr(transformers, survey.model_types()[kind])
    config = survey.tiny_config(model_class.config_class, kind)
    for key in ("image_token_id", "image_token_index"):
        if hasattr(config, key):
            setattr(config, key, number)
    config.get_text_config().vocab_size = 320
    torch.manual_seed(0)
    model = model_class._from_config(config, attn_implementation="eager", dtype=torch.float32)
    randomise(model.eval())
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return processor, model, mark


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=needs_torchvision) if k in _TORCHVISION else k for k in PAIRS],
)
def test_it_says_what_transformers_says(kind: str, tmp_path: Path) -> None:
    processor, oracle, mark = save(kind, tmp_path)
    text = f"see {mark} or {mark} there"
    images = [picture(1, 40, 56), picture(2, 90, 30)]
    given = dict(processor(text=text, images=images, return_tensors="pt"))
    given.pop("token_type_ids", None)
    size = given["input_ids"].shape[1]
    given = {k: v.float() if v.is_floating_point() else v for k, v in given.items()}
    oracle.generation_config.eos_token_id = None
    out = oracle.generate(**given, do_sample=False, max_new_tokens=6)
    with LLM(str(tmp_path), model_impl="transformers", **SETTINGS) as model:
        prompt = {"prompt": text, "multi_modal_data": {"image": images}}
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        (found,) = model.generate(prompt, params)
    assert list(found.prompt_token_ids) == given["input_ids"][0].tolist()
    assert list(found.outputs[0].token_ids) == out[0, size:].tolist()
