"""The synchronous engine."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from engine_fakes import CharTokenizer, Turnstile, expected_tokens, make_core, served_model

from headrace_core.errors import EngineDead, PromptTooLong, RequestError
from headrace_core.output import RequestOutput
from headrace_core.sampling.params import RequestOutputKind, SamplingParams
from headrace_engine.clients.inproc import InprocClient
from headrace_engine.input_processing.input_processor import InputProcessor
from headrace_engine.input_processing.prepared import PreparedRequest
from headrace_engine.offline import OfflineEngine
from headrace_testing.waiting import wait_until

FINAL = RequestOutputKind.FINAL_ONLY


def make_offline(**core: Any) -> OfflineEngine:
    return OfflineEngine(
        InprocClient(lambda _: make_core(**core)), InputProcessor(CharTokenizer(), served_model())
    )


def assert_free(engine: OfflineEngine) -> None:
    # An abort is a command before this one: when the answer is here, it has been done.
    stats = engine.stats()
    assert stats.num_requests_running == stats.num_requests_waiting == 0
    assert stats.num_free_blocks == stats.num_blocks


@pytest.mark.req("REL-15")
@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_both_loops_and_all_kinds_agree(kind: RequestOutputKind) -> None:
    params = SamplingParams(max_tokens=40, output_kind=kind)
    prompts = [f"prompt {i}" for i in range(24)]
    results = []
    for overlapped in (True, False):
        with make_offline(overlapped=overlapped, num_blocks=60) as engine:
            results.append(engine.run(prompts, params))
            assert engine.stats().num_preemptions > 0
            assert_free(engine)
    for prompt, overlapped_out, simple_out in zip(prompts, *results, strict=True):
        assert overlapped_out.outputs == simple_out.outputs
        assert overlapped_out.outputs[0].token_ids == expected_tokens(prompt, params)
        assert overlapped_out.finished


def test_results_are_in_order_and_seen_as_they_come() -> None:
    seen: list[tuple[int, RequestOutput]] = []
    every = [SamplingParams(max_tokens=n, ignore_eos=True, output_kind=FINAL) for n in (30, 3, 12)]
    with make_offline() as engine:
        outputs = engine.run(["a", "b", "c"], every, on_output=lambda i, o: seen.append((i, o)))
    assert [len(o.outputs[0].token_ids) for o in outputs] == [30, 3, 12]
    assert [index for index, _ in seen] == [1, 2, 0]


def test_wrong_input_leaves_nothing_running() -> None:
    with make_offline() as engine:
        with pytest.raises(PromptTooLong):
            engine.run(["fine", "x" * 513], SamplingParams(max_tokens=100, ignore_eos=True))
        assert not engine.has_unfinished_requests()
        assert_free(engine)
        with pytest.raises(RequestError, match="params"):
            engine.run(["a", "b"], [SamplingParams()])


def test_max_tokens_is_clamped_to_the_context() -> None:
    with make_offline() as engine:
        params = SamplingParams(max_tokens=16, ignore_eos=True)
        output = engine.run(["x" * 510], params)[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (2, "length")


def test_keyboard_interrupt_aborts_everything() -> None:
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    with make_offline() as engine:
        calls = 0

        def interrupt(index: int, output: RequestOutput) -> None:
            nonlocal calls
            calls += 1
            if calls == 20:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            engine.run(["a", "b", "c"], params, on_output=interrupt)
        assert not engine.has_unfinished_requests()
        assert_free(engine)
        again = engine.run(["a"], SamplingParams(max_tokens=5, ignore_eos=True))
        assert len(again[0].outputs[0].token_ids) == 5


@pytest.mark.req("REL-01")
def test_one_failure_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    good = SamplingParams(max_tokens=20, ignore_eos=True)
    bad = SamplingParams(max_tokens=20, ignore_eos=True, extra_args={"fail_at": 4})
    with make_offline() as engine:
        outputs = engine.run(["a", "b", "c"], [good, bad, good])
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length"]
    assert len(outputs[1].outputs[0].token_ids) == 4
    assert "failed as told" in caplog.text
    assert "failed as told" in (outputs[1].outputs[0].error or "")
    assert [o.outputs[0].error for o in (outputs[0], outputs[2])] == [None, None]


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_why_one_of_several_completions_failed(kind: RequestOutputKind) -> None:
    """A completion that had ended before keeps its reason, and has no error."""
    bad = SamplingParams(
        max_tokens=20, temperature=1.0, n=2, output_kind=kind, ignore_eos=True,
        extra_args={"fail_at": 4},
    )  # fmt: skip
    with make_offline() as engine:
        [output] = engine.run(["a"], bad)
        engine.add_request("r", "a", bad)
        seen = []
        while engine.has_unfinished_requests():
            seen += engine.step()
    for completion in output.outputs:
        assert completion.finish_reason == "error"
        assert "failed as told" in (completion.error or "")
    last = seen[-1]
    assert isinstance(last, RequestOutput)
    assert all("failed as told" in (one.error or "") for one in last.outputs)


def test_batches_are_started_and_waited_for_in_any_order() -> None:
    seen: list[int] = []
    with make_offline(num_blocks=60) as engine:
        first = engine.start(
            ["a", "b"],
            SamplingParams(max_tokens=9, ignore_eos=True),
            on_added=lambda: seen.append(1),
        )
        second = engine.start(["c"], SamplingParams(max_tokens=3, ignore_eos=True))
        alone = engine.run(["a"], SamplingParams(max_tokens=9, ignore_eos=True))
        [late] = second.wait()
        outputs = first.wait(lambda index, _: seen.append(10 + index))
        assert [o.request_id for o in outputs] == first.request_ids
        assert late.request_id == second.request_ids[0]
        assert outputs[0].outputs[0].token_ids == alone[0].outputs[0].token_ids
        assert seen[:2] == [1, 1]
        assert {10, 11} <= set(seen)
        with engine.start(["x"] * 3, SamplingParams(max_tokens=400, ignore_eos=True)):
            pass
        assert_free(engine)
        with pytest.raises(PromptTooLong):
            engine.start(["fine", "x" * 513], SamplingParams(max_tokens=100, ignore_eos=True))
        assert_free(engine)


def test_functions_run_with_the_worker() -> None:
    with make_offline() as engine:
        running = SamplingParams(max_tokens=30, ignore_eos=True)
        engine.add_request("r", "a", running)
        [name] = engine.collective_rpc(lambda worker, end: type(worker).__name__ + end, args=("!",))
        assert name == "FakeWorker!"
        with pytest.raises(LookupError, match="as told"):
            engine.collective_rpc(_raises)
        with pytest.raises(RequestError, match=r"method = 3: must be the name .* or a function"):
            engine.collective_rpc(3)  # type: ignore[arg-type]
        while engine.has_unfinished_requests():
            engine.step()


def _raises(worker: object) -> None:
    raise LookupError("as told")


class Noted:
    """An observer that writes down what it is told."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.seen: list[RequestOutput] = []

    def begin(self, request: PreparedRequest) -> Watched:
        self.begun.append(request.request_id)
        return Watched(self, request.request_id)

    def pooled(self, task: str, outputs: Any, started: float) -> None: ...
    def pooling_ended(self, reason: str) -> None: ...


class Watched:
    def __init__(self, noted: Noted, request_id: str) -> None:
        self._noted, self._id = noted, request_id

    def saw(self, output: RequestOutput) -> None:
        self._noted.seen.append(output)

    def ended(self) -> None:
        self._noted.ended.append(self._id)


def test_an_observer_sees_every_request_begin_and_end_once() -> None:
    noted, params = Noted(), SamplingParams(max_tokens=5, ignore_eos=True, output_kind=FINAL)
    client = InprocClient(lambda _: make_core())
    with OfflineEngine(client, InputProcessor(CharTokenizer(), served_model()), noted) as engine:
        outputs = engine.run(["a", "b"], params)
        assert {o.request_id for o in noted.seen} == set(noted.begun)
        assert sorted(noted.ended) == sorted(noted.begun) == sorted(o.request_id for o in outputs)
        engine.add_request("mine", "c", params)
        engine.abort_request(["mine"])
        [aborted] = engine.step()
        assert aborted in noted.seen
        dropped = engine.start(["d"], SamplingParams(max_tokens=400, ignore_eos=True))
        dropped.close()
        assert sorted(noted.ended) == sorted(noted.begun)
        assert len(set(noted.ended)) == len(noted.ended) == 4


def test_death_raises() -> None:
    fatal = SamplingParams(max_tokens=20, ignore_eos=True, extra_args={"die_at": 4})
    with make_offline() as engine:
        with pytest.raises(EngineDead, match="died as told"):
            engine.run(["a", "b"], fatal)
        assert not engine.has_unfinished_requests()
        with pytest.raises(EngineDead):
            engine.run(["a"], fatal)


def test_add_step_abort() -> None:
    params = SamplingParams(max_tokens=300, ignore_eos=True)
    turnstile = Turnstile()
    with make_offline(turnstile=turnstile) as engine:
        assert engine.step() == []
        engine.add_request("one", "first", params)
        engine.add_request("two", "second", SamplingParams(max_tokens=10, ignore_eos=True))
        with pytest.raises(RequestError, match="one"):
            engine.add_request("one", "again", params)
        finished: dict[str, RequestOutput] = {}
        while engine.has_unfinished_requests():
            turnstile.release()
            for output in engine.step():
                if output.finished:
                    finished[output.request_id] = output
            if "two" in finished:
                engine.abort_request(["one", "unknown"])
        turnstile.open()
        assert finished["one"].outputs[0].finish_reason == "abort"
        assert finished["two"].outputs[0].finish_reason == "length"
        assert_free(engine)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (None, "request_ids = None"), (3, "request_ids = 3"), (b"one", "request_ids = b'one'"),
        (["one", None], "request_ids[1] = None"), ([["one"]], "request_ids[0] = ['one']"),
    ],
)  # fmt: skip
def test_ids_to_abort_that_are_not_text_are_refused(given: Any, named: str) -> None:
    params = SamplingParams(max_tokens=300, ignore_eos=True)
    turnstile = Turnstile()
    with make_offline(turnstile=turnstile) as engine:
        engine.add_request("one", "first", params)
        with pytest.raises(RequestError) as refused:
            engine.abort_request(given)
        assert str(refused.value) == f"{named}: must be text, or a list of request ids, each text"
        assert refused.value.param == "request_ids"
        assert engine.num_unfinished == 1, "nothing is aborted"
        engine.abort_request([])
        engine.abort_request("unknown")
        engine.abort_request("one")
        turnstile.open()
        [ended] = engine.step()
        assert ended.outputs[0].finish_reason == "abort"


def test_reset_while_running() -> None:
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    turnstile = Turnstile(1)
    with make_offline(turnstile=turnstile) as engine:
        engine.add_request("r", "reset", params)
        engine.step()
        turnstile.release(2)  # for those in flight: a reset waits for them
        assert engine.reset_prefix_cache() is False
        turnstile.release(2)
        assert engine.reset_prefix_cache(reset_running_requests=True) is True
        turnstile.open()
        last = None
        while engine.has_unfinished_requests():
            for output in engine.step():
                last = output
        assert last is not None
        assert last.outputs[0].token_ids == expected_tokens("reset", params)


def test_a_timeout_of_zero_is_one() -> None:
    turnstile = Turnstile(1)
    with make_offline(turnstile=turnstile) as engine:
        engine.add_request("r", "busy", SamplingParams(max_tokens=5, ignore_eos=True))
        engine.step()  # the next one runs
        with pytest.raises(TimeoutError):
            engine.collective_rpc("report", timeout=0)
        turnstile.open()


def test_a_shutdown_that_raises_ends_the_intake_s_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, closed = make_offline(), []
    real = engine.client.shutdown

    def shutdown() -> None:
        real()
        raise OSError("worker would not die")

    monkeypatch.setattr(engine.client, "shutdown", shutdown)
    monkeypatch.setattr(engine._front.input_processor, "close", lambda: closed.append(True))
    with pytest.raises(OSError, match="would not die"):
        engine.shutdown()
    assert closed


def test_priorities() -> None:
    input_processor = InputProcessor(CharTokenizer(), served_model(priority_scheduling=True))
    client = InprocClient(lambda _: make_core(policy="priority", max_num_seqs=1))
    order: list[int] = []
    params = SamplingParams(max_tokens=4, ignore_eos=True, output_kind=FINAL)
    with OfflineEngine(client, input_processor) as engine:
        engine.run(
            ["a", "b", "c", "d"], params, priority=[0, 5, -1, 3],
            on_output=lambda i, _: order.append(i),
        )  # fmt: skip
    assert order.index(2) < order.index(3) < order.index(1)


def test_a_forgotten_engine_ends() -> None:
    client = InprocClient(lambda _: make_core())
    engine = OfflineEngine(client, InputProcessor(CharTokenizer(), served_model()))
    engine.run(["a"], SamplingParams(max_tokens=3))
    loop = client._loop
    assert loop is not None
    del engine, client
    gc.collect()
    wait_until(lambda: not loop.is_alive)
