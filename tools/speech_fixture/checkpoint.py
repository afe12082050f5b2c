"""The model's shape, its tokens, and a folder that holds it as Whisper's checkpoints do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import soundfile
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from speech_fixture.voices import RATE, SECONDS, WORDS, Utterance

SPECIAL = (
    "<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|translate|>", "<|transcribe|>",
    "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>",
)  # fmt: skip
NUM_BINS = 40
LAYERS, HEADS, HIDDEN = 2, 4, 96


def make_tokenizer() -> Tokenizer:
    """A token for each word with the space before it, and the bytes for everything else."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary, merges = {c: i for i, c in enumerate(alphabet)}, list[tuple[str, str]]()
    for word in WORDS:
        grown = "Ġ"
        for letter in word:
            pair = (grown, letter)
            grown += letter
            if grown not in vocabulary:
                merges.append(pair)
                vocabulary[grown] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def make_model(tokenizer: Tokenizer) -> WhisperForConditionalGeneration:
    """Untrained."""
    ids = {name: tokenizer.token_to_id(name) for name in SPECIAL}
    end, start = ids["<|endoftext|>"], ids["<|startoftranscript|>"]
    config = WhisperConfig(
        vocab_size=tokenizer.get_vocab_size() + 50 * SECONDS + 1,
        num_mel_bins=NUM_BINS, d_model=HIDDEN, encoder_layers=LAYERS, decoder_layers=LAYERS,
        encoder_attention_heads=HEADS, decoder_attention_heads=HEADS, encoder_ffn_dim=4 * HIDDEN,
        decoder_ffn_dim=4 * HIDDEN, max_source_positions=50 * SECONDS, max_target_positions=64,
        decoder_start_token_id=start, eos_token_id=end, pad_token_id=end, bos_token_id=end,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        decoder_start_token_id=start, eos_token_id=end, pad_token_id=end, bos_token_id=end,
        no_timestamps_token_id=ids["<|notimestamps|>"], is_multilingual=True,
        lang_to_id={"<|en|>": ids["<|en|>"]},
        task_to_id={"transcribe": ids["<|transcribe|>"], "translate": ids["<|translate|>"]},
        alignment_heads=[[LAYERS - 1, head] for head in range(HEADS)],
        max_initial_timestamp_index=50, prev_sot_token_id=ids["<|startofprev|>"],
    )  # fmt: skip
    return model


def make_extractor() -> WhisperFeatureExtractor:
    """Of its spectrograms."""
    return WhisperFeatureExtractor(feature_size=NUM_BINS, chunk_length=SECONDS)


def save(
    model: WhisperForConditionalGeneration, folder: Path, examples: Sequence[Utterance]
) -> None:
    """Write the checkpoint, in half precision to keep it small, and spoken clips with their texts."""
    folder.mkdir(parents=True, exist_ok=True)
    model.half().save_pretrained(folder)
    model.float()
    make_tokenizer().save(str(folder / "tokenizer.json"))
    make_extractor().save_pretrained(folder)
    texts = {}
    for number, example in enumerate(examples):
        texts[f"{number}.flac"] = example.text
        soundfile.write(folder / f"{number}.flac", example.samples, RATE)
    (folder / "spoken.json").write_text(json.dumps(texts, indent=2), encoding="utf-8")
