"""Which prompts are taken in where."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from headrace_core.request import ChatPrompt
from headrace_engine.input_processing.threads import InputThreads

PART = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}


@pytest.mark.parametrize(
    "prompt",
    [
        {"prompt": "~", "multi_modal_data": {"audio": []}},
        {"encoder_prompt": "", "decoder_prompt": ""},
        ChatPrompt([{"role": "user", "content": [PART]}]),
    ],
)
async def test_no_prompt_waits_for_anothers_media(prompt: Any) -> None:
    threads, decoded = InputThreads(None, 1), threading.Event()  # type: ignore[arg-type]
    slow = [asyncio.create_task(threads.run(prompt, lambda: decoded.wait(60))) for _ in range(8)]
    try:
        # Both large ones and small ones come through while every file is still being decoded.
        assert await asyncio.wait_for(threads.run("x" * 3000, lambda: "large"), 30) == "large"
        assert await threads.run("x", lambda: "small") == "small"
        assert not any(task.done() for task in slow)
    finally:
        decoded.set()
        assert await asyncio.gather(*slow) == [True] * 8
        threads.close()
