"""Processors of transformers, item by item: what they make of whole prompts, or a refusal."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from headrace_core.errors import MissingDependency, RequestError, UnsupportedModel
from headrace_core.multimodal import MediaItem
from headrace_multimodal.auto_processor import AutoMediaProcessor

pytestmark = pytest.mark.filterwarnings("ignore")
SQUARE = {"height": 28, "width": 28}
CROPPED = {"size": {"shortest_edge": 28}, "crop_size": SQUARE}
LLAVA = {
    "patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1,
}  # fmt: skip
SIZES = ((40, 56), (90, 30), (64, 64))


def tokenizer(*special: str, **named: str) -> Any:
    """One token for each byte, and special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    found = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", extra_special_tokens=named
    )
    if special:
        found.add_special_tokens({"additional_special_tokens": list(special)})
    return found


def llava() -> Any:
    return transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessor(**CROPPED),
        tokenizer=tokenizer("<image>"), image_token="<image>", **LLAVA,
    )  # fmt: skip


def llava_next() -> Any:
    return transformers.LlavaNextProcessor(
        image_processor=transformers.LlavaNextImageProcessor(
            **CROPPED, image_grid_pinpoints=[[28, 56], [56, 28]]
        ),
        tokenizer=tokenizer("<image>"), image_token="<image>", **LLAVA,
    )  # fmt: skip


def aria() -> Any:
    return transformers.AriaProcessor(
        image_processor=transformers.AriaImageProcessor(max_image_size=490, min_image_size=336),
        tokenizer=tokenizer(image_token="<|img|>"), size_conversion={490: 8, 980: 16},
    )  # fmt: skip


def got_ocr2() -> Any:
    return transformers.GotOcr2Processor(
        image_processor=transformers.GotOcr2ImageProcessor(size=SQUARE),
        tokenizer=tokenizer("<img>", "</img>", "<imgpad>", "<|im_start|>", "<|im_end|>"),
    )


def deepseek_vl() -> Any:
    return transformers.DeepseekVLProcessor(
        image_processor=transformers.DeepseekVLImageProcessor(size=SQUARE),
        tokenizer=tokenizer(image_token="<image_placeholder>"), num_image_tokens=4,
    )  # fmt: skip


def deepseek_vl_hybrid() -> Any:
    return transformers.DeepseekVLHybridProcessor(
        image_processor=transformers.DeepseekVLHybridImageProcessor(
            size=SQUARE, high_res_size={"height": 64, "width": 64}
        ),
        tokenizer=tokenizer(image_token="<image_placeholder>"), num_image_tokens=4,
    )  # fmt: skip


def janus() -> Any:
    return transformers.JanusProcessor(
        image_processor=transformers.JanusImageProcessor(size=SQUARE),
        tokenizer=tokenizer(
            image_token="<image_placeholder>", boi_token="<begin_of_image>",
            eoi_token="<end_of_image>",
        ),
        num_image_tokens=4, use_default_system_prompt=False,
    )  # fmt: skip


def aya_vision() -> Any:
    special = (
        "<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>", "<|IMG_PATCH|>", "TILE",
        "TILE_GLOBAL",
    )  # fmt: skip
    return transformers.AyaVisionProcessor(
        image_processor=transformers.GotOcr2ImageProcessor(size=SQUARE),
        tokenizer=tokenizer(*special), patch_size=7, img_size=28,
    )  # fmt: skip


def paddleocr_vl() -> Any:
    return transformers.PaddleOCRVLProcessor(
        image_processor=transformers.PaddleOCRVLImageProcessor(),
        tokenizer=tokenizer(image_token="<|IMAGE_PLACEHOLDER|>"),
    )


def qianfan_ocr() -> Any:
    named = {
        "context_image_token": "<IMG_CONTEXT>", "start_image_token": "<img>",
        "end_image_token": "</img>", "image_token": "<image>",
    }  # fmt: skip
    return transformers.QianfanOCRProcessor(
        image_processor=transformers.GotOcr2ImageProcessor(size=SQUARE),
        tokenizer=tokenizer(**named),
    )


def glm4v() -> Any:
    return transformers.Glm4vProcessor(
        image_processor=transformers.Glm4vImageProcessor(),
        tokenizer=tokenizer(image_token="<|image|>", video_token="<|video|>"),
        video_processor=transformers.Glm4vVideoProcessor(),
    )


def video_llama_3() -> Any:
    return transformers.VideoLlama3Processor(
        image_processor=transformers.VideoLlama3ImageProcessor(),
        tokenizer=tokenizer(image_token="<image>", video_token="<video>"),
        video_processor=transformers.VideoLlama3VideoProcessor(),
    )


def llama4() -> Any:
    special = (
        "<|image|>", "<|image_start|>", "<|image_end|>", "<|patch|>", "<|tile_x_separator|>",
        "<|tile_y_separator|>",
    )  # fmt: skip
    return transformers.Llama4Processor(
        image_processor=transformers.Llama4ImageProcessor(size=SQUARE, max_patches=4),
        tokenizer=tokenizer(*special), patch_size=7,
    )  # fmt: skip


def idefics2() -> Any:
    return transformers.Idefics2Processor(
        image_processor=transformers.Idefics2ImageProcessor(
            size={"shortest_edge": 28, "longest_edge": 56}, do_image_splitting=False
        ),
        tokenizer=tokenizer("<fake_token_around_image>", "<image>", "<end_of_utterance>"),
        image_seq_len=4,
    )


def blip_2() -> Any:
    return transformers.Blip2Processor(
        image_processor=transformers.BlipImageProcessor(size=SQUARE),
        tokenizer=tokenizer("<image>"), num_query_tokens=4,
    )  # fmt: skip


SERVED: dict[str, tuple[Callable[[], Any], str]] = {
    "llava": (llava, "<image>"),
    "llava_next": (llava_next, "<image>"),
    "aria": (aria, "<|img|>"),
    "got_ocr2": (got_ocr2, "<imgpad>"),
    "deepseek_vl": (deepseek_vl, "<image_placeholder>"),
    "deepseek_vl_hybrid": (deepseek_vl_hybrid, "<image_placeholder>"),
    "janus": (janus, "<image_placeholder>"),
    "aya_vision": (aya_vision, "<|IMG_PATCH|>"),
    "paddleocr_vl": (paddleocr_vl, "<|IMAGE_PLACEHOLDER|>"),
    "qianfan_ocr": (qianfan_ocr, "<IMG_CONTEXT>"),
    "glm4v": (glm4v, "<|image|>"),
    "video_llama_3": (video_llama_3, "<image>"),
    "llama4": (llama4, "<|patch|>"),
}
"""Family -> its processor, and the token whose places take vectors."""
_TORCHVISION = ("glm4v", "video_llama_3", "llama4")
needs_torchvision = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="the processor needs torchvision"
)
FAMILIES = [
    pytest.param(name, marks=needs_torchvision) if name in _TORCHVISION else name for name in SERVED
]


def picture(seed: int, height: int, width: int) -> Any:
    draw = np.random.default_rng(seed)
    return draw.integers(0, 256, (height, width, 3), dtype=np.uint8)


def item(pixels: Any) -> MediaItem:
    return MediaItem("image", pixels, "0" * 64, {})


def made(library: Any, vector: str, folder: Path) -> AutoMediaProcessor:
    library.save_pretrained(folder)
    config = {
        "architectures": ["Some"],
        "image_token_id": library.tokenizer.convert_tokens_to_ids(vector),
    }
    return AutoMediaProcessor(config, folder)


@pytest.mark.parametrize("name", FAMILIES)
def test_items_alone_are_those_of_the_whole_prompt(name: str, tmp_path: Path) -> None:
    build, vector = SERVED[name]
    library = build()
    own = made(library, vector, tmp_path)
    pixels = [picture(i, *size) for i, size in enumerate(SIZES)]
    mark = own.placeholder("image", 0)
    text = f"see {mark}{mark} or {mark}!"
    items = own.process([item(p) for p in pixels], {})
    placed = own.place(library.tokenizer(text)["input_ids"], items)
    whole = library(text=text, images=[Image.fromarray(p) for p in pixels], return_tensors="pt")
    assert placed.token_ids == whole["input_ids"][0].tolist()
    mark_id = library.tokenizer.convert_tokens_to_ids(vector)
    for offset, one in zip(placed.offsets, items, strict=True):
        there = placed.token_ids[offset : offset + one.num_tokens]
        assert tuple(there) == one.token_ids
        rows = [i for first, number in one.runs for i in range(first, first + number)]
        assert rows == [i for i, token in enumerate(there) if token == mark_id]
    for key in items[0].inputs:
        parts = [
            np.frombuffer(one.inputs[key].data, one.inputs[key].dtype).reshape(
                one.inputs[key].shape
            )
            for one in items
        ]
        np.testing.assert_allclose(np.concatenate(parts), np.asarray(whole[key].float()), atol=1e-5)


@pytest.mark.parametrize("name", ["llava", "aya_vision", "paddleocr_vl"])
def test_the_largest_item_is_at_least_as_large_as_others(name: str, tmp_path: Path) -> None:
    build, vector = SERVED[name]
    own = made(build(), vector, tmp_path)
    (other,) = own.process([item(picture(0, 300, 200))], {})
    assert own.largest("image", {}).num_tokens >= other.num_tokens


def test_options_are_the_image_processors(tmp_path: Path) -> None:
    own = made(llava(), "<image>", tmp_path)
    one = item(picture(0, 40, 56))
    (plain,) = own.process([one], {})
    (other,) = own.process([one], {"do_normalize": False})
    assert plain.inputs != other.inputs
    for options, message in (
        (
            {"crops": 4},
            "mm_processor_kwargs.crops: no such option; this model's are .*do_normalize",
        ),
        ({"return_tensors": "np"}, "no such option"),
        ({"size": "wide"}, "size = 'wide': must be the checkpoint's own, {'shortest_edge': 28}"),
        ({"size": {"shortest_edge": 100000}}, "must be the checkpoint's own"),
        ({"size": {"shortest_edge": 14}}, "must be the checkpoint's own"),
        ({"crop_size": 0}, "crop_size = 0: must be the checkpoint's own"),
        ({"crop_size": {"height": 28, "width": 56}}, "must be the checkpoint's own"),
        ({"do_center_crop": False}, "do_center_crop = False: must be the checkpoint's own, True"),
        ({"do_pad": True, "pad_size": {"height": 64, "width": 64}}, "must be the checkpoint's own"),
        ({"rescale_factor": 1e308}, "rescale_factor = 1e.308: must be the checkpoint's own"),
        ({"image_mean": [1e308] * 3}, "three numbers from 0.001 to 1000"),
        ({"do_normalize": 1}, "true or false"),
    ):
        with pytest.raises(RequestError, match=message):
            own.process([one], options)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (idefics2, "pixel_values of two images of unequal sizes .* pads or numbers"),
        (blip_2, "two images have other tokens together than alone"),
        (lambda: transformers.LlavaProcessor(  # knows no sizes of patches
            image_processor=transformers.CLIPImageProcessor(**CROPPED),
            tokenizer=tokenizer("<image>"), image_token="<image>"), "unsupported operand"),
    ],
)  # fmt: skip
def test_processors_that_need_the_whole_prompt_are_refused(
    build: Callable[[], Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=message) as refused:
        made(build(), "<image>", tmp_path)
    assert "limit-mm-per-prompt" in str(refused.value)


def test_no_code_of_a_checkpoint_runs(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "processing_own.py").write_text(f"open({str(ran)!r}, 'w')\n")
    named = {"processor_class": "Own", "auto_map": {"AutoProcessor": "processing_own.Own"}}
    (tmp_path / "processor_config.json").write_text(json.dumps(named))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own"}))
    with pytest.raises(UnsupportedModel, match="code of the checkpoint is never run"):
        AutoMediaProcessor({"architectures": ["Own"]}, tmp_path)
    assert not ran.exists()


def test_without_transformers_the_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(MissingDependency, match=r"headrace-multimodal\[transformers\]"):
        AutoMediaProcessor({}, tmp_path)
