"""Texts that cannot fit are refused untokenized; the bound is right for every kind of tokenizer."""

from __future__ import annotations

import json
import string
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_fakes import CharTokenizer, served_model
from hypothesis import example, given, settings
from hypothesis import strategies as st
from make_tokenizers import folder, write
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from headrace_core.errors import PromptTooLong
from headrace_core.sampling.params import SamplingParams
from headrace_core.text import Tokenizer
from headrace_engine import freed_memory
from headrace_engine.input_processing import text_limits
from headrace_engine.input_processing.fewest_tokens import TextMeasure
from headrace_engine.input_processing.input_processor import InputProcessor
from headrace_engine.input_processing.tokenizer import ByteTokenizer, load_tokenizer

pytestmark = pytest.mark.req("SEC-13")


def _read(kind: str) -> Backend:
    return Backend.from_file(str(folder(kind) / "tokenizer.json"))


def _changed(kind: str, change: Callable[[Backend], Any]) -> Callable[[Path], Tokenizer]:
    def make(path: Path) -> Tokenizer:
        backend = _read(kind)
        change(backend)
        write(path, backend)
        return load_tokenizer(path)

    return make


def _normalized(kind: str, *steps: Any) -> Callable[[Path], Tokenizer]:
    def change(backend: Backend) -> None:
        own = [] if backend.normalizer is None else [backend.normalizer]
        backend.normalizer = normalizers.Sequence([*steps, *own])

    return _changed(kind, change)


def _split(kind: str, *steps: Any) -> Callable[[Path], Tokenizer]:
    def change(backend: Backend) -> None:
        backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, backend.pre_tokenizer])

    return _changed(kind, change)


def _stripping(backend: Backend) -> None:
    backend.add_tokens([AddedToken("<mask>", lstrip=True, rstrip=True)])
    backend.add_tokens([AddedToken("<long word that is one token>", normalized=True)])


BOUNDED: dict[str, Callable[[Path], Tokenizer]] = {
    "bytes": _changed("byte-level", lambda backend: None),
    "nfc": _normalized("byte-level", normalizers.NFC()),
    "nfkc, lower case": _normalized("byte-level", normalizers.NFKC(), normalizers.Lowercase()),
    "nfd, then nfc": _normalized("byte-level", normalizers.NFD(), normalizers.NFC()),
    "quotes": _normalized("byte-level", normalizers.Replace("``", '"')),
    "stripping": _changed("byte-level", _stripping),
    "stripping, nfkc": _changed(
        "byte-level", lambda b: (setattr(b, "normalizer", normalizers.NFKC()), _stripping(b))
    ),
    "split": _split(
        "byte-level", pre_tokenizers.Split(Regex(r"\s+|\w+"), "isolated"), pre_tokenizers.Digits()
    ),
    "llama": _changed("llama", lambda backend: None),
    "gemma": _changed("gemma", lambda backend: None),
    "llama, nfkc": _normalized("llama", normalizers.NFKC()),
}
UNBOUNDED: dict[str, Callable[[Path], Tokenizer]] = {
    "words": _changed("word", lambda backend: None),
    "no bytes": _changed("metaspace", lambda backend: None),
    "strip": _normalized("byte-level", normalizers.Strip()),
    "accents": _normalized("byte-level", normalizers.NFD(), normalizers.StripAccents()),
    "spaces": _normalized("byte-level", normalizers.Replace(Regex(r"\s+"), " ")),
    "deleted": _normalized("byte-level", normalizers.Replace("x", "")),
    "to a mark": _normalized("byte-level", normalizers.Replace("x", "\u0301"), normalizers.NFC()),
    "bert": _normalized("byte-level", normalizers.BertNormalizer()),
    "nmt": _normalized("byte-level", normalizers.Nmt()),
    "removed": _split("byte-level", pre_tokenizers.Split(Regex(r"\s+"), "removed")),
    "white space": _split("byte-level", pre_tokenizers.Whitespace()),
    "delimiter": _split("byte-level", pre_tokenizers.CharDelimiterSplit("x")),
}
_MADE: dict[str, Tokenizer] = {}
_CHARACTERS = st.one_of(
    st.sampled_from(string.printable),
    st.sampled_from("eoa\u0301\u0308\u0304\u0345 \u3000\xa0ﬁ①ｅ𝐞ᾧ한ㅎㅏ你😀▁Ġ"),
    st.characters(exclude_categories=("Cs",)),
)
TEXTS = st.lists(
    st.one_of(
        st.text(_CHARACTERS, max_size=30),
        st.sampled_from(
            ("<mask>", "<long word that is one token>", "<|im_end|>", "``", "    " * 9)
        ),
    ),
    max_size=12,
).map("".join)


@pytest.fixture(scope="module", params=sorted(BOUNDED))
def bounded(request: Any, tmp_path_factory: Any) -> ByteTokenizer:
    made = BOUNDED[request.param](tmp_path_factory.mktemp("tokenizer"))
    assert isinstance(made, ByteTokenizer)
    return made


@given(text=TEXTS)
@example(unicodedata.normalize("NFD", "ᾧ한글ǟḕ") * 20)
@example("e\u0301o\u0308" * 50 + "ABC" * 50)
@example("x" + " \u3000\t" * 40 + "<mask>" + "\xa0 \n" * 40)
@example("the quick brown fox " * 20)
@settings(max_examples=150, deadline=None)
def test_no_text_becomes_fewer_tokens(bounded: ByteTokenizer, text: str) -> None:
    fewest = bounded.fewest_tokens(text)
    assert fewest is not None
    assert 0 <= fewest <= len(bounded.encode(text, add_special_tokens=False))


def test_the_bound_says_something(bounded: ByteTokenizer) -> None:
    text = "the quick brown fox jumps over 12 lazy dogs, " * 100
    fewest = bounded.fewest_tokens(text)
    assert fewest is not None
    assert fewest >= len(text) / 130, "the longest token of any of these has 28 bytes"


@pytest.mark.parametrize("kind", sorted(UNBOUNDED))
def test_what_loses_text_has_no_bound(kind: str, tmp_path: Path) -> None:
    tokenizer = UNBOUNDED[kind](tmp_path)
    assert not isinstance(tokenizer, ByteTokenizer) or tokenizer.fewest_tokens("a" * 100) is None


def test_an_incomplete_alphabet_has_no_bound(tmp_path: Path) -> None:
    """A byte without a token is dropped."""
    spec = json.loads((folder("byte-level") / "tokenizer.json").read_text())
    del spec["model"]["vocab"]["Z"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, ByteTokenizer)
    assert tokenizer.encode("ZZZ", add_special_tokens=False) == []
    assert tokenizer.fewest_tokens("ZZZ") is None


def test_other_models_have_no_bound(tmp_path: Path) -> None:
    backend = Backend(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = _read("byte-level").decoder
    write(tmp_path, backend)
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, ByteTokenizer)
    assert len(tokenizer.encode("x" * 500)) == 1
    assert tokenizer.fewest_tokens("x" * 500) is None


def test_a_long_text_is_counted_in_slices() -> None:
    """At their borders nothing is counted twice, nor forgotten."""
    measure = TextMeasure([b"ab", b"abcd", b" " * 64], composes=True)
    assert measure.fewest("ab" * 500_000) == 250_000
    assert measure.fewest("ab" * 131_071 + "ae\u0301b") in range(65_536, 65_540)
    assert TextMeasure([b"a", b" " * 100]).fewest(" " * 1000 + "a" * 10) == 20


def _input_processor(tokenizer: Any, **model: Any) -> InputProcessor:
    return InputProcessor(tokenizer, served_model(vocab_size=tokenizer.vocab_size, **model))


class Unread(CharTokenizer):
    """Must not be asked to tokenize anything; a token is a character, or ``shrink`` of them."""

    def __init__(self, shrink: int | None) -> None:
        super().__init__()
        self._shrink = shrink

    def fewest_tokens(self, text: str) -> int | None:
        return None if self._shrink is None else len(text) // self._shrink

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        raise AssertionError("tokenized")


LONG = "x" * (text_limits.MOST_CHARACTERS + 1)


@pytest.mark.parametrize("shrink", [8, None])
@pytest.mark.parametrize("cut", [None, 5, -1])
def test_long_prompts_are_refused_unread(shrink: int | None, cut: int | None) -> None:
    input_processor = _input_processor(Unread(shrink), max_model_len=64)
    params = SamplingParams(truncate_prompt_tokens=cut)
    for prompt in (LONG, {"prompt": LONG}):
        with pytest.raises(PromptTooLong, match="maximum context length is 64 tokens") as caught:
            input_processor.prepare(prompt, params, "r")
        assert caught.value.param == "prompt"
    with pytest.raises(PromptTooLong, match="1048577 characters"):
        input_processor.tokenize(LONG)


def test_what_may_fit_is_read() -> None:
    input_processor = _input_processor(Unread(8), max_model_len=len(LONG) // 8)
    with pytest.raises(AssertionError, match="tokenized"):
        input_processor.tokenize(LONG)
    with pytest.raises(AssertionError, match="tokenized"):
        input_processor.prepare(LONG, SamplingParams(), "r")
    input_processor.limit_context(64)
    with pytest.raises(PromptTooLong, match="length is 64 tokens"):
        input_processor.prepare(LONG, SamplingParams(), "r")


def test_what_is_cut_is_read_up_to_a_limit() -> None:
    input_processor = _input_processor(Unread(8), max_model_len=64)
    with pytest.raises(AssertionError, match="tokenized"):
        input_processor.tokenize(LONG[1:])
    with pytest.raises(AssertionError, match="tokenized"):
        input_processor.prepare(LONG[1:], SamplingParams(truncate_prompt_tokens=5), "r")
    with pytest.raises(PromptTooLong):
        input_processor.prepare(LONG[1:], SamplingParams(), "r")
    with pytest.raises(AssertionError, match="tokenized"):
        input_processor.prepare("x" * text_limits.UNMEASURED, SamplingParams(), "r")


def test_memory_is_given_back_after_long_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(freed_memory, "trim", lambda: calls.append(1))
    tokenizer = load_tokenizer(folder("byte-level"))
    input_processor = _input_processor(tokenizer, max_model_len=64)
    input_processor.tokenize("a" * freed_memory.LARGE)
    assert not calls
    input_processor.tokenize("a" * (freed_memory.LARGE + 1))
    assert calls == [1]
