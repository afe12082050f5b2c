"""Images of models without a class of headrace's: transformers' towers and processor in the whole engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
import torch
from generic_checkpoints import save_llava_with_processor, save_paddleocr_vl, save_vipllava
from image_checkpoints import data_url, picture
from servers import serving

from headrace import LLM, SamplingParams
from headrace.assembly.inspection import inspect_model
from headrace.engine_args import EngineArgs
from headrace_core.errors import RequestError, UnsupportedFeature, UnsupportedModel
from headrace_testing.sampling import todays

pytestmark = pytest.mark.days(3)

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_num_seqs": 8, "num_threads": 1, "block_size": 8, "max_model_len": 256,
    "kv_cache_memory_bytes": 16 << 20, "use_tqdm_on_load": False,
}  # fmt: skip
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = {
    "the water <image> runs": "a",
    "the wheel<image> in <image> the long race over the water": "ab",
    "in the race": "",
    "<image> <image> runs": "cc",
}
SIZES = {"a": (40, 56), "b": (90, 30), "c": (64, 64)}
"""Name of a picture -> height and width."""


class Seer(NamedTuple):
    """A checkpoint and its oracle."""

    name: str
    folder: Path
    oracle: Any


SAVE = {"vipllava": save_vipllava, "paddleocr_vl": save_paddleocr_vl}
CLASSES = {"vipllava": "TransformersForImages", "paddleocr_vl": "TransformersForImagesInAxes"}


@pytest.fixture(scope="module", params=todays(SAVE, days=2))
def seer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seer:
    folder = tmp_path_factory.mktemp(request.param)
    return Seer(request.param, folder, SAVE[request.param](folder))


@pytest.fixture(scope="module")
def model(seer: Seer) -> Iterator[LLM]:
    with LLM(str(seer.folder), **SETTINGS) as made:
        yield made


def pictures(names: str) -> list[Any]:
    return [picture(ord(name), *SIZES[name]) for name in names]


def asked(text: str, names: str) -> Any:
    return {"prompt": text, "multi_modal_data": {"image": pictures(names)}} if names else text


def test_vectors_of_the_tower_are_the_image(seer: Seer, expected: list[list[int]]) -> None:
    from transformers import AutoProcessor

    sizes = [SIZES[name] for name in "ab"]
    processor = AutoProcessor.from_pretrained(seer.folder)
    vectors = []
    for image in pictures("ab"):
        given = processor(text="<image>", images=image, return_tensors="pt")
        named = {name: given[name] for name in ("pixel_values", "image_grid_thw") if name in given}
        with torch.inference_mode():
            made = seer.oracle.model.get_image_features(**named)
        found = getattr(made, "pooler_output", made)
        rows = found[0] if isinstance(found, list | tuple) or found.dim() == 3 else found
        vectors.append(rows.clone())
    text = list(PROMPTS)[1]
    data = {"image_embeds": vectors, "image_sizes": sizes}
    with LLM(str(seer.folder), **SETTINGS, enable_mm_embeds=True) as model:
        [output] = model.generate({"prompt": text, "multi_modal_data": {"image": data}}, PARAMS)
        with pytest.raises(RequestError, match="image_sizes: must be given"):
            model.generate({"prompt": text, "multi_modal_data": {"image": vectors}}, PARAMS)
    assert list(output.outputs[0].token_ids) == expected[1]


def wanted(seer: Seer, text: str, names: str) -> list[int]:
    """By transformers alone: its processor on the whole prompt, and its loop."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(seer.folder)
    given = processor(text=text, images=pictures(names) or None, return_tensors="pt")
    given.pop("token_type_ids", None)
    out = seer.oracle.generate(**given, do_sample=False, max_new_tokens=8, min_new_tokens=8)
    return out[0, given["input_ids"].shape[1] :].tolist()


@pytest.fixture(scope="module")
def expected(seer: Seer) -> list[list[int]]:
    return [wanted(seer, *pair) for pair in PROMPTS.items()]


MODES: dict[str, dict[str, Any]] = {
    "captured": {},
    "eager": {"enforce_eager": True},
    "chunked": {"max_num_batched_tokens": 8},
    "process": {"engine_process": True},
}


@pytest.mark.keep(3, every_value=False)
@pytest.mark.parametrize("mode", MODES)
def test_it_equals_transformers(seer: Seer, expected: list[list[int]], mode: str) -> None:
    prompts = [asked(*pair) for pair in PROMPTS.items()]
    with LLM(str(seer.folder), **{**SETTINGS, **MODES[mode]}) as model:
        if mode != "process":
            assert [made.__name__ for made in model.apply_model(type)] == [CLASSES[seer.name]]
        for _ in range(2):  # the second time from caches
            outputs = model.generate(prompts, PARAMS)
            assert [list(o.outputs[0].token_ids) for o in outputs] == expected


def test_token_ids_with_images_equal_text(seer: Seer, model: LLM, expected: Any) -> None:
    text, names = next(iter(PROMPTS.items()))
    ids = model.get_tokenizer().encode(text)
    prompt = {"prompt_token_ids": ids, "multi_modal_data": {"image": pictures(names)}}
    assert list(model.generate(prompt, PARAMS)[0].outputs[0].token_ids) == expected[0]


def test_neighbouring_images_are_two(model: LLM) -> None:
    prompt = {"prompt": "<image><image>", "multi_modal_data": {"image": pictures("cb")}}
    other = {"prompt": "<image><image>", "multi_modal_data": {"image": pictures("bc")}}
    found = [tuple(o.outputs[0].token_ids) for o in model.generate([prompt, other], PARAMS)]
    assert found[0] != found[1]


@pytest.mark.keep(1, every_value=False)
def test_a_chat_over_the_wire_equals_one_offline(seer: Seer, model: LLM) -> None:
    image = picture(1)
    parts: list[Any] = [
        {"type": "text", "text": "the water "},
        {"type": "image_url", "image_url": {"url": data_url(image)}},
    ]
    messages: list[Any] = [{"role": "user", "content": parts}]
    params = SamplingParams(temperature=0, max_tokens=8)
    offline = model.chat(messages, params)[0].outputs[0].text
    prompt = "user: the water <image>assistant:"
    given = {"prompt": prompt, "multi_modal_data": {"image": image}}
    assert model.generate(given, params)[0].outputs[0].text == offline
    words = ("--dtype", "float32", "--max-model-len", "256", "--kv-cache-memory-bytes", "16777216")
    with serving(str(seer.folder), *words, "--served-model-name", "seer") as server:
        client = openai.OpenAI(base_url=server.api, api_key="x", max_retries=0)
        said = client.chat.completions.create(
            model="seer", messages=messages, temperature=0, max_tokens=8
        )
    assert said.choices[0].message.content == offline


def test_what_is_refused_by_name(model: LLM) -> None:
    image = picture(1)
    refused = {
        "there must be one for each": {
            "prompt": "<image><image>", "multi_modal_data": {"image": image},
        },
        "mm_processor_kwargs.crops: no such option": {
            "prompt": "<image>", "multi_modal_data": {"image": image},
            "mm_processor_kwargs": {"crops": 4},
        },
    }  # fmt: skip
    for message, prompt in refused.items():
        with pytest.raises(RequestError, match=message):
            model.generate(prompt, PARAMS)
    with pytest.raises(UnsupportedFeature, match="audio"):
        model.generate({"prompt": "<image>", "multi_modal_data": {"audio": [0.0]}}, PARAMS)


def test_options_reach_the_processor(model: LLM) -> None:
    prompt = asked("the water <image> runs", "b")
    plain = model.generate(prompt, PARAMS)[0].outputs[0].token_ids
    darker = {**prompt, "mm_processor_kwargs": {"image_mean": [0.9, 0.9, 0.9]}}
    assert model.generate(darker, PARAMS)[0].outputs[0].token_ids != plain


def test_inspection_names_the_class(seer: Seer) -> None:
    for settings, name in (
        ({}, "transformers_backend.image_model:TransformersForImages"),
        ({"limit_mm_per_prompt": {"image": 0}, "model_impl": "transformers"},
         "transformers_backend.model:TransformersForCausalLM"),
    ):  # fmt: skip
        arguments: dict[str, Any] = settings
        args = EngineArgs(model=str(seer.folder), **arguments)
        found = inspect_model(args.create_engine_config(), memory=True)
        assert found.model.class_path == f"headrace_models.{name}"
        assert found.memory is not None


def test_without_images_the_own_class_serves_the_text(seer: Seer, expected: Any) -> None:
    for settings in ({"limit_mm_per_prompt": {"image": 0}}, {"model_impl": "headrace"}):
        with LLM(str(seer.folder), **SETTINGS, **settings) as model:
            (name,) = [made.__name__ for made in model.apply_model(type)]
            assert not name.startswith("Transformers")
            (output,) = model.generate("in the race", PARAMS)
            assert list(output.outputs[0].token_ids) == expected[2]
            with pytest.raises(UnsupportedFeature, match="text only"):
                model.generate(asked("<image>", "a"), PARAMS)


def test_without_images_transformers_code_loads_no_tower(seer: Seer, expected: Any) -> None:
    words = {"limit_mm_per_prompt": {"image": 0}, "model_impl": "transformers"}
    with LLM(str(seer.folder), **SETTINGS, **words) as model:
        found = model.apply_model(lambda made: (type(made).__name__, made.parts.towers()))
        assert found == [("TransformersWithoutTowers", [])]
        (output,) = model.generate("in the race", PARAMS)
    assert list(output.outputs[0].token_ids) == expected[2]


def test_an_own_class_and_transformers_code_say_the_same(tmp_path: Path) -> None:
    save_llava_with_processor(tmp_path)
    prompts = [asked(*pair) for pair in PROMPTS.items()]
    found, names = [], []
    for wanted_impl in ("auto", "transformers"):
        with LLM(str(tmp_path), model_impl=wanted_impl, **SETTINGS) as model:
            outputs = model.generate(prompts, PARAMS)
            found.append([list(o.outputs[0].token_ids) for o in outputs])
            names += [made.__name__ for made in model.apply_model(type)]
    assert names == ["LlavaForConditionalGeneration", "TransformersForImages"]
    assert found[0] == found[1]


def test_a_processor_that_does_not_work_ends_the_start(tmp_path: Path) -> None:
    save_vipllava(tmp_path)
    (tmp_path / "processor_config.json").write_text('{"processor_class": "LlavaProcessor"}')
    with pytest.raises(
        UnsupportedModel, match=r"one by one by LlavaProcessor: .*limit-mm-per-prompt"
    ):
        LLM(str(tmp_path), **SETTINGS)


def test_towers_are_not_quantized(seer: Seer, model: LLM) -> None:
    item = _processed(seer, "b")
    with LLM(str(seer.folder), **SETTINGS, quantization="int8") as quantized:
        (found,) = quantized.apply_model(lambda made: made.embed_media("image", [item]))
    (plain,) = model.apply_model(lambda made: made.embed_media("image", [item]))
    torch.testing.assert_close(found[0], plain[0], atol=0, rtol=0)


def _processed(seer: Seer, name: str) -> dict[str, torch.Tensor]:
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(seer.folder)
    given = processor(text="<image>", images=pictures(name), return_tensors="pt")
    return {key: value for key, value in given.items() if key.startswith(("pixel", "image"))}
