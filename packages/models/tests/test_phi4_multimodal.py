"""Phi-4-multimodal beside transformers: images of whole tiles and with margins, recordings, both in one
prompt; and in the names and the config in which it is published."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_vision_language import TEXT, drawn
from torch import Tensor
from vision_conformance import IMAGE, VisionConformance

from headrace_core.errors import UnsupportedModel
from headrace_core.model import SupportsMultiModal
from headrace_models.layers.audio import relative_conformer

AUDIO, SIDE, PATCHES = 121, 28, 4
VISION: dict[str, Any] = {
    "hidden_size": 36, "intermediate_size": 50, "num_hidden_layers": 3, "num_attention_heads": 3,
    "image_size": SIDE, "crop_size": SIDE, "patch_size": 7, "image_token_id": IMAGE,
}  # fmt: skip
SOUND: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_blocks": 2, "num_attention_heads": 2, "input_size": 10,
    "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 12,
    "bias_max_distance": 5, "audio_token_id": AUDIO,
}  # fmt: skip
PIXELS, GRID, KEPT = "pixel_values", "image_grid", "image_patches"
FEATURES, BESIDE = "input_features", "beside_images"
SIZES = ((2, 1, 7, 3), (1, 2, 4, 6), (2, 2, 6, 5), (1, 1, 1, 4))
"""Rows and columns of tiles, and of patches that are of the image."""


def tiled(seed: int, rows: int, columns: int, height: int, width: int) -> dict[str, Tensor]:
    return {
        PIXELS: drawn(seed, 1 + rows * columns, 3, SIDE, SIDE),
        GRID: torch.tensor((rows, columns)), KEPT: torch.tensor((height, width)),
    }  # fmt: skip


def clip(seed: int, frames: int, *, beside: bool = False) -> dict[str, Tensor]:
    return {FEATURES: drawn(50 + seed, frames, 10), BESIDE: torch.tensor([int(beside)])}


def hf_images(images: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """As the library's processor has it: filled up to as many tiles as any has."""
    most = max(len(image[PIXELS]) for image in images)
    pixels, masks, sizes = [], [], []
    for image in images:
        (rows, columns), (height, width) = image[GRID].tolist(), image[KEPT].tolist()
        mask = torch.zeros(rows * PATCHES, columns * PATCHES)
        mask[:height, :width] = 1
        cut = mask.view(rows, PATCHES, columns, PATCHES).transpose(1, 2).flatten(0, 1)
        more = most - len(image[PIXELS])
        pixels.append(torch.cat([image[PIXELS], torch.zeros(more, 3, SIDE, SIDE)]))
        masks.append(torch.cat([torch.ones(1, 4, 4), cut, torch.ones(more, 4, 4)]))
        sizes.append([rows * SIDE, columns * SIDE])
    return {
        "image_pixel_values": torch.stack(pixels), "image_attention_mask": torch.stack(masks),
        "image_sizes": torch.tensor(sizes),
    }  # fmt: skip


def hf_clips(clips: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Of one length, so that none hears silence behind it."""
    sizes = [-(-len(one[FEATURES]) // 8) for one in clips]
    features = torch.stack([one[FEATURES] for one in clips])
    return {"audio_input_features": features, "audio_embed_sizes": torch.tensor(sizes)}


def check_vectors(found: Tensor, wanted: Tensor) -> None:
    """To so much of the largest number as sums in single precision lose."""
    assert found.shape == wanted.shape
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 3e-5


class TestPhi4Multimodal(VisionConformance):
    names_of_towers: ClassVar = ("model.embed_tokens_extend.",)

    def hf_class(self) -> Any:
        from transformers import Phi4MultimodalForCausalLM

        return Phi4MultimodalForCausalLM

    def hf_config(self) -> Any:
        from transformers import Phi4MultimodalAudioConfig, Phi4MultimodalConfig
        from transformers import Phi4MultimodalVisionConfig as Vision

        return Phi4MultimodalConfig(
            **TEXT, vision_config=Vision(**VISION), audio_config=Phi4MultimodalAudioConfig(**SOUND),
            tie_word_embeddings=True,
        )  # fmt: skip

    def images(self) -> Sequence[dict[str, Tensor]]:
        return [tiled(seed, *SIZES[seed]) for seed in range(2)]

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        return hf_images(images)

    @pytest.mark.parametrize("size", [*SIZES, (1, 2, 3, 4), (3, 1, 8, 4)], ids=str)
    def test_margins_of_any_width(
        self, reference: Any, model: Any, size: tuple[int, int, int, int]
    ) -> None:
        """Also a tile that is nothing but margin."""
        image = tiled(9, *size)
        (found,) = self.embed(model, [image])
        embed, ids = reference.model.embed_tokens_extend, torch.full((1, len(found)), IMAGE)
        with torch.inference_mode():
            wanted = embed(ids, torch.zeros(1, len(found), 48), **hf_images([image]))[0]
        check_vectors(found, wanted)

    def hear(self, model: Any, clips: Sequence[dict[str, Tensor]]) -> list[Tensor]:
        with torch.inference_mode():
            return list(model.embed_media("audio", clips))

    @pytest.mark.parametrize("frames", [1, 7, 8, 9, 33])
    @pytest.mark.parametrize("beside", [False, True])
    def test_recordings(self, reference: Any, model: Any, frames: int, beside: bool) -> None:
        clips = [clip(0, frames, beside=beside), clip(1, frames, beside=beside)]
        found = torch.cat(self.hear(model, clips))
        embed = reference.model.embed_tokens_extend.audio_embed
        mode = "vision" if beside else "speech"
        with torch.inference_mode():
            wanted = embed(
                torch.full((1, len(found)), AUDIO), torch.zeros(1, len(found), 48),
                audio_projection_mode=mode, **hf_clips(clips),
            )[0]  # fmt: skip
        check_vectors(found, wanted)

    def test_a_recording_of_several_windows(
        self, reference: Any, model: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of 500 states each, which the library's code fixes; convolved in parts."""
        monkeypatch.setattr(relative_conformer, "_WINDOWS_AT_ONCE", 1)
        one = clip(3, 8 * 600 + 3)
        (found,) = self.hear(model, [one])
        with torch.inference_mode():
            encoder = reference.model.embed_tokens_extend.audio_embed
            wanted = encoder(
                torch.full((1, 601), AUDIO), torch.zeros(1, 601, 48), **hf_clips([one])
            )[0]
        check_vectors(found, wanted)

    def test_a_prompt_with_both(self, reference: Any, model: Any) -> None:
        images, clips = self.images(), [clip(seed, 21, beside=True) for seed in range(2)]
        items = [*self.embed(model, images), *self.hear(model, clips)]
        tokens, offsets = [5, 6], []
        for kind, own in zip((IMAGE, IMAGE, AUDIO, AUDIO), items, strict=True):
            offsets.append(len(tokens))
            tokens += [kind] * len(own) + [9]
        given = {**hf_images(images), **hf_clips(clips)}
        with torch.inference_mode():
            logits = reference(torch.tensor([tokens]), **given).logits[0]
        expected = torch.log_softmax(logits.float(), dim=-1)
        for pieces in ([len(tokens)], [4, 9, len(tokens) - 16, 3]):
            found = self.forward(_Given(model, items), tokens, offsets, [{}] * 4, pieces)
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)

    def test_a_modality_that_is_limited_to_none_has_no_tower(self, folder: Path) -> None:
        for limit, rest in (({"image": 0}, ("audio",)), ({"audio": 0}, ("image",))):
            model = self.load(folder, limit_mm_per_prompt=limit)
            assert not isinstance(model, SupportsMultiModal) or tuple(model.modalities) == rest

    def test_without_images_no_tower_is_loaded(self, reference: Any, folder: Path) -> None:
        model = self.load(folder, limit_mm_per_prompt={"image": 0, "audio": 0})
        assert not isinstance(model, SupportsMultiModal)

    @pytest.mark.parametrize(
        ("part", "change", "named"),
        [
            ("audio_config", {"chunk_size": 18}, "chunk_size = 18"),
            ("audio_config", {"conv_glu_type": "gelu"}, "conv_glu_type = 'gelu'"),
            ("audio_config", {"bias_symmetric": True}, "bias_symmetric = True"),
            ("audio_config", {"time_reduction": 6}, "time_reduction = 6"),
            ("audio_config", {"downsample_rate": 2}, "downsample_rate = 2"),
            ("vision_config", {"image_size": 35, "crop_size": 35}, "image_size = 35"),
            ("vision_config", {"crop_size": 35}, "crop_size = 35"),
        ],
    )
    def test_other_settings_are_refused(
        self, reference: Any, folder: Path, tmp_path: Path, part: str, change: Any, named: str
    ) -> None:
        with pytest.raises(UnsupportedModel, match=re.escape(named)):
            self.load(self.with_config(folder, tmp_path, **{part: change}))


class _Given:
    """A model whose media are vectors already."""

    def __init__(self, model: Any, items: Sequence[Tensor]) -> None:
        self._model, self._items = model, items

    def embed_media(self, modality: str, inputs: Any) -> Sequence[Tensor]:
        return self._items

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


NAMES = (
    (r"\.feed_forward_(in|out)\.gate_up_proj", r".feed_forward_\1.net.0.linear"),
    (r"\.feed_forward_(in|out)\.down_proj", r".feed_forward_\1.net.2"),
    (r"(encoders\.\d+\.self_attn)\.([qkv])_proj", r"\1.linear_\2"),
    (r"(encoders\.\d+\.self_attn)\.o_proj", r"\1.linear_out"),
    (r"img_projection_up", "img_projection.0"), (r"img_projection_down", "img_projection.2"),
    (r"global_img_feature_extensor", "glb_GN"), (r"sub_img_feature_extensor", "sub_GN"),
    (r"up_proj_for_speech", "audio_projection.speech.0"),
    (r"down_proj_for_speech", "audio_projection.speech.2"),
    (r"up_proj_for_vision_speech", "audio_projection.vision.0"),
    (r"down_proj_for_vision_speech", "audio_projection.vision.2"),
)  # fmt: skip
"""Of transformers -> published; the decoder's modules stand around their adapters."""


class TestPhi4MMAsPublished(TestPhi4Multimodal):
    """The tower for images has the sizes of the only checkpoint, unless a test says others."""

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def small_tower(cls) -> Any:
        from headrace_models.families.omni import phi4_multimodal

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(phi4_multimodal, "_VISION", {**phi4_multimodal._VISION, **VISION})
            yield

    def save(self, reference: Any, folder: Path) -> None:
        super().save(reference, folder)
        tensors = {}
        for name, tensor in load_file(folder / "model.safetensors").items():
            for pattern, published in NAMES:
                name = re.sub(pattern, published, name)
            module, _, kind = name.rpartition(".")
            if module.startswith("model.layers.") and module.endswith("_proj"):
                name = f"{module}.base_layer.{kind}"
                for adapter in ("speech", "vision"):
                    tensors[f"{module}.lora_A.{adapter}.weight"] = torch.ones(2, tensor.shape[1])
            tensors[name] = tensor
        assert sum(".linear_out." in name for name in tensors) == 4
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        sound = config.pop("audio_config")
        for published, key in (
            ("attention_dim", "hidden_size"), ("attention_heads", "num_attention_heads"),
            ("linear_units", "intermediate_size"),
            ("depthwise_seperable_out_channel", "depthwise_separable_out_channel"),
        ):  # fmt: skip
            sound[published] = sound.pop(key)
        sound["nemo_conv_settings"] = {"conv_channels": sound.pop("nemo_conv_channels")}
        distance = sound.pop("bias_max_distance")
        sound["relative_attention_bias_args"] = {"type": "t5", "t5_bias_max_distance": distance}
        del config["vision_config"]
        config |= {
            "architectures": ["Phi4MMForCausalLM"], "model_type": "phi4mm",
            "audio_processor": {"name": "cascades", "config": sound},
            "embd_layer": {
                "embedding_cls": "image_audio",
                "image_embd_layer": {"crop_size": SIDE, "hd_transform_order": "sub_glb",
                                     "image_token_compression_cls": "avg_pool_2d"},
                "audio_embd_layer": {"downsample_rate": 1},
            },
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config))

    @pytest.mark.parametrize(
        ("change", "named"),
        [({"hd_transform_order": "glb_sub"}, "hd_transform_order = 'glb_sub'"),
         ({"image_token_compression_cls": None}, "image_token_compression_cls")],
    )  # fmt: skip
    def test_other_settings_are_refused(  # type: ignore[override]
        self, reference: Any, folder: Path, tmp_path: Path, change: Any, named: str
    ) -> None:
        config = json.loads((folder / "config.json").read_text())
        images = {**config["embd_layer"]["image_embd_layer"], **change}
        with pytest.raises(UnsupportedModel, match=re.escape(named)):
            self.load(self.with_config(folder, tmp_path, embd_layer={"image_embd_layer": images}))
