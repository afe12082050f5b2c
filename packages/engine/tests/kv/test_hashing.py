from __future__ import annotations

import hashlib
import struct
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_core.multimodal import MediaInput
from headrace_core.request import PromptEmbeds
from headrace_engine.kv.hashing import MAX_TOKEN_ID, BlockHashes, block_digest, root_digest

STORED = "cd9caedf526483f5e8059a2bc3451e91cb8f7e4774d0b846e9f68968334bc6c5"


def test_digests_equal_the_stored_constant() -> None:
    """On every machine, byte order and Python: a shared cache depends on it."""
    hashes = BlockHashes(4, "tenant é")
    assert hashes.extend([1, 2, 3, 4, 70_000, 0, MAX_TOKEN_ID, 5, 6])[1].hex() == STORED


def test_the_encoding_is_the_documented_one() -> None:
    root = hashlib.sha256(b"headrace-kv-1" + struct.pack("<I", 0)).digest()
    assert root_digest() == root
    block = hashlib.sha256(root + struct.pack("<IIII", 2, 7, 8, 0)).digest()
    assert block_digest(root, [7, 8]) == block
    keyed = hashlib.sha256(root + struct.pack("<IIII", 2, 7, 8, 1) + b"\x02\x00\x00\x00ab").digest()
    assert block_digest(root, [7, 8], ["ab"]) == keyed


def test_digests_do_not_depend_on_the_hash_seed() -> None:
    code = (
        "from headrace_engine.kv.hashing import BlockHashes;"
        "print(BlockHashes(2, 's').extend([1, 2, 3, 4])[-1].hex())"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1


@pytest.mark.parametrize("salt", ["", "a", "\ud800", "a" * 5000])
def test_every_salt_is_its_own_world(salt: str) -> None:
    plain = BlockHashes(1, None).extend([1])
    assert BlockHashes(1, salt).extend([1]) != plain
    assert BlockHashes(1, salt + "b").extend([1]) != BlockHashes(1, salt).extend([1])


def test_every_adapter_is_its_own_world() -> None:
    worlds = [("", None), ("", "a"), ("a", None), ("b", None), ("a", "a"), ("", "adapter")]
    firsts = [BlockHashes(1, salt, adapter_digest=name).extend([1])[0] for name, salt in worlds]
    assert len(set(firsts)) == len(worlds)
    assert BlockHashes(1, None, adapter_digest="a").extend([1])[0] == firsts[2]


def test_keys_cannot_be_shifted_into_each_other() -> None:
    root = root_digest()
    variants = [["ab", "c"], ["a", "bc"], ["abc"], ["", "abc"], []]
    assert len({block_digest(root, [1], keys) for keys in variants}) == len(variants)


@given(st.lists(st.integers(0, 9), max_size=40), st.lists(st.integers(0, 40), max_size=6))
def test_growing_step_by_step_gives_the_same_digests(tokens: list[int], cuts: list[int]) -> None:
    stepwise = BlockHashes(3, None)
    for cut in sorted(cuts):
        stepwise.extend(tokens[:cut])
    assert stepwise.extend(tokens) == BlockHashes(3, None).extend(tokens)
    assert len(stepwise.digests) == len(tokens) // 3


def test_a_block_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []

    def counted(content: bytes) -> Any:
        calls.append(struct.unpack("<2I", content[36:44]))
        return hashlib.sha256(content)

    monkeypatch.setattr("headrace_engine.kv.hashing.sha256", counted)
    hashes = BlockHashes(2, None)
    for length in (1, 2, 3, 5, 5):
        hashes.extend([1, 2, 3, 4, 5][:length])
    assert calls == [(1, 2), (3, 4)]


def embeds(*rows: float) -> PromptEmbeds:
    return PromptEmbeds.of("float32", len(rows), 1, struct.pack(f"{len(rows)}f", *rows))


@pytest.mark.req("SEC-23")
def test_blocks_of_embeddings_are_found_by_content() -> None:
    zeros = [0] * 5
    one = BlockHashes(2, None, embeds(1.0, 2.0, 3.0, 4.0, 5.0)).extend(zeros)
    same_start = BlockHashes(2, None, embeds(1.0, 2.0, 3.0, 9.0)).extend(zeros[:4])
    assert one[0] == same_start[0]
    assert one[1] != same_start[1]
    assert not set(one) & set(BlockHashes(2, None).extend(zeros)), "never as the tokens 0"
    assert not set(one) & set(BlockHashes(2, "salt", embeds(1.0, 2.0, 3.0, 4.0)).extend(zeros))


def test_a_block_of_embeddings_and_tokens_depends_on_both() -> None:
    prompt = embeds(1.0, 2.0, 3.0)
    mixed = {
        BlockHashes(2, None, given).extend([0, 0, 0, token])[1]
        for given in (prompt, embeds(1.0, 2.0, 4.0))
        for token in (7, 8)
    }
    assert len(mixed) == 4
    stepwise = BlockHashes(2, None, prompt)
    stepwise.extend([0, 0, 0])
    whole = BlockHashes(2, None, prompt).extend([0, 0, 0, 7, 8, 9])
    assert stepwise.extend([0, 0, 0, 7, 8, 9]) == whole
    without = BlockHashes(2, None).extend([7, 8])[0]
    assert without not in whole


def heard(content: str, offset: int, count: int) -> MediaInput:
    return MediaInput("audio", {}, content, count, offset)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], list[MediaInput]]:
    """Texts of one token and placeholders of another, so that ids alone hardly tell them apart."""
    ids: list[int] = []
    media: list[MediaInput] = []
    for _ in range(draw(st.integers(0, 4))):
        ids += [1] * draw(st.integers(0, 3))
        count = draw(st.integers(1, 6))
        media.append(heard(draw(st.sampled_from("ab")), len(ids), count))
        ids += [0] * count
    return ids + [1] * draw(st.integers(0, 6)), media


def contents(ids: list[int], media: list[MediaInput]) -> list[object]:
    """What a prompt says, token by token."""
    found: list[object] = list(ids)
    for item in media:
        for index in range(item.num_tokens):
            found[item.offset + index] = (item.content_hash, index)
    return found


@given(prompts(), prompts(), st.integers(1, 5))
def test_blocks_with_media_are_equal_only_if_everything_before_is(
    one: tuple[list[int], list[MediaInput]], other: tuple[list[int], list[MediaInput]], size: int
) -> None:
    digests = [BlockHashes(size, None, None, media).extend(ids) for ids, media in (one, other)]
    said = [contents(*prompt) for prompt in (one, other)]
    for index, (a, b) in enumerate(zip(*digests)):
        end = (index + 1) * size
        if said[0][:end] != said[1][:end]:
            assert a != b
        # An item that goes on behind the block may differ in length: its content does, too.
        elif [m.num_tokens for m in one[1]] == [m.num_tokens for m in other[1]]:
            assert a == b


def test_an_encoders_media_are_no_part_of_blocks() -> None:
    assert BlockHashes(2, None, None, [heard("a", -1, 9)]).extend([1, 2]) == BlockHashes(
        2, None
    ).extend([1, 2])
