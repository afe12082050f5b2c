"""Conformance suite of tokenizers. Inherit, and say how to make one.

class TestMine(TokenizerConformance):
    @pytest.fixture
    def tokenizer(self):
        return MyTokenizer(...)
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace_core.text import Tokenizer

TEXTS = (
    "Hello, world!",
    "two  spaces, a\ttab and a\nnew line",
    " leading and trailing ",
    "ünïcödé, 你好, مرحبا, 😀👩‍👩‍👧",
    "x = {'a': [1, 2.5]}  # code\n    return x",
)
REPLACEMENT = "�"


class TokenizerConformance:
    """The suite. Class attributes say what the vocabulary cannot do."""

    lossless: ClassVar[bool] = True
    """Decoding an encoded text gives the text back, character for character."""
    space_mark: ClassVar[str] = ""
    """The character that the vocabulary writes for a space, if it has one: decoding cannot tell
    one that stood in the text from a space."""
    texts: ClassVar[tuple[str, ...]] = TEXTS

    @pytest.fixture
    def tokenizer(self) -> Tokenizer:
        """Made for each test: keep a costly one in a cache of your own."""
        raise NotImplementedError("return the tokenizer under test")

    def test_ids_are_in_the_vocabulary(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.vocab_size > 0
        for text in self.texts:
            ids = tokenizer.encode(text)
            assert ids
            assert all(isinstance(i, int) and tokenizer.token_string(i) for i in ids)

    def test_round_trip(self, tokenizer: Tokenizer) -> None:
        if not self.lossless:
            pytest.skip("this vocabulary does not keep every character")
        for text in self.texts:
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert tokenizer.decode(ids) == text
            with_special = tokenizer.encode(text, add_special_tokens=True)
            assert tokenizer.decode(with_special, skip_special_tokens=True) == text

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(text=st.text(max_size=40))
    def test_any_text(self, tokenizer: Tokenizer, text: str) -> None:
        ids = tokenizer.encode(text, add_special_tokens=False)
        decoded = tokenizer.decode(ids)
        # What stands beside a special token may get or lose a space, as the family has it.
        if self.lossless and tokenizer.special_token_ids.isdisjoint(ids):
            assert decoded == (text.replace(self.space_mark, " ") if self.space_mark else text)

    def test_nothing_is_nothing(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.encode("", add_special_tokens=False) == []
        assert tokenizer.decode([]) == ""

    def test_ids_outside_the_vocabulary_decode_to_nothing(self, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode("Hello", add_special_tokens=False)
        outside = [-1, 10**9]
        assert tokenizer.decode([*ids, *outside]) == tokenizer.decode(ids)
        assert all(tokenizer.token_string(i) == "" for i in outside)

    def test_parts_of_characters_become_replacement_characters(self, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode("😀你", add_special_tokens=False)
        for end in range(len(ids)):
            text = tokenizer.decode(ids[:end])
            assert text.rstrip(REPLACEMENT) in "😀你"

    def test_special_tokens(self, tokenizer: Tokenizer) -> None:
        for name, token_id in (
            ("bos_token", tokenizer.bos_token_id),
            ("eos_token", tokenizer.eos_token_id),
        ):
            if token_id is None:
                continue
            assert token_id in tokenizer.special_token_ids
            assert tokenizer.encode(
                tokenizer.special_tokens[name], add_special_tokens=False
            ) == [token_id]  # fmt: skip

    def test_skipping_special_tokens(self, tokenizer: Tokenizer) -> None:
        if tokenizer.eos_token_id is None:
            pytest.skip("this vocabulary has no end token")
        ids = [*tokenizer.encode("Hello", add_special_tokens=False), tokenizer.eos_token_id]
        assert tokenizer.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids[:-1])
        shown = tokenizer.decode(ids, skip_special_tokens=False)
        assert shown.endswith(tokenizer.special_tokens["eos_token"])

    def test_special_ids_are_tokens(self, tokenizer: Tokenizer) -> None:
        assert all(tokenizer.token_string(i) for i in tokenizer.special_token_ids)

    def test_one_text_as_a_prompt(self, tokenizer: Tokenizer) -> None:
        for text in self.texts:
            for special in (True, False):
                ids, types = tokenizer.encode_pair(text, add_special_tokens=special)
                assert ids == tokenizer.encode(text, add_special_tokens=special)
                assert len(types) == len(ids)

    def test_two_texts_as_a_prompt(self, tokenizer: Tokenizer) -> None:
        first, second = self.texts[0], self.texts[-1]
        ids, types = tokenizer.encode_pair(first, second)
        assert len(types) == len(ids)
        plain = [tokenizer.encode(t, add_special_tokens=False) for t in (first, second)]
        bare = tokenizer.encode_pair(first, second, add_special_tokens=False)
        assert bare.token_ids == plain[0] + plain[1]
        special = tokenizer.special_token_ids
        assert [i for i in ids if i not in special] == [
            i for part in plain for i in part if i not in special
        ]

    def test_prompts_are_shortened_at_the_beginnings_of_texts(self, tokenizer: Tokenizer) -> None:
        first, second = self.texts[0] * 3, self.texts[-1]
        for texts in ((first,), (first, second), (second, first)):
            whole = tokenizer.encode_pair(*texts)
            bare = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
            extra = len(whole.token_ids) - sum(map(len, bare))
            for length in range(1, len(whole.token_ids) + 2):
                ids, types = tokenizer.encode_pair(*texts, max_length=length)
                assert len(ids) == len(types) == min(length, len(whole.token_ids))
                if len(texts) == 1 and length > extra:
                    kept = bare[0][max(0, len(bare[0]) + extra - length) :]
                    assert _holds(ids, kept)

    def test_prompts_are_shortened_at_the_ends_of_texts(self, tokenizer: Tokenizer) -> None:
        text = self.texts[0] * 3
        whole = tokenizer.encode_pair(text)
        bare = tokenizer.encode(text, add_special_tokens=False)
        extra = len(whole.token_ids) - len(bare)
        for length in range(1, len(whole.token_ids) + 2):
            ids, types = tokenizer.encode_pair(text, max_length=length, truncation_side="right")
            assert len(ids) == len(types) == min(length, len(whole.token_ids))
            if length > extra:
                assert _holds(ids, bare[: length - extra])

    def test_threads_do_not_disturb_each_other(self, tokenizer: Tokenizer) -> None:
        texts = list(self.texts) * 8
        expected = [tokenizer.encode(text) for text in texts]
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(tokenizer.encode, texts)) == expected
            decoded = list(pool.map(tokenizer.decode, expected))
        assert decoded == [tokenizer.decode(ids) for ids in expected]


def _holds(ids: list[int], part: list[int]) -> bool:
    """True if one list is a run of another."""
    return any(ids[i : i + len(part)] == part for i in range(len(ids) - len(part) + 1))
