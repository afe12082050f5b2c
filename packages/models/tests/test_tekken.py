"""Mistral's ``tekken.json`` against a merging of bytes that follows the format's description."""

from __future__ import annotations

import base64
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from headrace_core.errors import ModelError
from headrace_models.formats.tekken import tekken_tokenizer

PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SENTENCES = [
    "The quick brown fox jumps over the lazy dog, 1234 times.   aaaa aaaaaa aaaaaaaaa",
    "def run(self, count: int) -> None:\n\treturn  self.count + 17\n\n        pass",
    "数字 12345 和文字 ١٢٣ здравствуй мир: Wasser läuft den Berg hinab",
] * 5
CONTROLS = 30


def pieces_of(text: str) -> list[str]:
    cut = pre_tokenizers.Split(tokenizers.Regex(PATTERN), "isolated")
    return [piece for piece, _ in cut.pre_tokenize_str(text)]


def merged(ranks: dict[bytes, int], piece: bytes) -> list[int]:
    """The lowest rank first, of equals the leftmost."""
    if piece in ranks:
        return [ranks[piece]]
    parts = [piece[i : i + 1] for i in range(len(piece))]
    while True:
        pairs = [
            (ranks[a + b], i)
            for i, (a, b) in enumerate(itertools.pairwise(parts))
            if a + b in ranks
        ]
        if not pairs:
            return [ranks[part] for part in parts]
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    """256 bytes, and what training merges."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(SENTENCES, trainer)
    found = {bytes([byte]): byte for byte in range(256)}
    merges = json.loads(trained.to_str())["model"]["merges"]
    for left, right in merges:
        found.setdefault(_bytes(left + right), len(found))
    return found


def _bytes(spelling: str) -> bytes:
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = [byte for byte in range(256) if byte not in shown]
    return bytes(rest[ord(c) - 0x100] if ord(c) >= 0x100 else ord(c) for c in spelling)


def write(path: Path, ranks: dict[bytes, int], **changes: Any) -> Path:
    content = {
        "config": {
            "pattern": PATTERN, "version": "v7", "num_vocab_tokens": len(ranks) + 7,
            "default_vocab_size": CONTROLS + len(ranks), "default_num_special_tokens": CONTROLS,
        },
        # More tokens than the model has, as published files hold.
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for token, rank in {**ranks, b"zzzz": len(ranks)}.items()
        ],
        "special_tokens": None,
        **changes,
    }  # fmt: skip
    (path / "tekken.json").write_text(json.dumps(content))
    return path / "tekken.json"


@pytest.fixture(scope="module")
def tekken(ranks: dict[bytes, int], tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    file = write(tmp_path_factory.mktemp("tekken"), ranks)
    return Tokenizer.from_str(tekken_tokenizer(file).tokenizer)


@settings(max_examples=150, deadline=None)
@given(
    text=st.one_of(
        st.sampled_from(SENTENCES), st.text(max_size=40), st.text("aef \n1", max_size=30)
    )
)
def test_text_becomes_the_ids_that_the_format_says(
    ranks: dict[bytes, int], tekken: Tokenizer, text: str
) -> None:
    assume(not any(token.content in text for token in tekken.get_added_tokens_decoder().values()))
    expected = [i + CONTROLS for piece in pieces_of(text) for i in merged(ranks, piece.encode())]
    ids = tekken.encode(text, add_special_tokens=False).ids
    assert ids == expected
    assert tekken.decode(ids, skip_special_tokens=False) == text


def test_control_tokens(ranks: dict[bytes, int], tekken: Tokenizer, tmp_path: Path) -> None:
    """By the file's list, by that of older versions, and filled up."""
    ids = tekken.encode("[INST]a[/INST]<SPECIAL_29>", add_special_tokens=False).ids
    assert ids == [3, CONTROLS + ord("a"), 4, 29]
    listed = [{"rank": 1, "token_str": "<s>", "is_control": True},
              {"rank": 4, "token_str": "[THINK]", "is_control": True}]  # fmt: skip
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    found = tekken_tokenizer(write(tmp_path, ranks, special_tokens=listed))
    other = Tokenizer.from_str(found.tokenizer)
    assert other.encode("[THINK]<SPECIAL_3>", add_special_tokens=False).ids == [4, 3]
    assert found.config == {
        "bos_token": "<s>", "add_bos_token": True, "add_eos_token": False,
        "chat_template": "{{ messages }}",
    }  # fmt: skip


def _config(**changes: Any) -> dict[str, Any]:
    config = {"pattern": "a", "default_vocab_size": 400, "default_num_special_tokens": 30}
    return {"config": {**config, "version": "v3", **changes}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"config": None}, "'config' has no 'pattern'"),
        (_config(default_vocab_size=-1), "default_vocab_size = -1: must be from 0"),
        (_config(default_num_special_tokens=2), "more special tokens than"),
        (_config(version="v13"), "version 'v13' without 'special_tokens'"),
        (_config(default_vocab_size=4000), "ranks from 0 to 3969, once each"),
        ({"vocab": [{"rank": 0, "token_bytes": "?"}]}, "rank 0: token_bytes is not base64"),
        ({"vocab": [{"rank": 0, "token_bytes": ""}]}, "rank 0: 0 bytes: must be from 1 to 1024"),
        ({"vocab": [{"rank": 0, "token_bytes": "A" * 4000}]}, "rank 0: 3000 bytes"),
        ({"vocab": [{"rank": "0"}]}, "must have a 'rank' and 'token_bytes'"),
        ({"vocab": 3}, "no list of up to"),
        ({"special_tokens": [{"rank": i, "token_str": "a"} for i in (0, 1)]}, "of one spelling"),
        ({"special_tokens": [{"rank": 0, "token_str": i} for i in "ab"]}, "of one rank"),
    ],
)
def test_damaged_files_are_named(
    ranks: dict[bytes, int], tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    file = write(tmp_path, ranks, **changes)
    with pytest.raises(ModelError, match=words) as caught:
        tekken_tokenizer(file)
    assert str(file) in str(caught.value)


def test_a_template_that_is_no_text(ranks: dict[bytes, int], tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"chat_template\.jinja: cannot be read"):
        tekken_tokenizer(write(tmp_path, ranks))


def test_what_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text("{")
    with pytest.raises(ModelError, match=r"tekken\.json: cannot be read as JSON"):
        tekken_tokenizer(tmp_path / "tekken.json")
