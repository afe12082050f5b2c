"""Granite Speech beside transformers on tiny checkpoints: blocks, windows, an adapter beside the weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from adapter_files import with_adapters
from audio_conformance import HeardAlone
from safetensors.torch import load_file, save_file
from test_vision_language import TEXT, drawn
from torch import Tensor
from vision_conformance import IMAGE

from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.errors import UnsupportedModel, WeightsError
from headrace_core.platform import CpuPlatform
from headrace_models.loading.loader import load_model
from headrace_models.resolve import resolve
from headrace_testing.model.decoders import build_context

BINS, BLOCK, WINDOW = 10, 7, 6
ENCODER: dict[str, Any] = {
    "input_dim": BINS, "num_layers": 4, "hidden_dim": 12, "feedforward_mult": 2, "num_heads": 3,
    "dim_head": 5, "output_dim": 9, "context_size": BLOCK, "max_pos_emb": 11, "conv_kernel_size": 4,
    "conv_expansion_factor": 2,
}  # fmt: skip
FORMER: dict[str, Any] = {
    "model_type": "blip_2_qformer", "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
    "intermediate_size": 24, "encoder_hidden_size": 12, "cross_attention_frequency": 2,
}  # fmt: skip
GRANITE: dict[str, Any] = {
    **TEXT, "model_type": "granite", "embedding_multiplier": 3.0, "logits_scaling": 2.0,
    "residual_multiplier": 0.3, "attention_multiplier": 0.2,
}  # fmt: skip
COUNTS = (6, 8)
"""Vectors: two for each six states."""


def recording(states: int) -> dict[str, Tensor]:
    return {"input_features": drawn(states, states, BINS)}


class Granite(HeardAlone):
    """Recordings of one and of two blocks, the last of each shorter."""

    names_of_towers: ClassVar = ("encoder.", "projector.")
    divisor: ClassVar = GRANITE["logits_scaling"]
    encoder: ClassVar[dict[str, Any]] = ENCODER
    former: ClassVar[dict[str, Any]] = FORMER

    def hf_config(self) -> Any:
        return self.config_class()(
            encoder_config=self.encoder, projector_config=self.former, text_config=GRANITE,
            audio_token_index=IMAGE, has_lora_adapter=False, downsample_rate=3, window_size=WINDOW,
        )  # fmt: skip

    def config_class(self) -> Any:
        raise NotImplementedError

    def save(self, reference: Any, folder: Path) -> None:
        """The running means of batch norms are not 0."""
        for name, buffer in reference.named_buffers():
            if "running" in name:
                buffer.copy_(drawn(len(name), *buffer.shape).abs() + 0.3)
        super().save(reference, folder)

    def images(self) -> Sequence[dict[str, Tensor]]:
        return [recording(2 * BLOCK), recording(3 * BLOCK + 2)]

    def features(self, reference: Any, image: dict[str, Tensor]) -> Tensor:
        found: Tensor = reference.get_audio_features(image["input_features"][None]).pooler_output[0]
        return found

    def test_vectors_of_windows(self, model: Any) -> None:
        assert tuple(len(vectors) for vectors in self.embed(model, self.images())) == COUNTS


class TestGraniteSpeech(Granite):
    def hf_class(self) -> Any:
        from transformers import GraniteSpeechForConditionalGeneration

        return GraniteSpeechForConditionalGeneration

    def config_class(self) -> Any:
        from transformers import GraniteSpeechConfig

        return GraniteSpeechConfig

    def check_slots(self, folder: Path, adapter: Path) -> None:
        """A request's adapter may change what the checkpoint's own has changed already."""
        info = resolve(ModelConfig(model=str(folder)), LoadConfig(), CpuPlatform())
        info = replace(info, processor=info.architecture)
        context, slots = with_adapters(build_context(info))
        load_model(info, context)
        places = {piece.place.name for piece in slots.read(str(adapter)).pieces}
        assert places == {f"model.layers.{i}.self_attn.qkv_proj" for i in (0, 1)}

    def test_published_names(self, reference: Any, folder: Path) -> None:
        names = load_file(folder / "model.safetensors").keys()
        assert {name.split(".")[0] for name in names} == {"encoder", "projector", "language_model"}

    def test_an_adapter_is_added(
        self, reference: Any, model: Any, folder: Path, tmp_path: Path
    ) -> None:
        """To the weights of the decoder, with recordings; without, it is another model's."""
        changed = dict(load_file(folder / "model.safetensors"))
        made: dict[str, Tensor] = {}
        for index, name in enumerate(("0.self_attn.q_proj", "1.self_attn.v_proj")):
            whole = f"language_model.model.layers.{name}"
            rows, columns = changed[f"{whole}.weight"].shape
            down, up = drawn(index, 3, columns), drawn(index + 9, rows, 3)
            made |= {
                f"base_model.model.{whole}.lora_A.weight": down,
                f"base_model.model.{whole}.lora_B.weight": up,
            }
            changed[f"{whole}.weight"] = changed[f"{whole}.weight"] + 0.5 / 3 * up @ down
        plain, merged = tmp_path / "plain", tmp_path / "merged"
        for place in (plain, merged):
            place.mkdir()
            (place / "config.json").write_bytes((folder / "config.json").read_bytes())
        (plain / "model.safetensors").symlink_to(folder / "model.safetensors")
        save_file(made, plain / "adapter_model.safetensors")
        settings = {"peft_type": "LORA", "r": 3, "lora_alpha": 0.5, "bias": "none"}
        (plain / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
        save_file(changed, merged / "model.safetensors")
        own, expected = self.load(plain), self.load(merged)
        tokens, offsets = self.prompt(COUNTS)
        both = [
            self.forward(built, tokens, offsets, self.images(), [len(tokens)])
            for built in (own, expected, model)
        ]
        torch.testing.assert_close(both[0], both[1], atol=1e-5, rtol=0)
        assert float((both[0] - both[2]).abs().max()) > 0.1
        self.check_slots(plain, plain)
        text = self.load(plain, limit_mm_per_prompt={"audio": 0})
        found = self.forward(text, [5, 6, 7], [], [], [3])
        torch.testing.assert_close(
            found, self.logprobs(reference, [5, 6, 7], []), atol=1e-4, rtol=0
        )
        settings["use_dora"] = True
        (plain / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
        with pytest.raises(UnsupportedModel, match=r"use_dora = True"):
            self.load(plain)
        (plain / "adapter_model.safetensors").unlink()
        del settings["use_dora"]
        (plain / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
        with pytest.raises(WeightsError, match=r"adapter_model\.safetensors: is missing"):
            self.load(plain)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"has_lora_adapter": True}, "there must be adapter_config.json"),
            ({"encoder_config": {**ENCODER, "context_size": 12}}, "at most max_pos_emb = 11"),
            ({"projector_config": {**FORMER, "encoder_hidden_size": 24}}, "must be 12"),
        ],
    )
    def test_refused(
        self, reference: Any, folder: Path, tmp_path: Path, change: dict[str, Any], words: str
    ) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | change
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
        with pytest.raises(UnsupportedModel, match=words):
            self.load(tmp_path)


class TestGraniteSpeechPlus(Granite):
    """States of the first layer's input and of the middle layer stand in front of the last one's."""

    encoder: ClassVar = {**ENCODER, "cat_hidden_layers": [2, 0]}
    former: ClassVar = {**FORMER, "encoder_hidden_size": 36}

    def hf_class(self) -> Any:
        from transformers import GraniteSpeechPlusForConditionalGeneration

        return GraniteSpeechPlusForConditionalGeneration

    def config_class(self) -> Any:
        from transformers import GraniteSpeechPlusConfig

        return GraniteSpeechPlusConfig
