"""A closed engine has let go of its weights at once: the next one in the process needs their room."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

import headrace_demo
from headrace import LLM, SamplingParams
from headrace_models.layers.base import Layer


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()  # it comes by the number of objects, and a server has it come seldom
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("guesses", [None, "draft_model"])
def test_a_closed_engine_keeps_no_model(guesses: str | None, no_collector: None) -> None:
    settings = {}
    if guesses is not None:
        config = {
            "method": guesses,
            "model": str(headrace_demo.model_path()),
            "num_speculative_tokens": 2,
        }
        settings = {"speculative_config": config}
    others = {id(model) for model in models()}
    with LLM(max_model_len=128, num_threads=1, kv_cache_memory_bytes=32 << 20, **settings) as llm:
        llm.generate(["Who are you?"], SamplingParams(max_tokens=4), use_tqdm=False)
        own = [weakref.ref(model) for model in models() if id(model) not in others]
    assert len(own) == (1 if guesses is None else 2)
    assert [ref() for ref in own] == [None] * len(own)  # llm is still there


def models() -> list[Layer]:
    return [
        found
        for found in gc.get_objects()
        if type(found).__name__ == "LlamaForCausalLM" and isinstance(found, Layer)
    ]
