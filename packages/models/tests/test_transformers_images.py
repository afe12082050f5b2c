"""What models with towers by transformers' code promise beside exact numbers (:mod:`every_image_model`)."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import every_image_model as survey
import pytest
import torch
from safetensors.torch import load_file, save_file
from vision_conformance import packed

from headrace_core import plugins
from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.errors import ModelError, UnsupportedModel
from headrace_core.model import SupportsMRoPE, SupportsMultiModal
from headrace_core.multimodal import MediaInput
from headrace_core.platform import CpuPlatform
from headrace_models.loading.loader import load_model
from headrace_models.resolve import resolve
from headrace_testing.model.decoders import build_context

pytestmark = pytest.mark.filterwarnings("ignore")  # of model code that is not ours


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Makes the tiny checkpoint of a kind; its folder and transformers' model."""
    found: dict[str, tuple[Path, Any]] = {}

    def make(kind: str) -> tuple[Path, Any]:
        if kind not in found:
            torch.manual_seed(0)
            folder = tmp_path_factory.mktemp(kind)
            found[kind] = folder, survey.make(kind, survey.model_types()[kind], folder)
        return found[kind]

    return make


def load(folder: Path, *, processor: str, **settings: Any) -> Any:
    config = ModelConfig(model=str(folder), **{"model_impl": "transformers", **settings})
    info = dataclasses.replace(resolve(config, LoadConfig(), CpuPlatform()), processor=processor)
    return load_model(info, build_context(info))


@pytest.mark.parametrize("kind", ["vipllava", "llama4", "glm4v", "deepseek_vl_hybrid", "gemma4"])
def test_without_images_no_tower_is_held(checkpoint: Any, kind: str) -> None:
    folder, reference = checkpoint(kind)
    model = load(folder, processor="")
    assert not isinstance(model, SupportsMultiModal)
    assert not model.parts.towers()
    text = [5, 6, 7, 8, 9]
    found = survey.run(model, text, [], [], [5])
    expected = survey.logprobs(reference, text, [])
    torch.testing.assert_close(found[:, : expected.shape[1]], expected, atol=1e-4, rtol=0)


def test_images_that_go_elsewhere_are_refused_by_name(checkpoint: Any) -> None:
    for kind, why in (
        ("gemma3", "Gemma3Model makes a mask of its own"),
        ("qwen3_vl", "Qwen3VLTextModel takes deepstack_visual_embeds"),
        ("mllama", "has no get_image_features"),
    ):
        with pytest.raises(UnsupportedModel, match=f"images: .*{why}.*limit-mm-per-prompt"):
            load(checkpoint(kind)[0], processor="transformers")


def test_published_names_of_tensors_are_read(checkpoint: Any, tmp_path: Path) -> None:
    folder, _ = checkpoint("llava")
    shutil.copy(folder / "config.json", tmp_path)
    for spelling in (
        ((r"^(model\.)?vision_tower\.(?!vision_model)", r"\1vision_tower.vision_model."),),
        ((r"^language_model\.lm_head", "lm_head"), (r"^language_model\.model", "model.language_model"),
         (r"^(vision_tower|multi_modal_projector)", r"model.\1")),
    ):  # fmt: skip
        tensors = load_file(folder / "model.safetensors")
        for pattern, instead in spelling:
            tensors = {re.sub(pattern, instead, name): t for name, t in tensors.items()}
        save_file(tensors, tmp_path / "model.safetensors")
        for processor in ("transformers", ""):
            model, other = (load(f, processor=processor) for f in (folder, tmp_path))
            text = [5, 6, 7]
            found = survey.run(other, text, [], [], [3])
            torch.testing.assert_close(found, survey.run(model, text, [], [], [3]))
            if processor:
                images = survey.images_of("llava")
                for a, b in zip(
                    model.embed_media("image", images), other.embed_media("image", images)
                ):
                    torch.testing.assert_close(a, b, atol=0, rtol=0)


def test_each_image_has_its_own_places(checkpoint: Any) -> None:
    """Also where no text is between two."""
    model = load(checkpoint("glm4v")[0], processor="transformers")
    assert isinstance(model, SupportsMRoPE)
    images = survey.images_of("glm4v")
    sizes = [4, 8]  # 2 x 2 and 2 x 4
    media = [
        MediaInput("image", packed(image), str(i), size, offset)
        for i, (image, size, offset) in enumerate(zip(images, sizes, (2, 6)))
    ]
    places = model.mrope_positions(15, media)
    expected = torch.tensor([
        [0, 1, 2, 2, 2, 2, 4, 4, 4, 4, 4, 4, 4, 4, 8],
        [0, 1, 2, 2, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 8],
        [0, 1, 2, 3, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7, 8],
    ])  # fmt: skip
    torch.testing.assert_close(places, expected)


def test_what_a_tower_does_not_take_is_told(checkpoint: Any) -> None:
    model = load(checkpoint("vipllava")[0], processor="transformers")
    with pytest.raises(ModelError, match=r"get_image_features\({'pixel_values': \[1, 3, 5, 5\]}\)"):
        model.embed_media("image", [{"pixel_values": torch.zeros(1, 3, 5, 5)}])


def test_towers_compute_in_the_dtype_of_the_model(checkpoint: Any) -> None:
    folder, _ = checkpoint("vipllava")
    model = load(folder, processor="transformers", dtype="bfloat16")
    (vectors, _) = model.embed_media("image", survey.images_of("vipllava"))
    assert vectors.dtype is torch.bfloat16
    assert model.tree.get_submodule(model.parts.towers()[0]).dtype is torch.bfloat16


@pytest.mark.skipif(
    "transformers" not in plugins.installed("headrace.multimodal_processors"),
    reason="headrace-multimodal is not installed",
)
@pytest.mark.parametrize(
    ("settings", "source"),
    [
        ({}, "transformers"),
        ({"model_impl": "headrace"}, "native"),
        ({"limit_mm_per_prompt": {"image": 0}}, "native"),
        ({"runner": "pooling"}, "native"),
        ({"quantization": "int8"}, "transformers"),
        ({"hf_overrides": {"quantization_config": {"quant_method": "fp8"}}}, "native"),
    ],
)
def test_a_class_of_text_alone_gives_way_for_images(
    checkpoint: Any, tmp_path: Path, settings: dict[str, Any], source: str
) -> None:
    shutil.copytree(checkpoint("vipllava")[0], tmp_path, dirs_exist_ok=True)
    config = ModelConfig(model=str(tmp_path), **settings)
    assert resolve(config, LoadConfig(), CpuPlatform()).source == "native"  # it has no processor
    (tmp_path / "processor_config.json").write_text("{}")
    info = resolve(config, LoadConfig(), CpuPlatform())
    assert (info.source, info.processor) == (source, source if source == "transformers" else "")


def test_experts_that_are_to_be_quantized_stay_text(checkpoint: Any, tmp_path: Path) -> None:
    shutil.copytree(checkpoint("aria")[0], tmp_path, dirs_exist_ok=True)
    (tmp_path / "processor_config.json").write_text("{}")
    config = ModelConfig(model=str(tmp_path), quantization="int8")
    assert resolve(config, LoadConfig(), CpuPlatform()).source == "native"


def test_kinds_that_need_torchvision_stay_text_without_it(
    checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace_models.implementation.find_spec", lambda name: None)
    shutil.copytree(checkpoint("glm4v")[0], tmp_path, dirs_exist_ok=True)
    (tmp_path / "processor_config.json").write_text("{}")
    info = resolve(ModelConfig(model=str(tmp_path)), LoadConfig(), CpuPlatform())
    assert info.source == "native"
