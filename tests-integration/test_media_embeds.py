"""Images and recordings that come as vectors, as a model's towers make them: in the whole engine."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from image_checkpoints import (
    data_url,
    picture,
    save_gemma3,
    save_internvl_chat,
    save_llama4,
    save_llava,
    save_minicpmv,
    save_paligemma,
    save_pixtral,
    save_qwen2_vl,
    save_qwen3_vl,
)
from safetensors.torch import save
from speech_checkpoints import features, save_voxtral, sound
from video_checkpoints import save_internvl, save_onevision

from headrace import LLM, SamplingParams
from headrace_core.errors import ConfigError, RequestError, UnsupportedFeature
from headrace_core.multimodal import MediaItem, TakesEmbeds
from headrace_engine.input_processing.media_embeds import num_vectors
from headrace_multimodal import processor_for

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_num_seqs": 8, "num_threads": 1, "block_size": 8, "max_model_len": 256,
    "kv_cache_memory_bytes": 16 << 20, "use_tqdm_on_load": False,
}  # fmt: skip
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
EMBEDS: dict[str, Any] = {"enable_mm_embeds": True}
QWEN = "<|vision_start|><|image_pad|><|vision_end|>"


class Seer(NamedTuple):
    """A checkpoint, and what its towers make of two items, by transformers."""

    folder: Path
    mark: str
    modality: str
    items: list[Any]
    """As ``multi_modal_data`` has them."""
    vectors: list[torch.Tensor]
    facts: Mapping[str, torch.Tensor] = {}

    @property
    def key(self) -> str:
        return f"{self.modality}_embeds"

    def prompt(self, data: Any, count: int = 2) -> dict[str, Any]:
        text = f"the {self.mark} in {self.mark} water" if count == 2 else f"{self.mark} runs"
        return {"prompt": text, "multi_modal_data": {self.modality: data}}

    def vectors_of(self, index: int) -> Any:
        """One item, in an object if the model must know more."""
        if not self.facts:
            return self.vectors[index][None]
        return {self.key: self.vectors[index], **{k: v[index] for k, v in self.facts.items()}}


def _pictures() -> list[Any]:
    return [picture(1, 40, 56), picture(2, 90, 30)]


@torch.inference_mode()
def of_llava(folder: Path) -> Seer:
    from transformers import CLIPImageProcessor

    oracle = save_llava(folder)
    pixels = CLIPImageProcessor.from_pretrained(folder)(images=_pictures(), return_tensors="pt")
    made = oracle.model.get_image_features(pixels["pixel_values"])
    vectors = [one.clone() for one in getattr(made, "pooler_output", made)]
    return Seer(folder, "<image>", "image", _pictures(), vectors)


@torch.inference_mode()
def of_qwen(folder: Path, save_checkpoint: Callable[[Path], Any] = save_qwen2_vl) -> Seer:
    from transformers import Qwen2VLImageProcessor

    oracle = save_checkpoint(folder)
    library = Qwen2VLImageProcessor.from_pretrained(folder)
    given = library(images=_pictures(), return_tensors="pt")
    made = oracle.model.get_image_features(**given)
    vectors = list(getattr(made, "pooler_output", made))
    for level in getattr(made, "deepstack_features", None) or ():
        vectors = [torch.cat(pair, 1) for pair in zip(vectors, level, strict=True)]
    facts = {"image_grid_thw": given["image_grid_thw"]}
    return Seer(folder, QWEN, "image", _pictures(), [one.clone() for one in vectors], facts)


def of_qwen3(folder: Path) -> Seer:
    return of_qwen(folder, save_qwen3_vl)


@torch.inference_mode()
def of_voxtral(folder: Path) -> Seer:
    oracle = save_voxtral(folder)
    clips = [sound(1, 1.5), sound(3, 2.0)]
    made = oracle.get_audio_features(torch.cat([features(folder, clip) for clip in clips]))
    vectors = getattr(made, "pooler_output", made).reshape(2, -1, 64)
    items = [(clip, 16000) for clip in clips]
    return Seer(folder, "[AUDIO]", "audio", items, [one.clone() for one in vectors])


CLASSES = {"llava": of_llava, "qwen2_vl": of_qwen, "qwen3_vl": of_qwen3, "voxtral": of_voxtral}


@pytest.fixture(scope="module", params=CLASSES)
def seer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seer:
    return CLASSES[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def model(seer: Seer) -> Iterator[LLM]:
    with LLM(str(seer.folder), **SETTINGS, **EMBEDS) as made:
        yield made


def tokens(model: LLM, prompts: Any) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in model.generate(prompts, PARAMS)]


def test_vectors_of_transformers_give_the_tokens_of_the_items(seer: Seer, model: LLM) -> None:
    """Alone, in lists, in one tensor, one behind the other, beside an item itself; from the prefix cache."""
    both = seer.prompt(seer.items)
    alone = [seer.prompt(item, 1) for item in seer.items]
    [wanted, *wanted_alone] = tokens(model, [both, *alone])
    assert wanted_alone[0] != wanted_alone[1]
    given = [seer.vectors_of(0), seer.vectors_of(1)]
    if seer.facts:
        whole = {seer.key: torch.cat(seer.vectors), **seer.facts}
    else:
        whole = torch.stack(seer.vectors)
    forms = [given, whole, [seer.items[0], given[1]], [given[0], seer.items[1]]]
    for _ in range(2):
        assert tokens(model, [seer.prompt(form) for form in forms]) == [wanted] * len(forms)
        assert tokens(model, [seer.prompt(one, 1) for one in given]) == wanted_alone


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_batched_tokens": 8, "engine_process": True, "enable_prefix_caching": False},
        {"num_gpu_blocks_override": 34, "enforce_eager": True},
    ],
)
@pytest.mark.parametrize("kind", ["qwen2_vl"])
def test_chunks_processes_and_preemptions(
    changes: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    seer = CLASSES[kind](tmp_path)
    with LLM(str(seer.folder), **{**SETTINGS, **changes}, **EMBEDS) as model:
        given = [seer.vectors_of(0), seer.vectors_of(1)]
        pairs = [seer.prompt(seer.items), seer.prompt(given)] * 3
        found = tokens(model, pairs)
    assert found == [found[0]] * len(pairs)


SAVERS: Mapping[str, Callable[[Path], Any]] = {
    "llava": save_llava, "pixtral": save_pixtral, "gemma3": save_gemma3, "paligemma": save_paligemma,
    "internvl_chat": save_internvl_chat, "llama4": save_llama4, "minicpmv": save_minicpmv,
    "internvl": save_internvl, "onevision": save_onevision, "qwen2_vl": save_qwen2_vl,
}  # fmt: skip


@pytest.mark.parametrize("kind", SAVERS)
def test_the_tokens_of_vectors_are_those_of_an_image_of_that_size(
    kind: str, tmp_path: Path
) -> None:
    SAVERS[kind](tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    processor = processor_for(config["architectures"][0], config, tmp_path)
    assert isinstance(processor, TakesEmbeds)
    for height, width in ((40, 56), (90, 30)):
        pixels = np.zeros((height, width, 3), np.uint8)
        [whole] = processor.process([MediaItem("image", pixels, "", {})], {})
        facts = {"image_sizes": [height, width]}
        if kind == "qwen2_vl":
            facts = {"image_grid_thw": whole.inputs["image_grid_thw"].tolist()}
        made = processor.embedded("image", num_vectors(whole), facts)
        assert (made.num_tokens, made.runs) == (whole.num_tokens, whole.runs)
        assert made.token_ids == whole.token_ids
        assert set(made.inputs) == set(facts) & {"image_grid_thw"}
        with pytest.raises(RequestError, match="unknown; beside the vectors"):
            processor.embedded("image", 4, {**facts, "colour": [1]})
        if facts.keys() == {"image_sizes"}:
            with pytest.raises(RequestError, match="pixels"):
                processor.embedded("image", 4, {"image_sizes": [65536, 65536]})


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def torch_file(tensor: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return buffer.getvalue()


def part_of(seer: Seer, write: Callable[[torch.Tensor], bytes], index: int = 0) -> dict[str, Any]:
    """A message's part, as a client sends it."""
    content: Any = base64_of(write(seer.vectors[index]))
    if seer.facts:
        facts = {name: base64_of(write(value[index])) for name, value in seer.facts.items()}
        content = {seer.key: content, **facts}
    return {"type": seer.key, seer.key: content}


def chat(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "the "}, *parts]}]


@pytest.mark.parametrize("seer", ["qwen2_vl", "voxtral"], indirect=True)
def test_chats_bring_vectors_in_every_form_and_again_by_name(seer: Seer, model: LLM) -> None:
    def answer(part: Any) -> list[int]:
        return list(model.chat(chat(part), PARAMS)[0].outputs[0].token_ids)

    prompt = {
        "prompt": f"user: the {seer.mark}assistant:",
        "multi_modal_data": {seer.modality: seer.items[0]},
    }
    [wanted] = tokens(model, prompt)
    named = {**part_of(seer, lambda one: save({"x": one})), "uuid": "cat"}
    tensors: Any = seer.vectors_of(0)
    assert answer(part_of(seer, torch_file)) == wanted
    assert answer({"type": seer.key, seer.key: tensors}) == wanted
    for rows in (1, 0) if seer.facts else ():  # [1, n] as the library has it, and [n]
        part = part_of(seer, torch_file)
        for name, value in seer.facts.items():
            part[seer.key][name] = [value[0].tolist()] if rows else value[0].tolist()
        assert answer(part) == wanted
    assert answer(named) == wanted
    assert answer({"type": seer.key, seer.key: None, "uuid": "cat"}) == wanted
    with pytest.raises(RequestError, match=r"messages\[0\]\.content\[1\]\.uuid.*'dog'"):
        answer({"type": seer.key, seer.key: None, "uuid": "dog"})


@pytest.mark.parametrize("seer", ["qwen2_vl", "voxtral"], indirect=True)
def test_what_is_wrong_is_refused_by_name(seer: Seer, model: LLM) -> None:
    vectors, key = seer.vectors[0], seer.key
    facts = {name: value[0] for name, value in seer.facts.items()}
    where = rf"multi_modal_data\.{seer.modality}"

    def given(vectors: Any, **more: Any) -> dict[str, Any]:
        return seer.prompt({key: vectors, **facts, **more}, 1)

    wrong = {
        "hidden size": given(vectors[:, :-1]),
        "must be (16|8|a multiple)": given(vectors[:-1]),
        "not finite": given(vectors * float("nan")),
        "must be one of": given(vectors.double()),
        "shape": given(vectors[None, None]),
        "image_colours: unknown; beside the vectors there": given(vectors, image_colours=[1]),
        "the vectors": seer.prompt({**facts, "image_sizes": [1, 2]}, 1),
        "'x'; must be a torch tensor": given("x"),
        "weights only": given(b"PK\x03\x04 damaged"),
    }
    for message, prompt in wrong.items():
        with pytest.raises(RequestError, match=f"{where}.*{message}"):
            model.generate(prompt, PARAMS)
    with pytest.raises(RequestError, match="mm_processor_kwargs"):
        model.generate({**given(vectors), "mm_processor_kwargs": {"colour": 1}}, PARAMS)
    assert tokens(model, given(vectors)) == tokens(model, seer.prompt(seer.items[0], 1))


def test_a_grid_that_lies_is_refused(tmp_path: Path) -> None:
    seer = of_qwen(tmp_path)
    grid = seer.facts["image_grid_thw"][0]
    with LLM(str(seer.folder), **SETTINGS, **EMBEDS) as model:
        for wrong, message in (
            (None, "image_grid_thw: must be given"),
            (grid * 2, r"image_grid_thw = .*must be \[1, height, width\]"),
            ([1, 3, 4], "in multiples of 2"),
            ([1, 4], "3 sizes from 1"),
            ([1, 4, -2], "3 sizes from 1"),
            ([1.0, 4, 4], "whole numbers"),
            ([1, 40, 40], r"vectors; must be 400, which follow from"),
        ):
            facts = {} if wrong is None else {"image_grid_thw": wrong}
            data = {"image_embeds": seer.vectors[0], **facts}
            with pytest.raises(RequestError, match=message):
                model.generate(seer.prompt(data, 1), PARAMS)


def test_without_the_flag_the_error_names_it(tmp_path: Path) -> None:
    seer = of_llava(tmp_path)
    with LLM(str(seer.folder), **SETTINGS) as model:
        for ask in (
            lambda: model.generate(seer.prompt(seer.vectors[0][None], 1), PARAMS),
            lambda: model.chat(chat(part_of(seer, torch_file)), PARAMS),
        ):
            with pytest.raises(UnsupportedFeature, match="--enable-mm-embeds"):
                ask()
    with pytest.raises(ConfigError, match=r"model\.enable_mm_embeds = True: must be False"):
        LLM(**SETTINGS, **EMBEDS)


@pytest.mark.parametrize("kind", ["llava", "qwen2_vl"])
def test_a_limit_of_0_takes_vectors_and_reads_no_tower(kind: str, tmp_path: Path) -> None:
    seer = CLASSES[kind](tmp_path)
    with LLM(str(seer.folder), **SETTINGS, **EMBEDS) as whole:
        wanted = tokens(whole, seer.prompt(seer.items))
        [size] = whole.apply_model(number_of_weights)
    limits = {"image": 0, "video": 0}
    with LLM(str(seer.folder), **SETTINGS, **EMBEDS, limit_mm_per_prompt=limits) as model:
        assert tokens(model, seer.prompt([seer.vectors_of(0), seer.vectors_of(1)])) == wanted
        assert model.apply_model(number_of_weights)[0] < size
        named = {**seer.prompt(seer.vectors_of(0), 1), "multi_modal_uuids": {"image": "cat"}}
        again = {**named, "multi_modal_data": {"image": None}}
        assert tokens(model, named) == tokens(model, again)
        with pytest.raises(RequestError, match="at most 0"):
            model.generate(seer.prompt(seer.items), PARAMS)
        part = {"type": "image_url", "image_url": {"url": data_url(picture(1))}}
        with pytest.raises(UnsupportedFeature, match=r"image_url.*must be one of.*image_embeds"):
            model.chat(chat(part), PARAMS)


def number_of_weights(model: Any) -> int:
    return sum(1 for _ in model.parameters())
