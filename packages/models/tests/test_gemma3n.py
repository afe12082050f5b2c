"""Gemma 3n with images and recordings beside transformers on a tiny checkpoint. Its tower of images, which
needs timm there, is a plain reading of that library's."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import transformers
from audio_conformance import Heard
from test_vision_language import TEXT, drawn
from torch import Tensor, nn
from torch.nn import functional as F
from vision_conformance import IMAGE

from headrace_core import plugins
from headrace_core.errors import UnsupportedModel
from headrace_models.families.omni import gemma3n
from headrace_models.layers.convolutional import mobilenet_v5
from headrace_models.layers.convolutional.mobilenet_v5 import Edge, Inverted, Query, Table

BINS, PLACES = 10, 6
PIXELS = "pixel_values"
FIRST_IMAGE, FIRST_SOUND = 112, 120
SEEN = FIRST_IMAGE + 1
"""Placeholder of an image."""
AUDIO: dict[str, Any] = {
    "vocab_size": 11, "vocab_offset": FIRST_SOUND, "input_feat_size": BINS, "hidden_size": 16,
    "conf_attention_chunk_size": 4, "conf_attention_context_left": 4, "conf_attention_context_right": 1,
    "conf_num_attention_heads": 2, "conf_num_hidden_layers": 2, "conf_attention_logit_cap": 2.0,
    "sscp_conv_channel_size": [6, 4], "gradient_clipping": 5.0,
}  # fmt: skip
VISION = {
    "vocab_size": 8, "vocab_offset": FIRST_IMAGE, "hidden_size": 12, "architecture": "tiny",
}  # fmt: skip
TABLE = Table(
    8,
    (
        (Edge(8, 2), Edge(8)),
        (Inverted(16, 3, 6, 5, 2), Inverted(16, 5)),
        (Inverted(24, 5, 6, 5, 2), Query(3, 8, 2), Inverted(24, expansion=1)),
        (Inverted(32, 5, 6, 5, 2), Query(2, 8), Inverted(32, expansion=2)),
    ),
)
SIDE = 2
GEMMA: dict[str, Any] = {
    **TEXT, "vocab_size_per_layer_input": FIRST_IMAGE, "hidden_size_per_layer_input": 8, "head_dim": 12,
    "num_hidden_layers": 3, "num_kv_shared_layers": 1, "laurel_rank": 4, "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "activation_sparsity_pattern": None,
}  # fmt: skip


class Tower(nn.Module):
    """timm's MobileNetV5, whose tensors have that library's names."""

    def __init__(self) -> None:
        super().__init__()
        self.timm_model = nn.Module()
        self._convolution("conv_stem", 3, TABLE.stem, 3)
        self._put("conv_stem.conv.bias", TABLE.stem)
        before, sizes = TABLE.stem, []
        for stage, blocks in enumerate(TABLE.stages):
            for index, block in enumerate(blocks):
                before = self._block(f"blocks.{stage}.{index}", before, block)
            sizes.append(before)
        joined = sizes[-2] + sizes[-1]
        self._convolution("msfa.ffn.pw_exp", joined, 2 * joined, 1)
        self._convolution("msfa.ffn.pw_proj", 2 * joined, VISION["hidden_size"], 1)
        self._put("msfa.norm.weight", VISION["hidden_size"])

    def _put(self, name: str, *shape: int) -> None:
        *path, last = name.split(".")
        place = self.timm_model
        for part in path:
            if not hasattr(place, part):
                place.add_module(part, nn.Module())
            place = getattr(place, part)
        place.register_parameter(last, nn.Parameter(torch.ones(shape)))

    def _convolution(self, name: str, before: int, after: int, width: int) -> None:
        self._put(f"{name}.conv.weight", after, before, width, width)
        self._put(f"{name}.bn.weight", after)

    def _block(self, name: str, size: int, block: Any) -> int:
        if isinstance(block, Query):
            wide = block.num_heads * block.head_dim
            self._put(f"{name}.norm.weight", size)
            self._put(f"{name}.attn.query.proj.weight", wide, size, 1, 1)
            for part in ("key", "value"):
                self._put(f"{name}.attn.{part}.proj.weight", block.head_dim, size, 1, 1)
                if block.stride > 1:
                    self._put(f"{name}.attn.{part}.down_conv.weight", size, 1, 3, 3)
                    self._put(f"{name}.attn.{part}.norm.weight", size)
            self._put(f"{name}.attn.output.proj.weight", size, wide, 1, 1)
            self._put(f"{name}.layer_scale.gamma", size)
            return size
        between = size * block.expansion
        if isinstance(block, Edge):
            self._put(f"{name}.conv_exp.weight", between, size, 3, 3)
            self._put(f"{name}.bn1.weight", between)
            self._put(f"{name}.conv_pwl.weight", block.size, between, 1, 1)
            self._put(f"{name}.bn2.weight", block.size)
            return block.size
        if block.start:
            self._convolution(f"{name}.dw_start", 1, size, block.start)
        self._convolution(f"{name}.pw_exp", size, between, 1)
        if block.middle:
            self._convolution(f"{name}.dw_mid", 1, between, block.middle)
        self._convolution(f"{name}.pw_proj", between, block.size, 1)
        self._put(f"{name}.layer_scale.gamma", block.size)
        return block.size

    def forward(self, pixel_values: Tensor, **_: Any) -> Any:
        w = dict(self.timm_model.named_parameters())

        def norm(x: Tensor, name: str) -> Tensor:
            x = x / (x.pow(2).mean(1, keepdim=True) + 1e-6).sqrt()
            return x * w[name].view(1, -1, 1, 1)

        def convolved(x: Tensor, name: str, stride: int = 1) -> Tensor:
            kernel = w[f"{name}.weight"]
            pads = []
            for size in (x.shape[3], x.shape[2]):
                out = math.ceil(size / stride)
                more = max(0, (out - 1) * stride + kernel.shape[2] - size)
                pads += [more // 2, more - more // 2]
            groups = x.shape[1] // kernel.shape[1]
            bias = w.get(f"{name}.bias")
            return F.conv2d(F.pad(x, pads), kernel, bias, stride, groups=groups)

        def block(x: Tensor, name: str, own: Any) -> Tensor:
            if isinstance(own, Query):
                y = norm(x, f"{name}.norm.weight")
                q = convolved(y, f"{name}.attn.query.proj").flatten(2)
                q = q.view(len(x), own.num_heads, own.head_dim, -1)
                seen = []
                for part in ("key", "value"):
                    z = y
                    if own.stride > 1:
                        z = convolved(z, f"{name}.attn.{part}.down_conv", own.stride)
                        z = norm(z, f"{name}.attn.{part}.norm.weight")
                    seen.append(convolved(z, f"{name}.attn.{part}.proj").flatten(2))
                scores = torch.einsum("nhdq,ndk->nhqk", q, seen[0]) / own.head_dim**0.5
                out = torch.einsum("nhqk,ndk->nhdq", scores.softmax(-1), seen[1])
                out = out.reshape(len(x), -1, *x.shape[2:])
                made = convolved(out, f"{name}.attn.output.proj")
                return x + made * w[f"{name}.layer_scale.gamma"].view(1, -1, 1, 1)
            y = x
            if isinstance(own, Edge):
                y = norm(convolved(y, f"{name}.conv_exp", own.stride), f"{name}.bn1.weight")
                y = convolved(F.gelu(y, approximate="tanh"), f"{name}.conv_pwl")
                y = norm(y, f"{name}.bn2.weight")
            else:
                if own.start:
                    stride = 1 if own.middle else own.stride
                    y = both(y, f"{name}.dw_start", stride, act=False)
                y = both(y, f"{name}.pw_exp")
                if own.middle:
                    y = both(y, f"{name}.dw_mid", own.stride)
                y = both(y, f"{name}.pw_proj", act=False)
                y = y * w[f"{name}.layer_scale.gamma"].view(1, -1, 1, 1)
            return x + y if y.shape == x.shape and own.stride == 1 else y

        def both(x: Tensor, name: str, stride: int = 1, act: bool = True) -> Tensor:
            x = norm(convolved(x, f"{name}.conv", stride), f"{name}.bn.weight")
            return F.gelu(x, approximate="tanh") if act else x

        x = both(pixel_values, "conv_stem", 2)
        found = []
        for stage, blocks in enumerate(TABLE.stages):
            for index, own in enumerate(blocks):
                x = block(x, f"blocks.{stage}.{index}", own)
            found.append(x)
        x = torch.cat((found[-2], found[-1].repeat_interleave(2, 2).repeat_interleave(2, 3)), 1)
        x = both(both(x, "msfa.ffn.pw_exp"), "msfa.ffn.pw_proj", act=False)
        x = norm(F.avg_pool2d(x, x.shape[2] // SIDE), "msfa.norm.weight")
        return SimpleNamespace(last_hidden_state=x)


class _AutoModel:
    @staticmethod
    def from_config(config: Any) -> Any:
        if type(config).__name__ == "Gemma3nVisionConfig":
            return Tower()
        return transformers.AutoModel.from_config(config)


class TestGemma3n(Heard):
    """Of 9 and of 20 states before every fourth is taken: blocks of four that are not whole."""

    takes: ClassVar = ("image", "audio")
    names_of_towers: ClassVar = (
        "model.audio_tower.", "model.embed_audio.", "model.vision_tower.", "model.embed_vision.",
    )  # fmt: skip

    @pytest.fixture(scope="class", autouse=True)
    @staticmethod
    def stand_in() -> Iterator[None]:
        module = importlib.import_module("transformers.models.gemma3n.modeling_gemma3n")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "AutoModel", _AutoModel)
            patch.setattr(mobilenet_v5, "TABLES", {**mobilenet_v5.TABLES, "tiny": TABLE})
            patch.setattr(gemma3n, "TABLES", {**mobilenet_v5.TABLES, "tiny": TABLE})
            yield

    def hf_class(self) -> Any:
        return transformers.Gemma3nForConditionalGeneration

    def hf_config(self) -> Any:
        return transformers.Gemma3nConfig(
            audio_config=AUDIO, vision_config=VISION, text_config=GEMMA, audio_token_id=IMAGE,
            image_token_id=SEEN, audio_soft_tokens_per_image=PLACES,
            vision_soft_tokens_per_image=SIDE**2,
        )  # fmt: skip

    def save(self, reference: Any, folder: Path) -> None:
        """With kernels that lead to scores of the size of 1, so that rounding does not grow on the way."""
        with torch.no_grad():
            for kernel in reference.model.vision_tower.parameters():
                if kernel.dim() == 4:
                    kernel *= (kernel.shape[3] / kernel[0].numel()) ** 0.5
        super().save(reference, folder)

    def images(self) -> Sequence[dict[str, Tensor]]:
        return [{"input_features": drawn(frames, frames, BINS)} for frames in (33, 79)]

    def embed(self, model: Any, images: Sequence[dict[str, Tensor]]) -> list[Tensor]:
        kinds = ["image" if PIXELS in item else "audio" for item in images]
        with torch.inference_mode():
            return [
                model.embed_media(kind, [item])[0] for kind, item in zip(kinds, images, strict=True)
            ]

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        """Recordings are those that :meth:`logprobs` computes one by one."""
        pixels = [item[PIXELS] for item in images if PIXELS in item]
        sounds = [item for item in images if PIXELS not in item]
        found: dict[str, Any] = {PIXELS: torch.stack(pixels)} if pixels else {}
        if sounds:
            mask = torch.ones(1, 1, dtype=torch.bool)
            found |= {"input_features": sounds, "input_features_mask": mask}
        return found

    def logprobs(self, reference: Any, tokens: list[int], images: Any) -> Tensor:
        inner = type(reference.model).get_audio_features

        def alone(clips: Any, *_: Any, **__: Any) -> Any:
            """A clip by itself, where the library hears what fills up shorter ones."""
            found, masks = [], []
            for clip in clips:
                frames = clip["input_features"][None]
                heard = torch.zeros(frames.shape[:2], dtype=torch.bool)
                vectors = inner(reference.model, frames, heard).pooler_output[0]
                more = PLACES - len(vectors)
                found.append(torch.nn.functional.pad(vectors, (0, 0, 0, more)))
                masks.append(torch.arange(PLACES) >= len(vectors))
            return SimpleNamespace(
                pooler_output=torch.stack(found), audio_mel_mask=torch.stack(masks)
            )

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference.model, "get_audio_features", alone, raising=False)
            return super().logprobs(reference, tokens, images)

    def test_places_of_a_clip(self, model: Any) -> None:
        """Those behind the recording all have the vector of the last token."""
        short, long = self.embed(model, self.images())
        assert len(short) == len(long) == PLACES
        torch.testing.assert_close(short[3:], short[-1:].expand(3, -1))
        torch.testing.assert_close(long[-1], short[-1])
        assert float((short[2] - short[3]).abs().max()) > 1e-3

    def test_images_beside_recordings(self, reference: Any, model: Any) -> None:
        sound, other = self.images()
        first, second = ({PIXELS: drawn(40 + i, 3, 96, 96).sigmoid()} for i in range(2))
        items = [first, sound, second, other]
        tokens, offsets = [5, 6], []
        for index, item in enumerate(items):
            offsets.append(len(tokens))
            place = [SEEN] * SIDE**2 if PIXELS in item else [IMAGE] * PLACES
            tokens += [*place, 7 + index]
        found = self.forward(model, tokens, offsets, items, [4, len(tokens) - 4])
        expected = self.logprobs(reference, tokens, items)
        # The tower's vectors are equal to 2e-5; the decoder makes ten times as much of it.
        torch.testing.assert_close(found, expected, atol=5e-4, rtol=0)

    def test_vectors_of_images(self, reference: Any, model: Any) -> None:
        pixels = drawn(40, 3, 96, 96).sigmoid()
        (found,) = self.embed(model, [{PIXELS: pixels}])
        with torch.inference_mode():
            expected = reference.model.get_image_features(pixels[None]).pooler_output[0]
        torch.testing.assert_close(found, expected, atol=5e-5, rtol=0)

    def test_each_tower_goes_with_its_modality(
        self, reference: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        installed, own = plugins.installed, dict.fromkeys(["Gemma3nForConditionalGeneration"])
        group = "headrace.multimodal_processors"
        monkeypatch.setattr(
            plugins, "installed", lambda name: own if name == group else installed(name)
        )
        tokens = [5, 6, *[IMAGE] * PLACES, 8]
        expected = self.logprobs(reference, tokens, self.images()[:1])
        model = self.load(folder, limit_mm_per_prompt={"image": 0})
        assert list(model.modalities) == ["audio"]
        found = self.forward(model, tokens, [2], self.images()[:1], [len(tokens)])
        torch.testing.assert_close(found, expected, atol=self.tolerance, rtol=0)
        assert list(self.load(folder, limit_mm_per_prompt={"audio": 0}).modalities) == ["image"]

    def test_tokens_of_other_modalities(self, reference: Any, model: Any) -> None:
        """Such as those that end an image or a recording: from tables of the towers."""
        tokens = [5, FIRST_IMAGE, 6, FIRST_IMAGE + 7, FIRST_SOUND + 1, 7, FIRST_SOUND + 10, 9]
        found = self.forward(model, tokens, [], [], [3, len(tokens) - 3])
        expected = self.logprobs(reference, tokens, [])
        torch.testing.assert_close(found, expected, atol=self.tolerance, rtol=0)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"sscp_conv_stride_size": [[2, 2], [1, 2]]}, "sscp_conv_stride_size"),
            ({"vocab_offset": 119}, "must hold the last token"),
            ({"architecture": "resnet50"}, "architecture = 'resnet50'"),
        ],
    )
    def test_refused(
        self, reference: Any, folder: Path, tmp_path: Path, change: dict[str, Any], words: str
    ) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config["vision_config" if "architecture" in change else "audio_config"] |= change
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
        with pytest.raises(UnsupportedModel, match=words):
            self.load(tmp_path)
