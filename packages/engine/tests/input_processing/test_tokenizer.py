"""Tokenizers read from folders."""

from __future__ import annotations

import functools
import json
import threading
from pathlib import Path

import pytest
from make_tokenizers import folder, write

from headrace_core.errors import ModelError
from headrace_core.text import Tokenizer
from headrace_engine.input_processing.tokenizer import (
    ByteLevelRule,
    ByteTokenizer,
    HFTokenizer,
    MetaspaceRule,
    byte_rule,
    load_tokenizer,
)
from headrace_testing.engine.tokenizers import TokenizerConformance


@functools.cache
def cached(kind: str) -> Tokenizer:
    return load_tokenizer(folder(kind))


class TestByteLevel(TokenizerConformance):
    @pytest.fixture
    def tokenizer(self) -> Tokenizer:
        return cached("byte-level")


class TestLlama(TokenizerConformance):
    space_mark = "▁"

    @pytest.fixture
    def tokenizer(self) -> Tokenizer:
        return cached("llama")

    def test_special_tokens(self, tokenizer: Tokenizer) -> None:
        # This family puts a space token before any text, special or not.
        assert tokenizer.encode("</s>", add_special_tokens=False)[-1] == tokenizer.eos_token_id
        assert tokenizer.bos_token_id in tokenizer.special_token_ids


class TestGemma(TokenizerConformance):
    space_mark = "▁"

    @pytest.fixture
    def tokenizer(self) -> Tokenizer:
        return cached("gemma")


@pytest.mark.parametrize("pair", [False, True])
def test_others_run_while_a_long_text_is_tokenized(pair: bool) -> None:
    """The event loop, or the thread that runs the model, is not kept waiting for the interpreter."""
    tokenizer, begun, done = cached("byte-level"), threading.Event(), threading.Event()
    text = "plain words and 12 numbers, " * 40_000

    def tokenize() -> None:
        begun.set()
        tokenizer.encode_pair(text, "b") if pair else tokenizer.encode(text)
        done.set()

    thread = threading.Thread(target=tokenize)
    turns = 0
    thread.start()
    begun.wait()
    while not done.wait(0.001):
        turns += 1
    thread.join()
    assert turns > 8, "it holds the lock: then there are two or three"


class TestMetaspace(TokenizerConformance):
    lossless = False

    @pytest.fixture
    def tokenizer(self) -> Tokenizer:
        return cached("metaspace")


class TestWord(TokenizerConformance):
    lossless = False

    @pytest.fixture
    def tokenizer(self) -> Tokenizer:
        return cached("word")

    def test_parts_of_characters_become_replacement_characters(self, tokenizer: Tokenizer) -> None:
        pytest.skip("words are not made of bytes")


def test_special_tokens_in_text_become_their_ids() -> None:
    tokenizer = load_tokenizer(folder("byte-level"))
    ids = tokenizer.encode("a<|im_end|>b", add_special_tokens=False)
    assert tokenizer.encode("<|im_end|>", add_special_tokens=False)[0] in ids
    assert tokenizer.decode(ids) == "a<|im_end|>b"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab"
    spaced = tokenizer.encode("x<tool call>y", add_special_tokens=False)
    assert tokenizer.decode(spaced, skip_special_tokens=True) == "x<tool call>y"


def test_beginning_of_sequence_is_added_on_request() -> None:
    tokenizer = load_tokenizer(folder("llama"))
    assert tokenizer.encode("x")[0] == tokenizer.bos_token_id
    assert tokenizer.encode("x", add_special_tokens=False)[0] != tokenizer.bos_token_id
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_templates(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder("byte-level"))
    assert "im_start" in (tokenizer.chat_template or "")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (tmp_path / name).write_bytes((folder("byte-level") / name).read_bytes())
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    found = load_tokenizer(tmp_path)
    assert isinstance(found, HFTokenizer)
    assert (found.chat_template, found.chat_templates["tool_use"]) == ("D", "T")
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert load_tokenizer(tmp_path).chat_template == "from the file"


def test_added_tokens_of_the_config(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_file(str(folder("byte-level") / "tokenizer.json"))
    size = backend.get_vocab_size()
    entry = {"content": "<|extra|>", "special": True, "normalized": False}
    write(tmp_path, backend, added_tokens_decoder={str(size): entry})
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == size + 1
    assert tokenizer.encode("<|extra|>", add_special_tokens=False) == [size]
    assert size in tokenizer.special_token_ids


@pytest.mark.parametrize(
    ("config", "begins", "ends"),
    [
        ({}, True, False),
        ({"add_bos_token": False}, False, False),
        ({"add_bos_token": True, "add_eos_token": True}, True, True),
        ({"add_eos_token": True}, False, True),
        ({"add_bos_token": None}, True, False),
    ],
)
def test_begin_and_end_tokens_by_the_config(
    tmp_path: Path, config: dict[str, object], begins: bool, ends: bool
) -> None:
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_file(str(folder("byte-level") / "tokenizer.json"))
    write(tmp_path, backend, **config)
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("hello")
    assert (ids[0] == tokenizer.bos_token_id) is begins
    assert (ids[-1] == tokenizer.eos_token_id) is ends
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello"


def test_truncation_in_the_file_is_ignored(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_file(str(folder("byte-level") / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=50)
    write(tmp_path, backend)
    assert len(load_tokenizer(tmp_path).encode("x y z " * 20, add_special_tokens=False)) > 50


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("nothing", "", "tokenizer.json"),
        ("tokenizer.model", "binary", "save_pretrained"),
        ("tokenizer.json", "{", "JSON"),
        ("tokenizer.json", "[]", "object"),
        ("tokenizer.json", '{"model": {"type": "Nonsense"}}', "not a tokenizer"),
    ],
)
def test_unreadable_folders(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match=message):
        load_tokenizer(tmp_path)


def test_rules() -> None:
    assert isinstance(load_tokenizer(folder("gemma")), ByteTokenizer)
    assert isinstance(byte_rule({"type": "ByteLevel"}), ByteLevelRule)
    assert isinstance(byte_rule({"type": "Metaspace", "replacement": "▁"}), MetaspaceRule)
    assert byte_rule({"type": "WordPiece", "prefix": "##", "cleanup": True}) is None
    assert byte_rule(None) is None
    odd = {"type": "Replace", "pattern": {"String": "x"}, "content": " "}
    assert byte_rule({"type": "Sequence", "decoders": [odd]}) is None
