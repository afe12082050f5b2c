"""MiniCPM-V 2.0, 2.5, 2.6, 4.0 and 4.5 beside a plain reading of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from test_vision_language import TEXT, drawn
from torch import Tensor
from video_conformance import VALUES, VideoConformance
from vision_conformance import IMAGE, VisionConformance

from headrace_core.errors import UnsupportedModel
from headrace_models.layers.vision.towers import named_vit
from headrace_models.layers.vision.towers.named_vit import VitSizes
from headrace_testing.model.plain.minicpmv import PlainMiniCPMV
from headrace_testing.model.plain.minicpmv_2 import PlainMiniCPMV20

SIZE, PATCH, QUERIES = 256, 4, 5
VISION: dict[str, Any] = {
    "hidden_size": 36, "intermediate_size": 50, "num_hidden_layers": 2, "num_attention_heads": 3,
    "image_size": 28, "patch_size": PATCH,
}  # fmt: skip


class MiniCPMV(VideoConformance):
    placeholders = (IMAGE, IMAGE)
    version: ClassVar[float]
    more: ClassVar[dict[str, Any]] = {}

    def hf_class(self) -> Any:
        return PlainMiniCPMV

    def hf_config(self) -> Any:
        return {
            "architectures": ["MiniCPMV"], "model_type": "minicpmv", "version": self.version,
            "vision_config": {**VISION, "model_type": "siglip"}, "query_num": QUERIES,
            "drop_vision_last_layer": False, "slice_config": {"max_slice_nums": 9},
            "image_token": IMAGE, **TEXT, "hidden_size": SIZE, "tie_word_embeddings": False,
            **self.more,
        }  # fmt: skip

    def images(self) -> Sequence[dict[str, Tensor]]:
        """Of three slices and of one, of several shapes."""
        grids = [[(3, 7), (6, 4), (6, 4)], [(5, 5)]]
        return [
            {
                "pixel_values": drawn(len(own), sum(r * c for r, c in own), 3 * PATCH**2),
                "tgt_sizes": torch.tensor(own),
            }
            for own in grids
        ]

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        found = [{"pixel_values": x.get("pixel_values", x.get(VALUES)), **x} for x in images]
        return {"images": found}

    def videos(self) -> Sequence[dict[str, Tensor]]:
        """Of two frames and of one."""
        grids = [[(3, 4), (3, 4)], [(4, 2)]]
        return [
            {
                VALUES: drawn(9 + len(own), sum(r * c for r, c in own), 3 * PATCH**2),
                "tgt_sizes": torch.tensor(own),
            }
            for own in grids
        ]

    def times(self, video: dict[str, Tensor]) -> int:
        return len(video["tgt_sizes"])

    def test_without_media_no_tower_is_loaded(
        self, reference: Any, folder: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The processor has another name than the reference's class."""
        monkeypatch.setattr(type(self), "hf_class", lambda _: type("MiniCPMV", (), {}))
        super().test_without_media_no_tower_is_loaded(reference, folder, monkeypatch)

    def test_other_pixels_are_another_image(self, model: Any) -> None:
        """A slice of an image changes its own vectors, and no others."""
        first = self.images()[0]
        pixels = torch.cat((first["pixel_values"][:21].flip(1), first["pixel_values"][21:]))
        own, other = self.embed(model, [first, {**first, "pixel_values": pixels}])
        differs = (own - other).abs().amax(dim=1) > 1e-4
        assert differs.tolist() == [True] * QUERIES + [False] * 2 * QUERIES


class TestMiniCPMV(MiniCPMV):
    version = 2.6

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"version": 2.4}, "MiniCPMV"),
            ({"hidden_size": 192, "num_attention_heads": 4}, "hidden_size = 192"),
            ({"query_num": 0}, "query_num = 0"),
        ],
    )  # fmt: skip
    def test_refused(
        self, reference: Any, folder: Path, tmp_path: Path, change: dict[str, Any], named: str
    ) -> None:
        config = json.loads((folder / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
        with pytest.raises(UnsupportedModel, match=named):
            self.load(tmp_path)

    def test_a_tower_without_its_last_layer(
        self, reference: Any, model: Any, folder: Path, tmp_path: Path
    ) -> None:
        """Which is what configs mean that do not say."""
        config = json.loads((folder / "config.json").read_text())
        config.pop("drop_vision_last_layer")
        config["vision_config"]["num_hidden_layers"] += 1
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
        for own, found in zip(
            self.embed(model, self.images()), self.embed(self.load(tmp_path), self.images()), strict=True
        ):  # fmt: skip
            torch.testing.assert_close(found, own)


class TestMiniCPMV25(VisionConformance):
    """Whose config names no version, and has other numbers of vectors."""

    def hf_class(self) -> Any:
        return PlainMiniCPMV

    def hf_config(self) -> Any:
        config = TestMiniCPMV().hf_config()
        config.pop("version")
        return {**config, "query_num": 7}

    def images(self) -> Sequence[dict[str, Tensor]]:
        return TestMiniCPMV().images()

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        return {"images": images}

    def test_it_takes_no_videos(self, model: Any) -> None:
        assert tuple(model.modalities) == ("image",)

    def test_places_are_those_of_one_row(
        self, reference: Any, model: Any, folder: Path, tmp_path: Path
    ) -> None:
        [first, *_] = self.embed(model, self.images())
        other = self.with_config(folder, tmp_path, version="4.0")
        [later, *_] = self.embed(self.load(other), self.images())
        assert float((first - later).abs().max()) > 1e-3


class TestMiniCPMV20(VisionConformance):
    """Whose config names its tower, and no version."""

    sizes: ClassVar = VitSizes(36, 50, 2, 3, PATCH, 5)

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def small(cls) -> Iterator[None]:
        """A tower of a name of its own, which has a block more than is used."""
        with pytest.MonkeyPatch.context() as patch:
            more = cls.sizes._replace(layers=cls.sizes.layers + 1)
            patch.setattr(named_vit, "SIZES", {"small": more})
            yield

    def hf_class(self) -> Any:
        return lambda config: PlainMiniCPMV20(config, self.sizes)

    def hf_config(self) -> Any:
        return {
            "architectures": ["MiniCPMV"], "model_type": "minicpmv", "vision_encoder": "small",
            "query_num": 9, "drop_vision_last_layer": True, "image_token": IMAGE, **TEXT,
            "hidden_size": SIZE, "tie_word_embeddings": False, "scale_emb": 3.0, "scale_depth": 1.4,
            "dim_model_base": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        }  # fmt: skip

    def images(self) -> Sequence[dict[str, Tensor]]:
        return TestMiniCPMV().images()

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        return {"images": images}

    def test_it_takes_no_videos(self, model: Any) -> None:
        assert tuple(model.modalities) == ("image",)

    def test_unknown_towers_are_refused(self, reference: Any, folder: Path, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedModel, match="vision_encoder = 'vit': must be small"):
            self.load(self.with_config(folder, tmp_path, vision_encoder="vit"))


class TestMiniCPMV4(MiniCPMV):
    version = 4.0


class TestMiniCPMV45(MiniCPMV):
    version = 4.5
    more: ClassVar = {"head_dim": 64}
