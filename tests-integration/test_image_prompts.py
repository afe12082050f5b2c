"""Decoders that see: images in place of placeholders, in the whole engine."""

from __future__ import annotations

import base64
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from image_checkpoints import (
    data_url,
    encoded,
    picture,
    pixtral_images,
    save_gemma3,
    save_gemma4,
    save_internvl_chat,
    save_lfm2_vl,
    save_llama4,
    save_llava,
    save_minicpmv,
    save_ovis2,
    save_phi3v,
    save_pixtral,
    save_qwen2_vl,
    save_qwen3_5,
    save_qwen3_vl,
)
from kin_checkpoints import CACHE_GROUPS, KIN, STEPS, by_own_processor, mark_of
from speech_checkpoints import token_ids

from headrace import LLM, SamplingParams
from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_multimodal import processor_for
from headrace_testing.sampling import todays

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_num_seqs": 8, "num_threads": 1, "block_size": 8, "max_model_len": 256,
    "kv_cache_memory_bytes": 16 << 20, "use_tqdm_on_load": False,
}  # fmt: skip
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SIZES = {"a": (40, 56), "b": (90, 30), "c": (64, 64)}
"""Name of a picture -> height and width."""
PROMPTS = {
    "the water MARK runs": "a",
    "MARK": "c",
    "the wheelMARK in MARK the long race over the water": "ab",
    "in the race": "",
    "MARKMARK": "cc",
    "the water MARK runs over": "b",
}
MODES: dict[str, dict[str, Any]] = {
    "captured": {},
    "eager": {"enforce_eager": True, "mm_encoder_attn_backend": "sdpa"},
    "chunked": {"max_num_batched_tokens": 8},
    "no prefix cache": {"enable_prefix_caching": False},
    "preempted": {"num_gpu_blocks_override": 34},
    "process": {"engine_process": True, "mm_processor_cache_type": "shm"},
}


class Seer(NamedTuple):
    """A checkpoint, its oracle, and how it marks an image in a prompt."""

    folder: Path
    oracle: Any
    mark: str
    token: str
    inputs: Callable[[Path, Sequence[Any]], dict[str, Any]]
    cache_groups: int = 1
    step: int = 8
    """Tokens of the least step."""


def of_llava(folder: Path, images: Sequence[Any]) -> dict[str, Any]:
    from transformers import CLIPImageProcessor

    made = CLIPImageProcessor.from_pretrained(folder)(images=list(images), return_tensors="pt")
    [mark] = token_ids(folder, "<image>")
    return {"pixel_values": made["pixel_values"], "items": [[mark] * 16] * len(images)}


def of_qwen(folder: Path, images: Sequence[Any]) -> dict[str, Any]:
    from transformers import Qwen2VLImageProcessor

    made = Qwen2VLImageProcessor.from_pretrained(folder)(images=list(images), return_tensors="pt")
    [mark] = token_ids(folder, "<|image_pad|>")
    counts = (made["image_grid_thw"].prod(1) // 4).tolist()
    return {**made, "items": [[mark] * count for count in counts]}


def of_pixtral(folder: Path, images: Sequence[Any]) -> dict[str, Any]:
    library = pixtral_images(size={"longest_edge": 64}, patch_size=8)
    made = library(images=list(images), return_tensors="pt")
    mark, row_end, last = token_ids(folder, "[IMG][IMG_BREAK][IMG_END]")
    items = []
    for height, width in made["image_sizes"].tolist():
        rows = ([mark] * (width // 8) + [row_end]) * (height // 8)
        items.append([*rows[:-1], last])
    return {
        "pixel_values": made["pixel_values"],
        "image_sizes": made["image_sizes"],
        "items": items,
    }


def of_gemma3(folder: Path, images: Sequence[Any]) -> dict[str, Any]:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    library = Gemma3ImageProcessorPil.from_pretrained(folder)
    made = library(images=list(images), return_tensors="pt")
    lines = token_ids(folder, "\n\n")
    begin, mark, end = token_ids(folder, "<start_of_image><image_soft_token><end_of_image>")
    item = [*lines, begin, *[mark] * 4, end, *lines]
    return {"pixel_values": made["pixel_values"], "items": [item] * len(images)}


def of_gemma4(folder: Path, images: Sequence[Any]) -> dict[str, Any]:
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    library = Gemma4ImageProcessorPil.from_pretrained(folder)
    made = library(images=list(images), return_tensors="pt")
    begin, mark, end = token_ids(folder, "<|image><|image|><image|>")
    items = [[begin, *[mark] * count, end] for count in made.pop("num_soft_tokens_per_image")]
    return {**made, "items": items}


def of_internvl(folder: Path, images: Sequence[Any]) -> dict[str, Any]:
    from transformers import GotOcr2ImageProcessorPil

    library = GotOcr2ImageProcessorPil(
        size={"height": 16, "width": 16}, crop_to_patches=True, max_patches=4,
        image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225],
    )  # fmt: skip
    made = library(images=list(images), return_tensors="pt")
    begin, mark, end = token_ids(folder, "<img><IMG_CONTEXT></img>")
    items = [[begin, *[mark] * 4 * count, end] for count in made["num_patches"]]
    return {"pixel_values": made["pixel_values"], "items": items}


def of_llama4(folder: Path, images: Sequence[Any]) -> dict[str, Any]:
    from test_image_processors_llama4 import library, whole

    made = library(size={"height": 16, "width": 16}, max_patches=4)(
        images=list(images), return_tensors="pt"
    )
    words = whole(library(), patch_size=4)
    texts = [words.replace_image_token(made, index) for index in range(len(images))]
    items = [token_ids(folder, text) for text in texts]
    return {"pixel_values": made["pixel_values"].float(), "items": items}


def of_minicpmv(folder: Path, images: Sequence[Any]) -> dict[str, Any]:
    from test_image_processors_minicpmv import library, written

    found, items = [], []
    settings = {"patch_size": 8, "scale_resolution": 32, "max_slice_nums": 4}
    for index, image in enumerate(images):
        made = library(**settings)(images=image, return_tensors="np")
        values = made["pixel_values"][0].reshape(3, 8, -1, 8).transpose(2, 0, 1, 3)
        found.append(
            {
                "pixel_values": torch.tensor(values.reshape(len(values), -1)),
                "tgt_sizes": torch.tensor(made["target_sizes"]),
            }
        )
        items.append(token_ids(folder, written(made["grids"][0], index, 5)))
    return {"images": found, "items": items}


def of_phi3v(folder: Path, images: Sequence[Any]) -> dict[str, Any]:
    from test_image_processors_phi3v import Plain

    library = Plain(num_crops=2, side=16)
    found, items = [], []
    [mark] = token_ids(folder, "<|image|>")
    for image in images:
        made = {name: value[0] for name, value in library(image).items()}
        rows, columns = made["image_grid"].tolist()
        found.append(made)
        items.append([mark] * ((rows * columns + 1) * 4 + 1 + (rows + 1) * 2))
    return {"images": found, "items": items}


def of_lfm2_vl(folder: Path, images: Sequence[Any]) -> dict[str, Any]:
    from test_image_processors_lfm2_vl import library, text_of

    own = library(**json.loads((folder / "preprocessor_config.json").read_text()))
    made = [own(image) for image in images]
    items = [token_ids(folder, text_of(one, own)) for one in made]
    names = ("pixel_values", "spatial_shapes", "pixel_attention_mask")
    return {**{name: torch.cat([one[name] for one in made]) for name in names}, "items": items}


def of_ovis2(folder: Path, images: Sequence[Any]) -> dict[str, Any]:
    from transformers.models.ovis2.image_processing_pil_ovis2 import Ovis2ImageProcessorPil

    made = Ovis2ImageProcessorPil.from_pretrained(folder)(images=list(images), return_tensors="pt")
    texts = []
    for rows, columns in made["grids"].tolist():
        tile = "<IMG_ATOM>" * 4
        cut = "<IMG_ROW>".join(["<IMG_COL>".join([tile] * columns)] * rows)
        cut = cut if rows * columns > 1 else ""
        texts.append(f"<IMG_START>{tile}<IMG_GRID>{cut}<IMG_END>")
    items = [token_ids(folder, text) for text in texts]
    return {"pixel_values": made["pixel_values"], "items": items}


SEERS = [
    "llava", "qwen2_vl", "qwen3_vl", "qwen3_5", "pixtral", "gemma3", "gemma4", "gemma4_whole",
    "internvl_chat", "llama4", "minicpmv", "phi3v", "lfm2_vl", "ovis2",
    *KIN,
]  # fmt: skip


@pytest.fixture(scope="module", params=todays(SEERS, days=3))
def seer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seer:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param in KIN:
        groups, step = CACHE_GROUPS.get(request.param, 1), STEPS.get(request.param, 8)
        saved, mark = KIN[request.param](folder), mark_of(folder)
        return Seer(folder, saved, mark, mark, by_own_processor, groups, step)
    if request.param == "minicpmv":
        return Seer(folder, save_minicpmv(folder), "<unk>", "<unk>", of_minicpmv)
    if request.param == "lfm2_vl":
        saved = save_lfm2_vl(folder)
        return Seer(folder, saved, "<image>", "<image>", of_lfm2_vl, cache_groups=2)
    if request.param == "phi3v":
        return Seer(folder, save_phi3v(folder), "<|image|>", "<|image|>", of_phi3v)
    if request.param == "ovis2":
        return Seer(folder, save_ovis2(folder), "<image>", "<image>", of_ovis2)
    if request.param == "llama4":
        mark = "<|image|>"
        return Seer(folder, save_llama4(folder), mark, mark, of_llama4, cache_groups=2)
    if request.param == "internvl_chat":
        mark = "<IMG_CONTEXT>"
        return Seer(folder, save_internvl_chat(folder), mark, mark, of_internvl)
    if request.param == "llava":
        return Seer(folder, save_llava(folder), "<image>", "<image>", of_llava)
    if request.param == "gemma3":
        mark = "<start_of_image>"
        return Seer(folder, save_gemma3(folder), mark, mark, of_gemma3, cache_groups=2)
    if request.param.startswith("gemma4"):
        mark, whole = "<|image|>", request.param == "gemma4_whole"
        oracle = save_gemma4(folder, whole=whole)
        return Seer(folder, oracle, mark, mark, of_gemma4, 2, step=72 if whole else 8)
    if request.param == "pixtral":
        return Seer(folder, save_pixtral(folder), "[IMG]", "[IMG]", of_pixtral)
    mark = "<|vision_start|><|image_pad|><|vision_end|>"
    if request.param == "qwen3_5":
        return Seer(folder, save_qwen3_5(folder), mark, "<|image_pad|>", of_qwen, cache_groups=2)
    save = save_qwen3_vl if request.param == "qwen3_vl" else save_qwen2_vl
    return Seer(folder, save(folder), mark, "<|image_pad|>", of_qwen)


def pictures(names: str) -> list[Any]:
    return [picture(ord(name), *SIZES[name]) for name in names]


def asked(seer: Seer, text: str, names: str) -> Any:
    prompt = text.replace("MARK", seer.mark)
    images = pictures(names)
    if not images:
        return prompt
    return {
        "prompt": prompt,
        "multi_modal_data": {"image": images if len(images) > 1 else images[0]},
    }


def wanted(seer: Seer, text: str, names: str) -> list[int]:
    """Transformers' tokens."""
    ids = token_ids(seer.folder, text.replace("MARK", seer.mark))
    [pad] = token_ids(seer.folder, seer.token)
    given: dict[str, Any] = {}
    if names:
        given = seer.inputs(seer.folder, pictures(names))
        items = iter(given.pop("items"))
        first = given.pop("first", ())
        ids = [*first, *(i for token in ids for i in (next(items) if token == pad else [token]))]
    tokens = torch.tensor([ids])
    if seer.token == "<start_of_image>":
        [soft] = token_ids(seer.folder, "<image_soft_token>")
        given["token_type_ids"] = (tokens == soft).int()
    if seer.token == "<|image_pad|>" or "image_position_ids" in given:
        given["mm_token_type_ids"] = (tokens == pad).int()
    out = seer.oracle.generate(
        input_ids=tokens, attention_mask=torch.ones_like(tokens), do_sample=False,
        max_new_tokens=8, min_new_tokens=8, **given,
    )  # fmt: skip
    return out[0, len(ids) :].tolist()


@pytest.fixture(scope="module")
def expected(seer: Seer) -> list[list[int]]:
    return [wanted(seer, *pair) for pair in PROMPTS.items()]


@pytest.mark.keep(6, every_value=False)
@pytest.mark.parametrize("mode", MODES)
def test_it_equals_transformers_in_every_mode(
    seer: Seer, expected: list[list[int]], mode: str
) -> None:
    settings = {**SETTINGS, **MODES[mode]}
    if mode == "chunked":
        settings["max_num_batched_tokens"] = seer.step
    if "num_gpu_blocks_override" in settings:
        settings["num_gpu_blocks_override"] *= seer.cache_groups
    with LLM(str(seer.folder), **settings) as model:
        for _ in range(2):  # the second time from caches
            outputs = model.generate([asked(seer, *pair) for pair in PROMPTS.items()], PARAMS)
            assert [list(o.outputs[0].token_ids) for o in outputs] == expected
        alone = [model.generate(asked(seer, *pair), PARAMS)[0] for pair in PROMPTS.items()]
    assert [list(o.outputs[0].token_ids) for o in alone] == expected


@pytest.fixture(scope="module")
def model(seer: Seer) -> Iterator[LLM]:
    with LLM(str(seer.folder), **SETTINGS) as made:
        yield made


def test_token_ids_with_images_equal_text(seer: Seer, model: LLM, expected: Any) -> None:
    text, names = next(iter(PROMPTS.items()))
    ids = token_ids(seer.folder, text.replace("MARK", seer.mark))
    prompt = {"prompt_token_ids": ids, "multi_modal_data": {"image": pictures(names)}}
    (output,) = model.generate(prompt, PARAMS)
    assert list(output.outputs[0].token_ids) == expected[0]


@pytest.mark.parametrize(
    "form", [np.asarray, lambda image: torch.tensor(np.asarray(image)).permute(2, 0, 1)]
)
def test_arrays_and_tensors_are_images(
    seer: Seer, model: LLM, expected: Any, form: Callable[[Any], Any]
) -> None:
    text, names = next(iter(PROMPTS.items()))
    image = form(pictures(names)[0])
    prompt = {"prompt": text.replace("MARK", seer.mark), "multi_modal_data": {"image": image}}
    (output,) = model.generate(prompt, PARAMS)
    assert list(output.outputs[0].token_ids) == expected[0]


def test_an_image_that_comes_again_is_neither_processed_nor_encoded(
    seer: Seer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor while another prompt brings it, or its own was preempted."""
    counts: Counter[str] = Counter()

    def counted(name: str, inner: Any, size: Callable[..., int]) -> Any:
        def call(self: Any, *arguments: Any) -> Any:
            counts[name] += size(*arguments)
            return inner(self, *arguments)

        return call

    kind = type(processor_for(*_of(seer)))
    monkeypatch.setattr(kind, "one", counted("processed", kind.one, lambda *_: 1))
    with LLM(str(seer.folder), **SETTINGS, enable_prefix_caching=False) as model:
        family = model.apply_model(type)[0]
        encode = family.embed_media
        monkeypatch.setattr(
            family, "embed_media", counted("encoded", encode, lambda _, inputs: len(inputs))
        )
        counts.clear()
        prompts = [asked(seer, text, "a") for text in ("the water MARK runs", "MARK", "in MARK")]
        model.generate(prompts, PARAMS)
        first = model.generate(prompts[0], PARAMS)[0].outputs[0].token_ids
        assert counts == {"processed": 1, "encoded": 1}
        other = model.generate(asked(seer, "the water MARK runs", "b"), PARAMS)[0]
        assert counts == {"processed": 2, "encoded": 2}
    assert other.outputs[0].token_ids != first


def _of(seer: Seer) -> tuple[str, Any, Path]:
    config = json.loads((seer.folder / "config.json").read_text())
    return config["architectures"][0], config, seer.folder


def chat(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def test_chats_bring_images_in_every_form(seer: Seer, model: LLM) -> None:
    image = picture(1)
    forms = (
        {"type": "image_url", "image_url": {"url": data_url(image)}},
        {"type": "image_pil", "image_pil": image},
    )
    texts = {"type": "text", "text": "the water "}, {"type": "text", "text": " runs"}
    found = [
        model.chat(chat(texts[0], form, texts[1]), PARAMS)[0].outputs[0].token_ids for form in forms
    ]
    prompt = f"user: the water {seer.mark} runsassistant:"
    given = {"prompt": prompt, "multi_modal_data": {"image": image}}
    expected = model.generate(given, PARAMS)[0].outputs[0].token_ids
    assert found == [expected, expected]


def test_what_is_refused_by_name(seer: Seer, model: LLM) -> None:
    image, mark = picture(1), seer.mark
    refused = {
        "there must be one for each": {"prompt": mark * 2, "multi_modal_data": {"image": image}},
        "must be PIL's image": {"prompt": mark, "multi_modal_data": {"image": "picture.png"}},
        "no such option": {
            "prompt": mark, "multi_modal_data": {"image": image}, "mm_processor_kwargs": {"crops": 4},
        },
        "maximum context length": {
            "prompt": mark * 40, "multi_modal_data": {"image": [image] * 40},
        },
    }  # fmt: skip
    for message, prompt in refused.items():
        with pytest.raises(RequestError, match=message):
            model.generate(prompt, PARAMS)
    with pytest.raises(UnsupportedFeature, match="audio"):
        model.generate({"prompt": mark, "multi_modal_data": {"audio": [0.0]}}, PARAMS)
    damaged = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}
    with pytest.raises(RequestError, match=r"messages\[0\]\.content\[0\]\.image_url\.url.*PNG"):
        model.chat(chat(damaged), PARAMS)


def test_limits_count_images(seer: Seer) -> None:
    with LLM(str(seer.folder), **SETTINGS, limit_mm_per_prompt={"image": 1}) as model:
        images = [picture(1), picture(2)]
        with pytest.raises(RequestError, match="at most 1"):
            model.generate({"prompt": seer.mark * 2, "multi_modal_data": {"image": images}}, PARAMS)
    with LLM(str(seer.folder), **SETTINGS, limit_mm_per_prompt={"image": 0, "video": 0}) as model:
        with pytest.raises(UnsupportedFeature, match="text only"):
            model.generate({"prompt": seer.mark, "multi_modal_data": {"image": picture(1)}}, PARAMS)
        assert model.generate("the water", PARAMS)[0].outputs[0].token_ids


def test_pictures_as_files_have_them(seer: Seer, model: LLM) -> None:
    """The pixels are those of the file, whatever its kind."""
    image = picture(3)
    found = set()
    for kind in ("PNG", "BMP", "WEBP"):
        data = encoded(image, kind) if kind != "WEBP" else _lossless(image)
        url = "data:image/x;base64," + base64.b64encode(data).decode()
        part = {"type": "image_url", "image_url": {"url": url}}
        found.add(tuple(model.chat(chat(part), PARAMS)[0].outputs[0].token_ids))
    assert len(found) == 1


def _lossless(image: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", lossless=True)
    return buffer.getvalue()
