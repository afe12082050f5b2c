"""Decoders that see videos, in the whole engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from image_checkpoints import picture
from PIL import Image
from speech_checkpoints import token_ids
from video_checkpoints import FAMILIES, video_file, video_url

from headrace import LLM, SamplingParams
from headrace_core.errors import ConfigError, RequestError, UnsupportedFeature
from headrace_core.multimodal import MediaItem
from headrace_multimodal import processor_for
from headrace_multimodal.video.decoding import VideoDecoder
from headrace_multimodal.video.sampling import FrameSampling
from headrace_testing.sampling import todays

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_num_seqs": 8, "num_threads": 1, "block_size": 8, "max_model_len": 512,
    "kv_cache_memory_bytes": 16 << 20, "use_tqdm_on_load": False,
}  # fmt: skip
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
KNOWN = {"fps": 16.0, "total_num_frames": 30, "frames_indices": [0, 9, 20, 29]}
PROMPTS = {"the water FILM runs": "v", "FILM": "w", "theMARK in FILM the raceFILM": "awv"}
"""Prompt -> its image a and videos."""
MODES: dict[str, dict[str, Any]] = {
    "captured": {}, "chunked": {"max_num_batched_tokens": 8}, "process": {"engine_process": True},
}  # fmt: skip


def video(name: str) -> Any:
    """Of 4 frames with metadata, and of 3 without."""
    draw = np.random.default_rng(ord(name))
    if name == "v":
        return draw.integers(0, 256, (4, 60, 90, 3), np.uint8), KNOWN
    return draw.integers(0, 256, (3, 80, 50, 3), np.uint8)


def given(names: str) -> dict[str, Any]:
    images = [picture(1, 40, 56) for name in names if name == "a"]
    data: dict[str, Any] = {"video": [video(name) for name in names if name != "a"]}
    return {**data, "image": images} if images else data


class Seer(NamedTuple):
    """A checkpoint, its oracle, and how it marks an image and a video in a prompt."""

    folder: Path
    oracle: Any
    mark: str
    film: str

    def prompt(self, text: str) -> str:
        return text.replace("MARK", self.mark).replace("FILM", self.film)

    def wanted(self, text: str, names: str) -> list[int]:
        """Transformers' tokens, for numbers and tokens of headrace's processor."""
        config = json.loads((self.folder / "config.json").read_text())
        processor = processor_for(config["architectures"][0], config, self.folder)
        items = []
        for name in names:
            if name == "a":
                items.append(MediaItem("image", np.asarray(picture(1, 40, 56)), "", {}))
            else:
                frames, known = made if isinstance(made := video(name), tuple) else (made, {})
                items.append(MediaItem("video", frames, "", known))
        media = processor.process(items, {})
        ids = processor.place(token_ids(self.folder, self.prompt(text)), media).token_ids
        tokens = torch.tensor([ids])
        name = config["architectures"][0]
        if name.startswith(("InternVL", "SmolVLM")):  # images and frames in one
            tiles = torch.cat([_array(made) for one in media for made in one.inputs.values()])
            pixels = tiles[None] if name.startswith("SmolVLM") else tiles
            return self._generated(tokens, {"pixel_values": pixels})
        found = {}
        for key in {key for one in media for key in one.inputs}:
            arrays = [_array(one.inputs[key]) for one in media if key in one.inputs]
            found[key] = self._joined(key, arrays)
        if "Qwen" in name:
            kinds = (tokens == config["image_token_id"]).int()
            found["mm_token_type_ids"] = kinds + 2 * (tokens == config["video_token_id"]).int()
        return self._generated(tokens, found)

    def _joined(self, name: str, arrays: list[torch.Tensor]) -> torch.Tensor:
        stacked = name.endswith(("grid_thw", "image_sizes")) or arrays[0].ndim == 4
        return torch.stack(arrays) if stacked else torch.cat(arrays)

    def _generated(self, tokens: torch.Tensor, found: dict[str, torch.Tensor]) -> list[int]:
        out = self.oracle.generate(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), do_sample=False,
            max_new_tokens=8, min_new_tokens=8, **found,
        )  # fmt: skip
        made: list[int] = out[0, tokens.shape[1] :].tolist()
        return made


def _array(packed: Any) -> torch.Tensor:
    return torch.tensor(np.frombuffer(packed.data, packed.dtype).reshape(packed.shape).copy())


@pytest.fixture(scope="module", params=todays(FAMILIES, days=2))
def seer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seer:
    save, mark, film = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    return Seer(folder, save(folder), mark, film)


@pytest.fixture(scope="module")
def expected(seer: Seer) -> list[list[int]]:
    # The library stacks videos, so those of LLaVA-OneVision are of one length.
    return [
        seer.wanted(text, names)
        for text, names in PROMPTS.items()
        if "onevision" not in seer.folder.name or len(names) == 1
    ]


@pytest.mark.keep(4, every_value=False)
@pytest.mark.parametrize("mode", MODES)
def test_it_equals_transformers_in_every_mode(
    seer: Seer, expected: list[list[int]], mode: str
) -> None:
    prompts = [
        {"prompt": seer.prompt(text), "multi_modal_data": given(names)}
        for text, names in PROMPTS.items()
    ]
    with LLM(str(seer.folder), **{**SETTINGS, **MODES[mode]}) as model:
        for _ in range(2):  # the second time from caches
            outputs = model.generate(prompts, PARAMS)
            found = [list(output.outputs[0].token_ids) for output in outputs]
            assert found[: len(expected)] == expected


@pytest.fixture(scope="module")
def model(seer: Seer) -> Iterator[LLM]:
    io = {"video": {"num_frames": 4}}
    with LLM(str(seer.folder), **SETTINGS, media_io_kwargs=io) as made:
        yield made


def said(model: LLM, prompt: Any) -> list[int]:
    (output,) = model.generate(prompt, PARAMS)
    return list(output.outputs[0].token_ids)


def test_forms_of_one_video(seer: Seer, model: LLM) -> None:
    """A list of pictures is one video; so are an array, a tensor, and a list of one."""
    frames = video("w")
    forms = (
        frames,
        torch.tensor(frames),
        [Image.fromarray(frame) for frame in frames],
        [frames],
        (frames, {}),
    )
    prompt = seer.prompt("the FILM")
    found = [said(model, {"prompt": prompt, "multi_modal_data": {"video": v}}) for v in forms]
    assert found == [found[0]] * len(forms)
    other = said(model, {"prompt": prompt, "multi_modal_data": {"video": frames[::-1]}})
    assert other != found[0]


def test_chats_bring_files(seer: Seer, model: LLM) -> None:
    """As the frames of the file, which are known by their indices."""
    part = {"type": "video_url", "video_url": {"url": video_url(video_file())}}
    texts = {"type": "text", "text": "the water "}, {"type": "text", "text": " runs"}
    (output,) = model.chat([{"role": "user", "content": [texts[0], part, texts[1]]}], PARAMS)
    decoder = VideoDecoder(sampling=FrameSampling(4))
    clip = decoder(video_file(), "here")
    decoder.close()
    assert clip.metadata["frames_indices"] == [0, 7, 15, 23]
    prompt = seer.prompt("user: the water FILM runsassistant:")
    data = {"video": tuple(clip)}
    assert list(output.outputs[0].token_ids) == said(
        model, {"prompt": prompt, "multi_modal_data": data}
    )


def test_what_is_refused_by_name(seer: Seer, model: LLM) -> None:
    frames, film = video("w"), seer.film
    refused = {
        "there must be one for each": {"prompt": film, "multi_modal_data": {"video": [frames] * 2}},
        r"shape \[80, 50, 3\]": {"prompt": film, "multi_modal_data": {"video": frames[0]}},
        "no such option": {
            "prompt": film, "multi_modal_data": {"video": frames}, "mm_processor_kwargs": {"crops": 4},
        },
    }  # fmt: skip
    for message, prompt in refused.items():
        with pytest.raises(RequestError, match=message):
            model.generate(prompt, PARAMS)
    with pytest.raises(UnsupportedFeature, match="image, video only"):
        model.generate({"prompt": film, "multi_modal_data": {"audio": [0.0]}}, PARAMS)


def test_limits(seer: Seer) -> None:
    """A modality may be refused alone; memory is measured with the sizes that are stated."""
    limits = {"video": {"count": 1, "num_frames": 2, "width": 40, "height": 40}, "image": 0}
    with LLM(str(seer.folder), **SETTINGS, limit_mm_per_prompt=limits) as model:
        data = {"video": [video("w")] * 2}
        with pytest.raises(RequestError, match="at most 1 are taken"):
            model.generate({"prompt": seer.film * 2, "multi_modal_data": data}, PARAMS)
        with pytest.raises(RequestError, match="at most 0 are taken"):
            model.generate({"prompt": seer.mark, "multi_modal_data": {"image": picture(1)}}, PARAMS)
        assert said(model, {"prompt": seer.film, "multi_modal_data": {"video": video("w")}})


def test_settings_are_checked_at_start(seer: Seer) -> None:
    for io, named in (
        ({"video": {"frames": 3}}, "media_io_kwargs.video.frames"),
        ({"video": {"num_frames": 0}}, "media_io_kwargs.video.num_frames = 0"),
        ({"video": {"num_frames": 3, "fps": 2}}, "not both"),
        ({"audio": {}}, "media_io_kwargs.audio"),
        ({"image": {"rgba_background_color": [0, 0, 256]}}, "rgba_background_color"),
    ):
        with pytest.raises(ConfigError, match=named):
            LLM(str(seer.folder), **SETTINGS, media_io_kwargs=io)
