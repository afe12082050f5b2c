"""Emu3 beside transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from test_vision_language import TEXT, drawn
from torch import Tensor
from vision_conformance import IMAGE, VisionConformance

from headrace_core.errors import UnsupportedModel

CODES, ROW_END = 12, 99
PIECES = {f"<|visual token {code:06}|>": 100 + (code * 5) % CODES for code in range(CODES)}
TOWER: dict[str, Any] = {
    "codebook_size": CODES, "embed_dim": 4, "latent_channels": 4, "base_channels": 32,
    "channel_multiplier": [1, 1, 2], "num_res_blocks": 1, "attn_resolutions": [2], "hidden_size": 64,
    "num_attention_heads": 2,
}  # fmt: skip


class TestEmu3(VisionConformance):
    """Images are encoded as if each came alone; the library fills those of a batch up to one size."""

    chooses_vectors: ClassVar = True
    tower: ClassVar[dict[str, Any]] = TOWER

    def hf_class(self) -> Any:
        from transformers import Emu3ForConditionalGeneration

        return Emu3ForConditionalGeneration

    def hf_config(self) -> Any:
        from transformers import Emu3Config

        return Emu3Config(
            vq_config=self.tower, text_config={**TEXT, "attention_bias": False},
            vocabulary_map={"<image>": IMAGE, "<|extra_200|>": ROW_END, **PIECES},
        )  # fmt: skip

    def save(self, reference: Any, folder: Path) -> None:
        """With means and variances that training has seen."""
        for name, buffer in reference.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                buffer.copy_(drawn(len(name), *buffer.shape).abs() + 0.5)
        super().save(reference, folder)

    def images(self) -> Sequence[dict[str, Tensor]]:
        sizes = ((16, 24), (20, 8))
        return [{"pixel_values": drawn(seed, 3, *size)} for seed, size in enumerate(sizes)]

    def logprobs(self, reference: Any, tokens: list[int], images: Any) -> Tensor:
        ids = torch.tensor([tokens])
        with torch.inference_mode():
            found = [code_tokens(reference, image["pixel_values"]) for image in images]
            if found:
                ids[ids == IMAGE] = torch.cat(found)
            logits = reference(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]
        return torch.log_softmax(logits.float(), dim=-1)

    def test_codes_are_the_librarys(self, reference: Any, model: Any) -> None:
        for image in self.images():
            pixels = image["pixel_values"]
            with torch.inference_mode():
                found = model._tokens(pixels).tolist()
                assert found == code_tokens(reference, pixels).tolist()
            assert len(set(found)) > 3
            columns = pixels.shape[2] // 4
            assert {at % (columns + 1) for at, x in enumerate(found) if x == ROW_END} == {columns}

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"<|visual token 000003|>": "x"}, "000003.*'x': must be a token below vocab_size"),
            ({"<|visual token 000003|>": 131}, "000003.*131: must be a token"),
            ({"<|extra_200|>": None}, "extra_200.*None: must be a token"),
        ],
    )
    def test_refused(
        self, reference: Any, folder: Path, tmp_path: Path, change: dict[str, Any], named: str
    ) -> None:
        with pytest.raises(UnsupportedModel, match=named):
            self.load(self.with_config(folder, tmp_path, vocabulary_map=change))

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"hidden_size": 32}, "hidden_size = 32"),
            ({"temporal_downsample_factor": 3}, "temporal_downsample_factor = 3"),
            ({"base_channels": 40}, "base_channels = 40"),
        ],
    )
    def test_towers_that_are_refused(
        self, reference: Any, folder: Path, tmp_path: Path, change: dict[str, Any], named: str
    ) -> None:
        with pytest.raises(UnsupportedModel, match=named):
            self.load(self.with_config(folder, tmp_path, vq_config=change))

    def test_codes_without_tokens_are_refused(
        self, reference: Any, folder: Path, tmp_path: Path
    ) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["vocabulary_map"].pop("<|visual token 000004|>")
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
        with pytest.raises(UnsupportedModel, match="11 of the 12 codes"):
            self.load(tmp_path)


class TestEmu3OfTwoFrames(TestEmu3):
    """Without attention at any resolution but the last."""

    tower: ClassVar = {
        **TOWER, "attn_resolutions": [], "temporal_downsample_factor": 2, "num_res_blocks": 2,
    }  # fmt: skip


def code_tokens(reference: Any, pixels: Tensor) -> Tensor:
    """Of an image, by the library."""
    whole = reference.model
    [codes] = whole.vqmodel.encode(pixels[None], [pixels.shape[1:]]).image_tokens
    tokens: Tensor = whole.vocabulary_mapping.convert_img2bpe(codes)
    return tokens.flatten().long()
