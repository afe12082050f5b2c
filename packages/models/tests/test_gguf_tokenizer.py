"""Tokenizers in GGUF metadata against the ones they were made of."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from headrace_core.errors import ModelError
from headrace_models.formats.gguf.tokenizer import CUTTINGS, gguf_tokenizer

SENTENCES = [
    "The quick brown fox jumps over the lazy dog, 1234 times.",
    "Wasser läuft den Berg hinab; it's what we've known since 1999!",
    "def run(self, count: int) -> None:\n\treturn  self.count + 17\n\n",
    "数字 12345 和文字 ١٢٣ здравствуй мир",
] * 5
FILE = Path("some.gguf")


@pytest.fixture(scope="module")
def pieces() -> Any:
    """A sentencepiece model of the kind that Llama 2 has."""
    spm = pytest.importorskip("sentencepiece")
    written = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES), model_writer=written, model_type="bpe", vocab_size=420,
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        split_digits=True, character_coverage=0.98, minloglevel=2, user_defined_symbols=["<|go|>"],
    )  # fmt: skip
    return spm.SentencePieceProcessor(model_proto=written.getvalue())


def of_sentencepiece(pieces: Any, **changes: Any) -> dict[str, Any]:
    def kind(index: int) -> int:
        if pieces.is_unknown(index):
            return 2
        if pieces.is_control(index):
            return 3
        return 6 if pieces.is_byte(index) else 4 if pieces.id_to_piece(index) == "<|go|>" else 1

    count = range(pieces.get_piece_size())
    found = {
        "model": "llama",
        "tokens": [pieces.id_to_piece(index) for index in count],
        "scores": [pieces.get_score(index) for index in count],
        "token_type": [kind(index) for index in count],
        "bos_token_id": pieces.bos_id(),
        "eos_token_id": pieces.eos_id(),
        "unknown_token_id": pieces.unk_id(),
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()}


def opened(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(gguf_tokenizer(FILE, metadata).tokenizer)


@settings(max_examples=150, deadline=None)
@given(text=st.one_of(st.sampled_from(SENTENCES), st.text(max_size=40)))
def test_pieces_by_score(pieces: Any, text: str) -> None:
    if "\x00" in text or "▁" in text or "<" in text:  # sentencepiece itself treats these apart
        return
    ours = opened(of_sentencepiece(pieces))
    expected = pieces.encode(text)
    assert ours.encode(text, add_special_tokens=False).ids == expected
    if expected:
        assert ours.decode(expected, skip_special_tokens=False) == pieces.decode(expected)


def test_tokens_of_the_user_and_begin(pieces: Any) -> None:
    found = gguf_tokenizer(FILE, of_sentencepiece(pieces))
    assert found.config["bos_token"] == "<s>"
    assert found.config["add_bos_token"] is True
    assert found.config["add_eos_token"] is False
    tokenizer = Tokenizer.from_str(found.tokenizer)
    added = {
        token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()
    }
    assert added == {"<unk>": True, "<s>": True, "</s>": True, "<|go|>": False}
    assert tokenizer.encode("the<|go|>", add_special_tokens=False).tokens[-1] == "<|go|>"


def test_without_a_space_before(pieces: Any) -> None:
    ours = opened(of_sentencepiece(pieces, add_space_prefix=False))
    assert not ours.encode("dog", add_special_tokens=False).tokens[0].startswith("▁")
    assert ours.decode(ours.encode(" dog", add_special_tokens=False).ids) == " dog"


def trained(pattern: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pattern
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def of_bytes(tokenizer: Tokenizer, name: str, **changes: Any) -> dict[str, Any]:
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    found = {
        "model": "gpt2", "pre": name, "tokens": tokens, "merges": merges,
        "token_type": [3 if token == "<|end|>" else 1 for token in tokens],
        "eos_token_id": tokens.index("<|end|>"), **changes,
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()}


@settings(max_examples=100, deadline=None)
@given(text=st.one_of(st.sampled_from(SENTENCES), st.text(max_size=40)))
def test_bytes_cut_as_gpt2_does(text: str) -> None:
    if "<" in text:
        return
    assert GPT2_FOUND.encode(text).ids == GPT2.encode(text).ids
    assert GPT2_FOUND.decode(GPT2.encode(text).ids) == GPT2.decode(GPT2.encode(text).ids)


GPT2 = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
GPT2_FOUND = opened(of_bytes(GPT2, "gpt-2"))


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["it", "'s", " 12345", " \u00e4"]),
        ("llama-bpe", ["it", "'s", " ", "123", "45", " \u00e4"]),
        ("qwen2", ["it", "'s", " ", "1", "2", "3", "4", "5", " \u00e4"]),
        ("smollm", ["it", "'s", " ", "1", "2", "3", "4", "5", " \u00e4"]),
        ("gpt-4o", ["it's", " ", "123", "45", " \u00e4"]),
    ],
)
def test_cuttings(pre: str, pieces: list[str]) -> None:
    ours = opened(of_bytes(GPT2, pre))
    text = "it's 12345 \u00e4"
    assert [
        text[start:end] for _, (start, end) in ours.pre_tokenizer.pre_tokenize_str(text)
    ] == pieces


def test_patterns_are_those_of_the_published_tokenizers() -> None:
    import inspect

    from transformers.convert_slow_tokenizer import TikTokenConverter
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    llama3 = inspect.signature(TikTokenConverter).parameters["pattern"].default
    assert CUTTINGS["llama-bpe"].pattern == llama3
    assert CUTTINGS["qwen2"].pattern == PRETOKENIZE_REGEX


def test_composed_letters() -> None:
    ours = opened(of_bytes(GPT2, "qwen2"))
    assert ours.encode("a\u0308").ids == ours.encode("\u00e4").ids


def test_chat_templates(pieces: Any) -> None:
    metadata = {**of_sentencepiece(pieces), "tokenizer.chat_template": "{{ a }}",
                "tokenizer.chat_template.tool_use": "{{ b }}"}  # fmt: skip
    found = gguf_tokenizer(FILE, metadata).config["chat_template"]
    assert found == {"default": "{{ a }}", "tool_use": "{{ b }}"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "bert"}, "'bert': must be gpt2 or llama"),
        ({"pre": "unheard-of"}, "'unheard-of': known are gpt-2"),
        ({"tokens": []}, "has 0 entries"),
        ({"tokens": [1, 2]}, "not a list of texts"),
        ({"tokens": ["a", "b" * 5000]}, "an entry of 5000 characters"),
        ({"token_type": [1]}, "not a list of 400 numbers"),
        ({"merges": ["nospace"]}, "makes no piece"),
        ({"merges": ["zzq zzq"]}, "makes no piece"),
    ],
)
def test_refusals(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=f"{words}.*--tokenizer"):
        gguf_tokenizer(FILE, of_bytes(GPT2, "gpt-2", **changes))
