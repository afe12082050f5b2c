"""ERNIE 4.5 VL in the whole engine: what the model says itself, even a mark of images, goes to the experts of
text, whatever else is in the step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from image_checkpoints import TEXT, finish, picture
from PIL import ImageFont
from speech_checkpoints import save_tokenizer, token_ids

from headrace import LLM, SamplingParams
from headrace_core.multimodal import MediaItem
from headrace_multimodal import processor_for

NAMES = (
    "<|IMAGE_START|>", "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_END|>", "<|VIDEO_START|>", "<|VIDEO_END|>",
    "<|VIDEO_PLACEHOLDER|>",
)  # fmt: skip
MARK = "".join(NAMES[:3])
FILM = "<|VIDEO_START|><|video@placeholder|><|VIDEO_END|>"
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_num_seqs": 8, "num_threads": 1, "block_size": 8, "max_model_len": 256,
    "kv_cache_memory_bytes": 16 << 20, "use_tqdm_on_load": False,
}  # fmt: skip
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS: dict[str, list[int]] = {
    f"the water {MARK} runs": [1], MARK: [2], f"the wheel{MARK} in {MARK} the race": [1, 3], "in the": [],
    f"the {FILM} in {MARK} runs": [2, -3],
}  # fmt: skip
"""Prompt -> its pictures, and below 0 its videos. The second one's answer begins with a mark of images."""


class Seer(NamedTuple):
    folder: Path
    oracle: Any
    ids: dict[str, int]

    def wanted(self, text: str, numbers: list[int]) -> list[int]:
        """Transformers' tokens, for numbers and tokens of headrace's processor."""
        config = json.loads((self.folder / "config.json").read_text())
        processor = processor_for(config["architectures"][0], config, self.folder)
        media = processor.process([_item(number) for number in numbers], {})
        tokens = torch.tensor([processor.place(token_ids(self.folder, text), media).token_ids])
        given: dict[str, Any] = {}
        if numbers:
            image, film = self.ids[NAMES[1]], self.ids[NAMES[5]]
            marks = torch.tensor([self.ids[name] for name in NAMES])
            given["mm_token_type_ids"] = (tokens == image).int() + 2 * (tokens == film).int()
            given["moe_mm_token_type_ids"] = torch.isin(tokens, marks)
            inputs = [(name, _array(value)) for one in media for name, value in one.inputs.items()]
            for name in dict(inputs):
                values = [value for its, value in inputs if its == name]
                given[name] = (torch.stack if "grid" in name else torch.cat)(values)
        out = self.oracle.generate(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), do_sample=False,
            max_new_tokens=8, min_new_tokens=8, **given,
        )  # fmt: skip
        made: list[int] = out[0, tokens.shape[1] :].tolist()
        return made


def film(number: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(number).integers(0, 256, (number, 40, 50, 3), np.uint8)


def _item(number: int) -> MediaItem:
    if number < 0:
        return MediaItem("video", film(-number), str(number), {})
    return MediaItem("image", np.asarray(picture(number)), str(number), {})


def _array(packed: Any) -> torch.Tensor:
    return torch.tensor(np.frombuffer(packed.data, packed.dtype).reshape(packed.shape).copy())


@pytest.fixture(scope="module")
def seer(tmp_path_factory: pytest.TempPathFactory) -> Seer:
    from transformers import Ernie4_5_VLMoeConfig, Ernie4_5_VLMoeForConditionalGeneration

    folder = tmp_path_factory.mktemp("ernie_vl")
    ids = save_tokenizer(folder, ("<|endoftext|>", *NAMES))
    keys = ("image_start", "image", "image_end", "video_start", "video_end", "video")
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}
    text = {
        **TEXT, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": [24, 16],
        "rope_parameters": rope, "eos_token_id": ids["<|endoftext|>"], "bos_token_id": None,
    }  # fmt: skip
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 64,
        "patch_size": 8,
    }
    marks = {f"{key}_token_id": ids[name] for key, name in zip(keys, NAMES, strict=True)}
    config = Ernie4_5_VLMoeConfig(vision_config=vision, text_config=text, **marks)
    torch.manual_seed(0)
    size = {"shortest_edge": 16 * 16 * 4, "longest_edge": 16 * 16 * 30}
    settings = {"patch_size": 8, "merge_size": 2, "size": size}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    font: Any = ImageFont.load_default(20)
    (folder / "Roboto-Regular.ttf").write_bytes(font.path.getvalue())
    model = Ernie4_5_VLMoeForConditionalGeneration(config)
    return Seer(folder, finish(folder, model, MARK, ids["<|endoftext|>"]), ids)


@pytest.fixture(scope="module")
def expected(seer: Seer) -> list[list[int]]:
    return [seer.wanted(*pair) for pair in PROMPTS.items()]


def test_an_answer_begins_with_a_mark_of_images(seer: Seer, expected: list[list[int]]) -> None:
    assert expected[1][0] in [seer.ids[name] for name in NAMES[:5]]


@pytest.mark.parametrize("tokens", [512, 16, 8])
def test_it_equals_transformers(seer: Seer, expected: list[list[int]], tokens: int) -> None:
    prompts = []
    for text, numbers in PROMPTS.items():
        media: dict[str, list[Any]] = {}
        for number in numbers:
            kind = "video" if number < 0 else "image"
            media.setdefault(kind, []).append(film(-number) if number < 0 else picture(number))
        prompts.append({"prompt": text, **({"multi_modal_data": media} if media else {})})
    with LLM(str(seer.folder), **SETTINGS, max_num_batched_tokens=tokens) as model:
        for _ in range(2):  # the second time from caches
            outputs = model.generate(prompts, PARAMS)
            assert [list(output.outputs[0].token_ids) for output in outputs] == expected
