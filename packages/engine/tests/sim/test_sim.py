"""The simulated device: its tokens are as promised, and it sees a scheduler's mistakes."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from headrace_core.errors import ConfigError, UnsupportedFeature
from headrace_core.kv import KVCacheConfig, KVCacheGroup
from headrace_core.model import ModelInfo
from headrace_core.platform import BringsWorker, CpuPlatform
from headrace_core.sampling.params import SamplingParams, StructuredOutputsParams
from headrace_core.step import ScheduledStep
from headrace_engine.config import EngineConfig
from headrace_engine.core import WORKER_CALLS
from headrace_engine.sim.platform import WITHOUT_EFFECT, SimPlatform
from headrace_engine.sim.tokens import expected_tokens, mixed, simulated_token
from headrace_engine.sim.worker import SimWorker
from headrace_testing.fakes.requests import new_request

VOCAB, EOS = 100, (0, 2)


def _worker(**changes):
    values = {
        "vocab_size": VOCAB, "eos_token_ids": EOS, "block_size": 4, "max_num_batched_tokens": 64,
        "available_memory": 1 << 20, **changes,
    }  # fmt: skip
    return SimWorker(**values)


def _new(request_id="r", prompt=(5, 6, 7), output=(), stop=(), bad_words=(), blocks=16, **params):
    return new_request(
        request_id,
        [*prompt, *output],
        (list(range(1, blocks + 1)),),
        SamplingParams(**{"seed": 1, "max_tokens": 50, **params}),
        num_prompt_tokens=len(prompt),
        stop_token_ids=stop,
        bad_words_token_ids=bad_words,
    )


def _run(worker, new, count):
    """One request alone: its first tokens."""
    tokens, scheduled = [], len(new.token_ids)
    for step_id in range(count):
        step = ScheduledStep(step_id, {new.request_id: scheduled})
        step.new_requests = [new] if step_id == 0 else []
        result = worker.execute(step)
        part = result.requests.get(new.request_id)
        tokens += [result.tokens[new.request_id]] if part is None else part.token_ids
        scheduled = 1
    return tokens


def test_tokens_are_a_function_of_seeds_and_position():
    wanted = expected_tokens(1, 20, vocab_size=VOCAB, eos_token_ids=EOS)
    assert _run(_worker(), _new(), 20) == wanted
    assert _run(_worker(), _new(prompt=(9,)), 20) == wanted
    assert _run(_worker(), _new(seed=2), 20) != wanted
    assert _run(_worker(seed=1), _new(), 20) != wanted


def test_tokens_are_spread_over_the_vocabulary():
    found = Counter(mixed(1, 2, i) % 10 for i in range(2000))
    assert all(150 < number < 250 for number in found.values())


def test_what_ends_an_output_is_never_chosen():
    assert not set(EOS) & set(_run(_worker(eos_token_ids=range(90)), _new(), 50))


def test_a_request_without_a_seed_has_its_prompts():
    first = _run(_worker(), _new(seed=None), 10)
    assert first == _run(_worker(), _new("other", seed=None), 10)
    assert first != _run(_worker(), _new(prompt=(5, 6, 8), seed=None), 10)


def test_restrictions_are_honoured():
    assert set(_run(_worker(), _new(allowed_token_ids=[7, 8]), 20)) == {7, 8}
    stops = expected_tokens(1, 3, vocab_size=VOCAB, eos_token_ids=EOS)
    assert not set(stops) & set(_run(_worker(), _new(stop=stops, min_tokens=10), 10))
    first, second = stops[:2]
    found = _run(_worker(), _new(bad_words=[(first, second)]), 2)
    assert found[0] == first
    assert found[1] != second


def test_no_permitted_token_is_the_requests_dead_end():
    worker = _worker()
    new = _new(allowed_token_ids=[7], bad_words=[(7,)])
    step = ScheduledStep(0, {"r": 3}, [new])
    result = worker.execute(step).requests["r"]
    assert result.error is None
    assert "no token is possible with allowed_token_ids" in result.dead_end
    with pytest.raises(ValueError):
        simulated_token(0, 0, 0, VOCAB, lambda token: False)


def test_a_preempted_request_comes_back_with_its_tokens():
    wanted = expected_tokens(1, 8, vocab_size=VOCAB, eos_token_ids=EOS)
    resumed = _new(output=wanted[:5])
    assert _run(_worker(), resumed, 3) == wanted[5:]
    with pytest.raises(RuntimeError, match="another output"):
        _run(_worker(), _new(output=[*wanted[:4], 1]), 1)


def test_a_schedulers_mistakes_are_seen():
    with pytest.raises(RuntimeError, match="no block"):
        _run(_worker(), _new(blocks=1), 3)
    worker = _worker()
    with pytest.raises(RuntimeError, match="does not exist"):
        worker.execute(ScheduledStep(0, {"r": 4}, [_new()]))


def test_log_probabilities_of_certainty():
    worker = _worker()
    step = ScheduledStep(0, {"r": 3}, [_new(logprobs=2, prompt_logprobs=0)])
    result = worker.execute(step).requests["r"]
    [entry] = result.logprobs
    assert entry.token_ids[0] == result.token_ids[0]
    assert entry.logprobs == [0.0, -9999.0]
    assert [e.token_ids for e in result.prompt_logprobs] == [[6], [7]]


def test_the_latency_is_as_asked():
    worker = _worker(step_seconds=0.02, token_seconds=0.001)
    step = ScheduledStep(0, {"r": 3}, [_new()])
    assert worker.execute(step).forward_seconds >= 0.023
    assert worker.profile().step_seconds == pytest.approx(0.02 + 0.064)


def test_what_it_cannot_honour_is_refused_before_it_runs():
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"))
    with pytest.raises(UnsupportedFeature, match="structured_outputs"):
        SimPlatform().check_params(params)
    SimPlatform().check_params(SamplingParams())


OF_THE_CORE = {
    "sleep", "wake_up", "is_sleeping", "weights_version", "set_weights_version", "update_weights",
    "swap_weights",
}  # fmt: skip
"""Calls that the engine core answers with more than its worker: see tests-integration/test_sleep.py."""


@pytest.mark.parametrize(
    ("name", "count"), sorted(call for call in WORKER_CALLS.items() if call[0] not in OF_THE_CORE)
)
def test_calls_from_outside_are_answered_or_refused(name, count):
    call = getattr(_worker(), name)
    if name == "report":
        assert call()["device"] == "sim"
    else:
        with pytest.raises(UnsupportedFeature, match="device 'sim'"):
            call(*[{}] * count)


def test_settings_without_effect_are_refused():
    for field, value in WITHOUT_EFFECT.items():
        section, _, name = field.partition(".")
        assert getattr(getattr(EngineConfig(), section), name) == value, field
    assert isinstance(SimPlatform(), BringsWorker)
    assert not isinstance(CpuPlatform(), BringsWorker)


def test_blocks_are_real_and_cost_nothing():
    config = KVCacheConfig((10,), (KVCacheGroup(("sim",), _worker().kv_specs()["sim"]),))
    assert config.block_bytes(0) == 8


def test_it_imports_no_torch():
    modules = "sim.platform, core, kv.manager, execution.memory".replace(", ", ", headrace_engine.")
    code = f"import sys, headrace_engine.{modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_model_that_pools_is_refused():
    info = ModelInfo(
        "m", Path("/m"), "BertModel", {}, {}, "float32", 10, 10, (), ("embed",), runner="pooling"
    )
    with pytest.raises(ConfigError, match="BertModel, which pools"):
        SimPlatform().make_worker(EngineConfig(), info)


def test_requests_in_rows_are_what_they_are_one_by_one(monkeypatch):
    """Many at once, of all kinds, in chunks: with tokens in bulk, and with each request looked at."""
    news = [
        _new(f"r{number}", tuple(range(5, 7 + number % 5)), seed=number, **asked)
        for number, asked in enumerate(
            [{}] * 70 + [{"min_tokens": 3, "stop": (5,)}, {"logprobs": 1}, {"bad_words": [[7]]}]
        )
    ]
    steps = [ScheduledStep(0, {new.request_id: 1 for new in news}, new_requests=news)]
    steps += [ScheduledStep(i, {new.request_id: 1 for new in news}) for i in range(1, 12)]
    steps[6].num_scheduled_tokens = {f"r{number}": 1 for number in range(0, 73, 2)}
    steps[9].gone_request_ids = ["r3", "r71"]
    for step in steps[9:]:
        del step.num_scheduled_tokens["r3"], step.num_scheduled_tokens["r71"]

    def run():
        worker, found = _worker(), {new.request_id: [] for new in news}
        for step in steps:
            result = worker.execute(step)
            assert result.tokens.keys().isdisjoint(result.requests)
            assert {*result.tokens, *result.requests} == {*step.num_scheduled_tokens}
            for name, part in result.requests.items():
                found[name] += part.token_ids
            for name, token in result.tokens.items():
                found[name].append(token)
        return found

    in_rows = run()
    monkeypatch.setattr("headrace_engine.sim.worker._is_plain", lambda new: False)
    assert run() == in_rows


def test_a_scheduler_that_gives_a_request_in_a_row_too_much_is_found_out():
    worker = _worker()
    worker.execute(ScheduledStep(0, {"r": 3}, new_requests=[_new(blocks=1)]))
    with pytest.raises(RuntimeError, match="'r' computes a token that does not exist yet"):
        worker.execute(ScheduledStep(1, {"r": 2}))
    worker.execute(ScheduledStep(2, {"r": 1}))
    with pytest.raises(RuntimeError, match="'r' has no block for a token that it computes"):
        worker.execute(ScheduledStep(3, {"r": 1}))


def test_steps_of_the_same_requests_may_have_one_mapping() -> None:
    """Also if one of them was forgotten and is back, in another row."""
    worker, names = _worker(), ("a", "b", "c")
    prompts = {"a": (5, 6), "b": (7, 8), "c": (9, 10)}
    new = {name: _new(name, prompts[name], seed=index) for index, name in enumerate(names)}
    first = ScheduledStep(0, dict.fromkeys(names, 2), new_requests=list(new.values()))
    tokens = {name: [token] for name, token in worker.execute(first).tokens.items()}
    ones = dict.fromkeys(names, 1)
    for step_id in range(1, 9):
        step = ScheduledStep(step_id, ones)
        if step_id == 4:
            step.gone_request_ids = ["a", "b"]
            step.new_requests = [
                _new(name, prompts[name], tokens[name], seed=new[name].request.params.seed)
                for name in ("a", "b")
            ]
            for back in step.new_requests:
                back.num_computed_tokens = len(back.token_ids) - 1
        for name, token in worker.execute(step).tokens.items():
            tokens[name].append(token)
    for index, name in enumerate(names):
        straight = [simulated_token(0, index, at, VOCAB, lambda t: t not in EOS) for at in range(9)]
        assert tokens[name] == straight
