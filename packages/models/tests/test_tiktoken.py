"""Kimi's ``tiktoken.model`` against a merging of bytes that follows the format's description."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tekken import SENTENCES, merged
from test_tekken import ranks as ranks  # a fixture
from tokenizers import Tokenizer

from headrace_core.errors import ModelError
from headrace_models.formats.tiktoken import tiktoken_tokenizer

LETTERS = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
PARTS = (
    r"[\p{Han}]+", rf"[^\r\n\p{{L}}\p{{N}}]?[{LETTERS}]*[\p{{Ll}}\p{{M}}&&[^\p{{Han}}]]+(?i:'s|'t)?",
    rf"[{LETTERS}]+", r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
)  # fmt: skip
CODE = f'import not_there\n\n\nclass Own(Base):\n    pat_str = "|".join([{", ".join(map(repr, PARTS))}])\n'
ADDED = {"[BOS]": True, "<|media_pad|>": True, "<think>": False}


def write(path: Path, ranks: dict[bytes, int], **changes: Any) -> Path:
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    added = {
        str(len(ranks) + 2 * i): {"content": text, "special": special}
        for i, (text, special) in enumerate(ADDED.items())
    }
    config = {
        "added_tokens_decoder": added, "bos_token": "[BOS]",
        "auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}, **changes.get("config", {}),
    }  # fmt: skip
    (path / "tiktoken.model").write_text(changes.get("lines", "".join(lines)))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "tokenization_own.py").write_text(changes.get("code", CODE))
    return path / "tiktoken.model"


@pytest.fixture(scope="module")
def own(ranks: dict[bytes, int], tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = write(tmp_path_factory.mktemp("tiktoken"), ranks)
    return Tokenizer.from_str(tiktoken_tokenizer(path).tokenizer)


@settings(deadline=None, max_examples=60)
@given(
    st.one_of(
        st.text(max_size=60), st.sampled_from(SENTENCES), st.text("aE's 数字١9\n\r", max_size=40)
    )
)
def test_text_becomes_the_ids_that_the_format_says(
    own: Tokenizer, ranks: dict[bytes, int], text: str
) -> None:
    pieces = regex.findall("(?V1)" + "|".join(PARTS), text)
    assert "".join(pieces) == text
    expected = [rank for piece in pieces for rank in merged(ranks, piece.encode())]
    assert own.encode(text).ids == expected
    assert own.decode(expected) == text


def test_further_tokens_have_the_ids_that_the_config_says(
    own: Tokenizer, ranks: dict[bytes, int]
) -> None:
    first = len(ranks)
    assert own.encode("a<|media_pad|><think>").ids == [ranks[b"a"], first + 2, first + 4]
    assert own.decode([first, ranks[b"a"], first + 4], skip_special_tokens=True) == "a<think>"


@pytest.mark.parametrize(
    "code",
    [
        'PAT = 1\npat_str = r"\\w+|\\W+"',
        "class Own:\n    def __init__(self):\n        self.pat_str = '\\\\w+|\\\\W+'",
        "class Own:\n    pat_str = '|'.join(('\\\\w+', '\\\\W+'))",
    ],
)
def test_the_pattern_is_read_wherever_it_is_assigned(
    ranks: dict[bytes, int], tmp_path: Path, code: str
) -> None:
    found = tiktoken_tokenizer(write(tmp_path, ranks, code=code))
    cut = json.loads(found.tokenizer)["pre_tokenizer"]["pretokenizers"][0]
    assert cut["pattern"] == {"Regex": r"\w+|\W+"}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"lines": "YQ== 0\n"}, r"tiktoken.model: 255 single bytes are not tokens"),
        ({"lines": "YQ== 0\n! 1\n"}, "tiktoken.model: line 2: '! 1': must be a token in base64"),
        ({"lines": "YQ== 1\n"}, "must have the ranks from 0 to 0"),
        ({"code": "pat_str = compute()"}, "tokenization_own.py: assigns no constant text to 'pat_str'"),
        ({"code": "def"}, "tokenization_own.py: cannot be read as Python"),
        ({"config": {"auto_map": {}}}, r"auto_map.AutoTokenizer: must name the class"),
        ({"config": {"auto_map": {"AutoTokenizer": "../secret.X"}}}, r"cannot be read: .*No such file"),
        ({"config": {"added_tokens_decoder": {"7": {"content": "x"}}}}, "'x' is another token already"),
        ({"config": {"added_tokens_decoder": {"x": {}}}}, "added_tokens_decoder.x: must be an id"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(
    ranks: dict[bytes, int], tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelError, match=named):
        tiktoken_tokenizer(write(tmp_path, ranks, **changes))


def test_a_template_beside_it(ranks: dict[bytes, int], tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert tiktoken_tokenizer(write(tmp_path, ranks)).config["chat_template"] == "{{ messages }}"
