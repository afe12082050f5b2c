"""Tiny speech and audio-language checkpoints with random weights, made by transformers, and their audio."""

from __future__ import annotations

import io
import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace_testing.model.decoders import randomise

SECONDS = 2
"""The longest clip of the tiny Whisper."""
RATE = 16000
_SPECIAL = (
    "<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>",
    "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>",
)  # fmt: skip


def save_tokenizer(
    folder: Path, special: tuple[str, ...] = _SPECIAL, words: tuple[str, ...] = ()
) -> dict[str, int]:
    """A byte-level tokenizer of a few merges; returns the ids of its special tokens.

    Args:
        words: tokens beside these.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["the water runs in the long race over the wheel"] * 3, trainer)
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens(list(words))
    tokenizer.save(str(folder / "tokenizer.json"))
    return {name: tokenizer.token_to_id(name) for name in special}


def token_ids(folder: Path, text: str) -> list[int]:
    """By the folder's tokenizer."""
    from tokenizers import Tokenizer

    ids: list[int] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    return ids


def save_whisper(folder: Path, seconds: int = SECONDS, **overrides: Any) -> Any:
    """A Whisper checkpoint, which never says timestamps; returns the model that is the oracle.

    Args:
        seconds: the longest clip.
    """
    from transformers import (
        GenerationConfig,
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
    )

    ids = save_tokenizer(folder)
    end, start = ids["<|endoftext|>"], ids["<|startoftranscript|>"]
    size = ids["<|notimestamps|>"] + 1 + seconds * 50 + 1
    settings = {
        "vocab_size": size, "num_mel_bins": 16, "d_model": 48, "encoder_layers": 2,
        "encoder_attention_heads": 3, "encoder_ffn_dim": 80, "decoder_layers": 3,
        "decoder_attention_heads": 3, "decoder_ffn_dim": 80, "max_source_positions": seconds * 50,
        "max_target_positions": 64, "decoder_start_token_id": start, "eos_token_id": end,
        "pad_token_id": end, "bos_token_id": end, "suppress_tokens": None,
        "begin_suppress_tokens": None, "median_filter_width": 5,
    }  # fmt: skip
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(WhisperConfig(**{**settings, **overrides})).eval()
    randomise(model)
    model.generation_config = GenerationConfig(
        decoder_start_token_id=start, eos_token_id=end, pad_token_id=end, bos_token_id=end,
        no_timestamps_token_id=ids["<|notimestamps|>"], is_multilingual=True,
        lang_to_id={name: ids[name] for name in ("<|en|>", "<|de|>")},
        task_to_id={"transcribe": ids["<|transcribe|>"], "translate": ids["<|translate|>"]},
        alignment_heads=[[0, 1], [1, 0], [2, 2]], max_initial_timestamp_index=25,
        suppress_tokens=[3, 4, *range(ids["<|notimestamps|>"], size)],
        begin_suppress_tokens=[5, end], prev_sot_token_id=ids["<|startofprev|>"],
    )  # fmt: skip
    model.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=16, chunk_length=seconds).save_pretrained(folder)
    return model


def sound(seed: int, seconds: float = 1.5) -> np.ndarray:
    """[n] float32 of three tones and some noise."""
    draw = np.random.default_rng(seed)
    times = np.arange(int(seconds * RATE)) / RATE
    tones = [
        a * np.sin(2 * np.pi * f * times) for a, f in draw.uniform((0.05, 90), (0.3, 3000), (3, 2))
    ]
    return (sum(tones) + draw.normal(0, 0.01, len(times))).astype(np.float32)


def features(folder: Path, samples: np.ndarray) -> torch.Tensor:
    """[1, bins, frames], by transformers."""
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor.from_pretrained(folder)
    made = extractor(samples, sampling_rate=RATE, return_tensors="pt")
    found: torch.Tensor = made.input_features
    return found


CHAT = (
    "{% for message in messages %}{{ message.role }}: {% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'audio' %}"
    "<|AUDIO|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}assistant:"
)


def save_qwen2_audio(folder: Path) -> Any:
    """A decoder that takes audio in place of placeholders; returns the model that is the oracle."""
    from transformers import (
        Qwen2AudioConfig,
        Qwen2AudioForConditionalGeneration,
        WhisperFeatureExtractor,
    )

    ids = save_tokenizer(folder, ("<|endoftext|>", "<|AUDIO|>"))
    text = {
        "model_type": "qwen2", "vocab_size": 302, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 256, "eos_token_id": ids["<|endoftext|>"], "bos_token_id": None,
    }  # fmt: skip
    audio = {
        "num_mel_bins": 16, "d_model": 48, "encoder_layers": 2, "encoder_attention_heads": 3,
        "encoder_ffn_dim": 80, "max_source_positions": SECONDS * 50,
    }  # fmt: skip
    config = Qwen2AudioConfig(
        audio_config=audio, text_config=text, audio_token_index=ids["<|AUDIO|>"]
    )
    config.vocab_size = 302
    model = Qwen2AudioForConditionalGeneration(config).eval()
    randomise(model)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=16, chunk_length=SECONDS).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT}))
    return model


def save_voxtral(folder: Path) -> Any:
    """A decoder that takes recordings in pieces of two seconds, 25 tokens each; returns the oracle."""
    from transformers import (
        VoxtralConfig,
        VoxtralForConditionalGeneration,
        WhisperFeatureExtractor,
    )

    ids = save_tokenizer(folder, ("<|endoftext|>", "[AUDIO]"))
    text = {
        "model_type": "llama", "vocab_size": 302, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 256, "eos_token_id": ids["<|endoftext|>"], "bos_token_id": None,
    }  # fmt: skip
    audio = {
        "num_mel_bins": 16, "hidden_size": 48, "intermediate_size": 192, "num_hidden_layers": 2,
        "num_attention_heads": 3, "max_source_positions": SECONDS * 50,
    }  # fmt: skip
    torch.manual_seed(0)
    model = VoxtralForConditionalGeneration(
        VoxtralConfig(audio_config=audio, text_config=text, audio_token_id=ids["[AUDIO]"])
    ).eval()
    randomise(model)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=16, chunk_length=SECONDS).save_pretrained(folder)
    chat = CHAT.replace("<|AUDIO|>", "[AUDIO]")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": chat}))
    return model


def save_glm_asr(folder: Path) -> Any:
    """A decoder that takes recordings in pieces of two seconds, 25 tokens each where none is silence;
    returns the oracle."""
    from transformers import (
        GlmAsrConfig,
        GlmAsrForConditionalGeneration,
        WhisperFeatureExtractor,
    )

    ids = save_tokenizer(folder, ("<|endoftext|>", "<|pad|>"))
    text = {
        "model_type": "llama", "vocab_size": 302, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 256, "eos_token_id": ids["<|endoftext|>"], "bos_token_id": None,
    }  # fmt: skip
    audio = {
        "model_type": "glmasr_encoder", "num_mel_bins": 16, "hidden_size": 48, "intermediate_size": 192,
        "num_hidden_layers": 2, "num_attention_heads": 3, "max_position_embeddings": SECONDS * 50,
    }  # fmt: skip
    torch.manual_seed(0)
    config = GlmAsrConfig(
        audio_config=audio,
        text_config=text,
        audio_token_id=ids["<|pad|>"],
        tie_word_embeddings=False,
    )
    model = GlmAsrForConditionalGeneration(config).eval()
    randomise(model)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=16, chunk_length=SECONDS).save_pretrained(folder)
    return model


def save_granite_speech(folder: Path) -> Any:
    """A decoder that takes recordings as published files of Granite Speech have it; returns the oracle."""
    from transformers import GraniteSpeechConfig, GraniteSpeechForConditionalGeneration

    ids = save_tokenizer(folder, ("<|endoftext|>", "<|audio|>"))
    text = {
        "model_type": "granite", "vocab_size": 302, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 256, "eos_token_id": ids["<|endoftext|>"], "bos_token_id": None,
        "embedding_multiplier": 3.0, "logits_scaling": 2.0,
    }  # fmt: skip
    encoder = {
        "input_dim": 32, "num_layers": 2, "hidden_dim": 24, "feedforward_mult": 2, "num_heads": 2,
        "output_dim": 9, "context_size": 20, "max_pos_emb": 25,
    }  # fmt: skip
    former = {
        "model_type": "blip_2_qformer", "hidden_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "intermediate_size": 24, "encoder_hidden_size": 24,
    }  # fmt: skip
    torch.manual_seed(0)
    config = GraniteSpeechConfig(
        encoder_config=encoder, projector_config=former, text_config=text,
        audio_token_index=ids["<|audio|>"], has_lora_adapter=False,
    )  # fmt: skip
    model = GraniteSpeechForConditionalGeneration(config).eval()
    randomise(model)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    settings = {"sampling_rate": RATE, "melspec_kwargs": {"n_mels": 16}}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return model


def save_qwen3_asr(folder: Path) -> None:
    """A model that writes down recordings of up to half of its context, in three languages whose names are
    tokens."""
    from transformers import Qwen3ASRConfig, Qwen3ASRForConditionalGeneration

    languages = (" German", " English", " French")
    special = (
        "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|audio_start|>", "<|audio_pad|>", "<|audio_end|>",
        "<asr_text>",
    )  # fmt: skip
    ids = save_tokenizer(folder, special, languages)
    text = {
        "model_type": "qwen3", "vocab_size": 312, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 256,
    }  # fmt: skip
    audio = {
        "model_type": "qwen3_asr_encoder", "num_mel_bins": 16, "d_model": 24, "encoder_layers": 2,
        "encoder_attention_heads": 2, "encoder_ffn_dim": 40, "downsample_hidden_size": 6, "output_dim": 64,
    }  # fmt: skip
    torch.manual_seed(0)
    config = Qwen3ASRConfig(
        audio_config=audio, text_config=text, audio_token_id=ids["<|audio_pad|>"],
        eos_token_id=ids["<|endoftext|>"], pad_token_id=ids["<|endoftext|>"],
    )  # fmt: skip
    model = Qwen3ASRForConditionalGeneration(config).eval()
    randomise(model)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    settings = {"feature_size": 16, "sampling_rate": RATE}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings), encoding="utf-8")


def wav(samples: np.ndarray) -> bytes:
    """A file of 16-bit samples."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(RATE)
        writer.writeframes((samples * 32767).astype("<i2").tobytes())
    return file.getvalue()
