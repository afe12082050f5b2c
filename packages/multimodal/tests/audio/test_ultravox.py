"""Ultravox's media processor: numbers and lengths as its authors published them, placeholders of text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import MediaItem
from headrace_multimodal.audio.ultravox import UltravoxProcessor

CONFIG = {"text_config": {"max_position_embeddings": 400}, "audio_config": {"num_mel_bins": 128}}


def item(count: int) -> MediaItem:
    samples = (0.1 * np.random.default_rng(count).standard_normal(count)).astype(np.float32)
    return MediaItem("audio", samples, "0" * 64, {"sample_rate": 16_000})


def tokenizer(folder: Path, special: str) -> dict[str, int]:
    tokenizers = pytest.importorskip("tokenizers")
    words = {letter: number for number, letter in enumerate("abc<|udio>")}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=words, merges=[]))
    made.decoder = tokenizers.decoders.Fuse()
    made.add_special_tokens([special])
    made.save(str(folder / "tokenizer.json"))
    return made.get_vocab()


@pytest.mark.parametrize(
    ("count", "tokens"), [(100, 1), (7_777, 4), (480_000, 188), (480_161, 189), (700_003, 274)]
)
def test_numbers_and_tokens(tmp_path: Path, count, tokens):
    """A spectrogram of the whole; each window of 30 s ends with a whole token."""
    transformers = pytest.importorskip("transformers")
    tokenizer(tmp_path, "<|audio|>")
    (made,) = UltravoxProcessor(CONFIG, tmp_path).process([item(count)], {})
    packed = made.inputs["input_features"]
    found = np.frombuffer(packed.data, packed.dtype).reshape(packed.shape)
    samples = np.pad(item(count).data, (0, max(0, 320 - count)))
    theirs = transformers.WhisperFeatureExtractor(feature_size=128)(
        samples, sampling_rate=16_000, padding="longest", pad_to_multiple_of=160, truncation=False,
        return_attention_mask=True, return_tensors="np",
    )  # fmt: skip
    np.testing.assert_allclose(found, theirs["input_features"][0].T, atol=2e-5, rtol=0)
    length = int(theirs["attention_mask"].sum())
    windows = [min(length - begin, 3000) for begin in range(0, length, 3000)]
    assert made.num_tokens == sum(-(-own // 16) for own in windows) == tokens


@pytest.mark.parametrize("special", ["<|audio|>", "<|reserved_special_token_0|>"])
def test_placeholders(tmp_path: Path, special: str):
    """A token, or the text of one that the vocabulary does not have."""
    words = tokenizer(tmp_path, special)
    processor = UltravoxProcessor(CONFIG, tmp_path)
    assert processor.placeholder("audio", 0) == "<|audio|>"
    written = [words["<|audio|>"]] if special in ("<|audio|>",) else [words[c] for c in "<|audio|>"]
    media = processor.process([item(16_000), item(4_800)], {})
    placed = processor.place([words["b"], *written, words["c"], *written], media)
    mark = words[special]
    assert placed.token_ids == [words["b"], *[mark] * 7, words["c"], *[mark] * 2]
    assert processor.place([words["b"], words["c"]], []).token_ids == [words["b"], words["c"]]
    assert processor.embedded("audio", 5, {}).num_tokens == 5
    assert processor.largest("audio", {}).num_tokens == 188


def test_refusals(tmp_path: Path):
    tokenizer(tmp_path, "<|audio|>")
    processor = UltravoxProcessor(CONFIG, tmp_path)
    with pytest.raises(RequestError, match=r"65\.00 s: takes 408 tokens, .* context has 400"):
        processor.process([item(65 * 16_000)], {})
    with pytest.raises(RequestError, match="'truncation': Ultravox's processor has no options"):
        processor.process([item(9000)], {"truncation": True})
    with pytest.raises(RequestError, match="at most 400"):
        processor.embedded("audio", 401, {})
    tokenizer(tmp_path, "<|other|>")
    with pytest.raises(UnsupportedModel, match="reserved_special_token_0"):
        UltravoxProcessor(CONFIG, tmp_path)
