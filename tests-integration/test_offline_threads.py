"""One ``LLM`` used from several threads, and from within its own callbacks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from side_by_side import LIMIT, side_by_side

from headrace import LLM, SamplingParams
from headrace.sampling_params import BeamSearchParams
from headrace_core.errors import EngineDead, RequestError

SMALL = {"max_model_len": 512, "max_num_seqs": 16, "num_threads": 1}


@pytest.fixture(scope="module")
def llm():
    with LLM(**SMALL) as llm:
        yield llm


def _greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def test_calls_of_several_threads_get_their_own_outputs(llm):
    """Lengths differ, so that each call ends while others still run."""
    work = [([f"Say {i}", f"Count to {i}"], _greedy(3 + 5 * i)) for i in range(6)]
    alone = [llm.generate(prompts, params, use_tqdm=False) for prompts, params in work]
    for _ in range(3):
        outputs = side_by_side(
            [lambda p=p, s=s: llm.generate(p, s, use_tqdm=False) for p, s in work]
        )
        for expected, got in zip(alone, outputs, strict=True):
            assert [o.prompt for o in got] == [o.prompt for o in expected]
            assert [o.outputs[0].token_ids for o in got] == [
                o.outputs[0].token_ids for o in expected
            ]


def test_calls_of_several_threads_run_in_the_same_steps(llm):
    """Each waits until the other has begun: one after the other, they would never end."""
    begun = [threading.Event(), threading.Event()]

    def bar(mine: int) -> Callable[..., Any]:
        class Bar:
            def __init__(self, **_: Any) -> None: ...
            def set_postfix_str(self, text: str, refresh: bool = True) -> None: ...
            def close(self) -> None: ...
            def update(self, count: int) -> None:
                begun[mine].set()
                assert begun[1 - mine].wait(LIMIT)

        return Bar

    every = [_greedy(2), _greedy(60)]
    calls = [lambda i=i: llm.generate(["a", "b"], every, use_tqdm=bar(i)) for i in (0, 1)]
    assert [len(outputs) for outputs in side_by_side(calls)] == [2, 2]


def test_methods_of_all_kinds_at_once(llm):
    chat = [{"role": "user", "content": "What is 2 + 3?"}]
    beams = BeamSearchParams(beam_width=3, max_tokens=8)
    [expected] = llm.beam_search("Hello", beams)
    generated, chatted, searched, stats, _ = side_by_side(
        [
            lambda: llm.generate("Hello", _greedy(40), use_tqdm=False),
            lambda: llm.chat(chat, _greedy(20), use_tqdm=False),
            lambda: llm.beam_search("Hello", beams),
            lambda: llm.engine.stats(),
            lambda: llm.reset_prefix_cache(),
        ]
    )
    assert len(generated[0].outputs[0].token_ids) == 40
    assert "5" in chatted[0].outputs[0].text
    assert searched[0].sequences[0].tokens == expected.sequences[0].tokens
    assert stats.num_blocks > 0


def test_a_call_from_within_a_callback_of_another(llm):
    """The inner call gets its own outputs, and the outer call loses none."""
    inner = []

    class Bar:
        def __init__(self, **_: Any) -> None: ...
        def set_postfix_str(self, text: str, refresh: bool = True) -> None: ...
        def close(self) -> None: ...
        def update(self, count: int) -> None:
            inner.append(llm.generate("inner", _greedy(30), use_tqdm=False)[0])

    params = [_greedy(2), _greedy(6), _greedy(9)]
    [outer] = side_by_side([lambda: llm.generate(["a", "b", "c"], params, use_tqdm=Bar)])
    assert [len(o.outputs[0].token_ids) for o in outer] == [2, 6, 9]
    assert [len(o.outputs[0].token_ids) for o in inner] == [30] * 3


def test_requests_of_the_step_loop_survive_a_call_beside_them(llm):
    engine = llm.engine
    engine.add_request("mine", "Hello", _greedy(4))
    llm.generate("other", _greedy(30), use_tqdm=False)
    seen = []

    def steps() -> None:
        while engine.has_unfinished_requests():
            seen.extend(engine.step())

    side_by_side([steps])
    assert seen[-1].request_id == "mine"
    assert seen[-1].finished


def test_a_refused_call_leaves_the_others_alone(llm):
    def refused() -> None:
        with pytest.raises(RequestError):
            llm.generate(["fine", [999_999]], _greedy(30), use_tqdm=False)

    outputs, *_ = side_by_side(
        [lambda: llm.generate(["a", "b"], _greedy(40), use_tqdm=False), refused, refused]
    )
    assert [len(o.outputs[0].token_ids) for o in outputs] == [40, 40]
    stats = llm.engine.stats()
    assert (stats.num_requests_running, stats.num_requests_waiting) == (0, 0)
    assert stats.num_free_blocks == stats.num_blocks


def test_closing_ends_the_calls_of_other_threads():
    llm = LLM(**SMALL)
    running = threading.Event()

    class Bar:
        def __init__(self, **_: Any) -> None: ...
        def set_postfix_str(self, text: str, refresh: bool = True) -> None: ...
        def close(self) -> None: ...
        def update(self, count: int) -> None:
            running.set()

    def generate() -> None:
        with pytest.raises(EngineDead, match="shut down"):
            llm.generate(["a"] * 60, [_greedy(1), *[_greedy(400)] * 59], use_tqdm=Bar)

    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(generate)
        assert running.wait(LIMIT)
        llm.close()
        future.result(LIMIT)
