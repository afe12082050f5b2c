"""Pieces of answers -> blocks that open, grow and close."""

from __future__ import annotations

from typing import Any

from headrace_server.chat.blocks import BlockChange, Blocks
from headrace_server.chat.segments import CallPiece, Content, MessageBreak, Reasoning


def play(*segments: Any) -> tuple[list[tuple[str, str]], list[tuple[str, int, str]]]:
    blocks = Blocks(3, lambda index, name: f"{name}{index}")
    steps = [s for segment in segments for s in blocks.take([segment])] + blocks.finish()
    told = [(s.change.value, s.block.position, s.text) for s in steps]
    return [(b.kind, b.text) for b in blocks.blocks], told


def test_one_block_at_a_time() -> None:
    blocks, told = play(
        Reasoning("a"), Reasoning("b"), Content("c"), CallPiece(0, "f", ""), CallPiece(0, None, "{}"),
        CallPiece(1, "f", "[]"),
    )  # fmt: skip
    assert blocks == [("reasoning", "ab"), ("text", "c"), ("call", "{}"), ("call", "[]")]
    assert told == [
        ("open", 3, ""), ("grow", 3, "a"), ("grow", 3, "b"), ("close", 3, ""),
        ("open", 4, ""), ("grow", 4, "c"), ("close", 4, ""),
        ("open", 5, ""), ("grow", 5, "{}"), ("close", 5, ""),
        ("open", 6, ""), ("grow", 6, "[]"), ("close", 6, ""),
    ]  # fmt: skip


def test_white_space_alone_opens_nothing() -> None:
    assert play(Reasoning("\n"), Content("\n"), Content(" "), CallPiece(0, "f", "{}"))[0] == [
        ("call", "{}")
    ]
    assert play(Content("\n"), Content(" x"), Content("\n"))[0] == [("text", "\n x\n")]
    assert play(Content(" \n"))[0] == []


def test_a_break_separates_blocks_of_one_kind() -> None:
    assert play(Content("a"), MessageBreak(), MessageBreak(), Content("b"))[0] == [
        ("text", "a"),
        ("text", "b"),
    ]


def test_logprobs_belong_to_the_text() -> None:
    blocks = Blocks(0, lambda index, name: "")
    entries: list[Any] = ["one", "two", "end"]
    steps = blocks.take([], entries[:1]) + blocks.take([Content("x")], entries[1:2])
    steps += blocks.take([], entries[2:]) + blocks.finish()
    grown = [(s.text, s.logprobs) for s in steps if s.change is BlockChange.GROW]
    assert grown == [("x", ("one", "two")), ("", ("end",))]
    assert steps[-1].change is BlockChange.CLOSE
    assert blocks.blocks[0].logprobs == entries
