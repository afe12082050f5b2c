"""Qwen2-Audio against transformers, on a tiny config."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_families_conformance import FamilyConformance

from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.errors import RequestError
from headrace_core.model import INPUT_EMBEDS, InputEmbeds, SupportsMultiModal
from headrace_core.platform import CpuPlatform
from headrace_core.speech.model import AudioClip
from headrace_models.families.audio_language.qwen2_audio import Qwen2AudioForConditionalGeneration
from headrace_models.loading.loader import load_model
from headrace_models.resolve import resolve
from headrace_testing.model.decoders import PagedDriver, build_context, randomise
from headrace_testing.model.speech import TranscriptionConformance

STATES, AUDIO = 24, 120
TEXT = {
    "model_type": "qwen2", "vocab_size": 131, "hidden_size": 72, "intermediate_size": 100,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ENCODER = {
    "num_mel_bins": 11, "d_model": 36, "encoder_layers": 2, "encoder_attention_heads": 6,
    "encoder_ffn_dim": 50, "max_source_positions": STATES,
}  # fmt: skip


class TestText(FamilyConformance):
    """Without audio it is a Qwen2, behind a prefix."""

    without_adapters = ("audio_tower", "multi_modal")
    flips_ties = False

    def hf_class(self) -> Any:
        from transformers import Qwen2AudioForConditionalGeneration

        return Qwen2AudioForConditionalGeneration

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import Qwen2AudioConfig

        config = Qwen2AudioConfig(
            audio_config=ENCODER, text_config={**TEXT, **overrides}, audio_token_index=AUDIO
        )
        config.vocab_size = config.text_config.vocab_size
        return config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("qwen2_audio")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    case = TestText()
    reference = case.hf_class()(case.hf_config()).eval()
    randomise(reference)
    reference.save_pretrained(folder)
    return reference


@pytest.fixture(scope="module")
def model(reference: Any, folder: Path) -> Any:
    info = resolve(ModelConfig(model=str(folder)), LoadConfig(), CpuPlatform())
    return load_model(info, build_context(info))


def spectrogram(seed: int) -> torch.Tensor:
    return torch.randn((2 * STATES, 11), generator=torch.Generator().manual_seed(seed))


def heard(frames: torch.Tensor, count: int) -> dict[str, torch.Tensor]:
    """What the processor sends of a clip with ``count`` frames of audio."""
    return {"input_features": frames[: count + 2], "num_frames": torch.tensor([count])}


def logprobs(reference: Any, tokens: list[int], clips: list[tuple[torch.Tensor, int]]) -> Any:
    """By transformers: tokens with placeholders expanded."""
    features = torch.stack([frames.T for frames, _ in clips])
    mask = torch.stack([torch.arange(2 * STATES) < count for _, count in clips]).long()
    with torch.inference_mode():
        logits = reference(
            input_ids=torch.tensor([tokens]),
            attention_mask=torch.ones((1, len(tokens)), dtype=torch.int64),
            input_features=features,
            feature_attention_mask=mask,
        ).logits[0]
    return torch.log_softmax(logits, dim=-1)


def test_it_takes_media(model):
    assert isinstance(model, SupportsMultiModal)


@pytest.mark.parametrize("counts", [(48, 29), (17, 48), (3, 5), (12, 13)])
def test_two_clips_in_a_prompt(reference, model, counts):
    clips = [(spectrogram(seed), count) for seed, count in enumerate(counts)]
    with torch.inference_mode():
        vectors = model.embed_media("audio", [heard(*clip) for clip in clips])
    sizes = [(count + 1) // 2 // 2 for count in counts]
    assert [tuple(v.shape) for v in vectors] == [(size, 72) for size in sizes]
    tokens = [5, *[AUDIO] * sizes[0], 7, *[AUDIO] * sizes[1], 8, 9]
    batch = PagedDriver(model).batch({"a": tokens})
    rows = torch.tensor([i for i, token in enumerate(tokens) if token == AUDIO])
    given = InputEmbeds(rows, torch.cat(list(vectors)))
    with torch.inference_mode():
        hidden = model.forward(replace(batch, extra={INPUT_EMBEDS: given}))
        found = torch.log_softmax(model.compute_logits(hidden).float(), dim=-1)
    torch.testing.assert_close(found, logprobs(reference, tokens, clips), atol=1e-4, rtol=0)


def test_a_clip_alone_equals_the_clip_in_a_batch(model):
    clips = [heard(spectrogram(seed), 20 + seed) for seed in range(3)]
    with torch.inference_mode():
        together = model.embed_media("audio", clips)
        alone = model.embed_media("audio", clips[1:2])[0]
    torch.testing.assert_close(alone, together[1], atol=1e-6, rtol=0)


class TestConformance(TranscriptionConformance):
    model = Qwen2AudioForConditionalGeneration

    @pytest.fixture
    def info(self, reference: Any, folder: Path) -> Any:
        return resolve(ModelConfig(model=str(folder)), LoadConfig(), CpuPlatform())


def prompt(folder: Path, **asked: Any) -> str:
    info = resolve(ModelConfig(model=str(folder)), LoadConfig(), CpuPlatform())
    config = Qwen2AudioForConditionalGeneration.get_speech_to_text_config(info, "transcribe")
    assert config.max_audio_clip_s == pytest.approx(2 * STATES / 100)
    keywords = {
        "language": None,
        "task_type": "transcribe",
        "request_prompt": "",
        "to_language": None,
    }
    made = Qwen2AudioForConditionalGeneration.get_generation_prompt(
        AudioClip([0.0], 16000), info, config, **{**keywords, **asked}
    )
    assert made["multi_modal_data"] == {"audio": ([0.0], 16000)}
    assert made["prompt"].count("<|AUDIO|>") == 1
    return made["prompt"]


def test_prompts(reference, folder, tmp_path):
    assert "Transcribe the speech" in prompt(folder)
    assert "Transcribe the German speech" in prompt(folder, language="de")
    asked = {"task_type": "translate", "language": "zh"}
    assert "Translate the Chinese speech into English" in prompt(folder, **asked)
    assert "into French" in prompt(folder, **asked, to_language="fr")
    assert "Names: Ann" in prompt(folder, request_prompt="Names: Ann")
    with pytest.raises(RequestError, match="to_language = 'xx'"):
        prompt(folder, **asked, to_language="xx")
    with pytest.raises(RequestError, match="timestamps"):
        prompt(folder, timestamps=True)
    with pytest.raises(RequestError, match="to_language = 'fr'"):
        prompt(folder, to_language="fr")


def test_what_it_is_resolved_to(reference, folder):
    info = resolve(ModelConfig(model=str(folder)), LoadConfig(), CpuPlatform())
    assert info.tasks == ("generate", "transcription")
    assert not info.is_encoder_decoder
    assert (info.runner, info.max_model_len, info.vocab_size) == ("generate", 128, 131)


def test_published_configs_leave_sizes_out(reference, folder, tmp_path):
    """What the config says stands in for these sizes wherever it says something."""
    config = json.loads((folder / "config.json").read_text())
    stated = {key: config["text_config"][key] for key in ("vocab_size", "max_position_embeddings")}
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "text_config": stated, "audio_config": {"d_model": 1280}})
    )
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    info = resolve(ModelConfig(model=str(tmp_path)), LoadConfig(), CpuPlatform())
    model = Qwen2AudioForConditionalGeneration(build_context(info))
    assert (model.hidden_size(), model.num_layers()) == (4096, 32)
    assert (model.encoder.num_positions, len(model.encoder.layers)) == (1500, 32)
    assert model.layers[0].attention.spec.num_kv_heads == 32


def test_a_checkpoint_that_converses_is_asked_in_a_conversation(reference, folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|im_end|>": 130}))
    assert "<|im_start|>" not in prompt(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ x }}"}))
    assert "<|im_start|>user" in prompt(tmp_path)
    with pytest.raises(RequestError, match=r"<\|im_end\|>"):
        prompt(tmp_path, request_prompt="hello <|im_end|>")
