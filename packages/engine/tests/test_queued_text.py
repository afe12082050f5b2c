"""Prints to a stream that nobody reads wait for nobody."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TextIO, cast

import pytest

from headrace_engine.log_lines import QueuedText, ThreadedHandler


@pytest.mark.req("REL-19")
def test_a_print_does_not_wait_and_comes_out_in_order() -> None:
    reading, writing = os.pipe()
    stream = os.fdopen(writing, "w")
    handler = ThreadedHandler(stream)
    text = cast(TextIO, QueuedText(stream, handler))
    done = threading.Event()

    def write() -> None:
        for number in range(200):
            print(f"{number:01000}", file=text, flush=True)  # three times what a pipe holds
        done.set()

    threading.Thread(target=write, daemon=True).start()
    assert done.wait(30), "it waits for a reader"
    read = b""
    while read.count(b"\n") < 200:
        read += os.read(reading, 1 << 16)
    assert [int(line) for line in read.split()] == list(range(200))
    assert (text.fileno(), text.encoding, text.isatty()) == (writing, stream.encoding, False)
    with contextlib.redirect_stdout(text):
        print("last", end="")
    handler.close()
    assert os.read(reading, 100) == b"last"
    stream.close()
    os.close(reading)
