"""Users' logits processors, offline and over HTTP, in one process and in two."""

from __future__ import annotations

import random
from pathlib import Path

import openai
import pytest
from families import save_model
from processors import AdaptedTargetToken, Recorder, TargetToken
from servers import serving

from headrace import LLM, EngineArgs, LLMEngine, SamplingParams
from headrace_core.errors import ConfigError, RequestError

HERE = str(Path(__file__).parent)
SMALL = {"max_model_len": 256, "max_num_seqs": 8, "num_threads": 1}
PROMPTS = ["Hello, my name is", "What is 3 + 4?", "The sky is", "One two three"]
TARGETS = [128, None, 0, None]


def params(target, **settings):
    extra = None if target is None else {"target_token": target}
    return SamplingParams(temperature=0, max_tokens=12, extra_args=extra, **settings)


def ids(llm, every):
    return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, every, use_tqdm=False)]


@pytest.fixture(scope="module")
def plain():
    with LLM(**SMALL) as llm:
        return ids(llm, params(None))


@pytest.mark.parametrize("given", [TargetToken, AdaptedTargetToken, "processors:TargetToken"])
@pytest.mark.parametrize("engine_process", [False, True])
def test_targets_are_forced_and_neighbours_are_as_without(
    plain, given, engine_process, monkeypatch
):
    import os

    path = os.pathsep.join(filter(None, [HERE, os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    with LLM(**SMALL, logits_processors=[given], engine_process=engine_process) as llm:
        got = ids(llm, [params(target, ignore_eos=target is not None) for target in TARGETS])
        with pytest.raises(RequestError, match="must be an integer"):
            llm.generate(PROMPTS[0], params("67"), use_tqdm=False)
        assert ids(llm, params(None)) == plain
    assert got == [[128] * 12, plain[1], [0] * 12, plain[3]]


@pytest.mark.parametrize("seed", range(3))
def test_a_recording_processor_under_the_real_scheduler(tmp_path, seed):
    """Arrivals, chunked prompts, finishes, aborts and preemption; tokens are as without it."""
    save_model("llama", tmp_path)
    settings = {
        "model": str(tmp_path), "skip_tokenizer_init": True, "dtype": "float32", "block_size": 8,
        "max_model_len": 64, "max_num_seqs": 6, "max_num_batched_tokens": 12,
        "num_gpu_blocks_override": 16, "num_threads": 1, "log_stats": False,
    }  # fmt: skip
    rng = random.Random(seed)
    prompts = {
        f"r{i}": [rng.randrange(3, 320) for _ in range(rng.randint(1, 20))] for i in range(24)
    }
    lengths = {name: rng.randint(1, 30) for name in prompts}
    doomed = {name for name in prompts if rng.random() < 0.2}
    waiting, found = list(prompts), {}
    with LLMEngine(EngineArgs(**settings, logits_processors=[Recorder])) as engine:
        while waiting or engine.has_unfinished_requests():
            for name in [waiting.pop(0) for _ in range(min(len(waiting), rng.randint(0, 4)))]:
                extra = {"name": name, "prompt": prompts[name]}
                params = SamplingParams(
                    temperature=0, max_tokens=lengths[name], ignore_eos=True, extra_args=extra
                )
                engine.add_request(name, prompts[name], params)
            for output in engine.step():
                found[output.request_id] = output.outputs[0]
                if output.request_id in doomed and len(output.outputs[0].token_ids) > 3:
                    engine.abort_request(output.request_id)
        preemptions = engine.engine.stats().num_preemptions
    recorder = Recorder.made.pop()
    assert recorder.problems == []
    assert preemptions > 0
    assert recorder.num_moves > 0
    assert recorder.largest > 2
    with LLM(**{**settings, "num_gpu_blocks_override": 64}) as llm:
        params = [
            SamplingParams(temperature=0, max_tokens=lengths[name], ignore_eos=True)
            for name in prompts
        ]
        plain = llm.generate(list(prompts.values()), params, use_tqdm=False)
    for name, wanted in zip(prompts, plain, strict=True):
        tokens = found[name].token_ids
        assert tokens == wanted.outputs[0].token_ids[: len(tokens)]
        assert name in doomed or len(tokens) == lengths[name]
        assert recorder.outputs[name][: len(tokens)] == tokens


def test_what_cannot_be_loaded_stops_the_start():
    for name in ("no.such.module:Thing", "processors:Missing", "processors:torch"):
        with pytest.raises(ConfigError, match=name):
            LLM(**SMALL, logits_processors=[name])


def test_over_http(plain, monkeypatch):
    import os

    path = os.pathsep.join(filter(None, [HERE, os.environ.get("PYTHONPATH")]))
    words = ["--max-model-len", "256", "--max-num-seqs", "8"]
    words += ["--logits-processors", "processors:TargetToken"]
    with (
        serving(*words, environment={"PYTHONPATH": path}) as server,
        openai.OpenAI(base_url=server.api, api_key="none", max_retries=0) as client,
    ):
        for field in ("headrace_xargs", "vllm_xargs"):
            answer = client.completions.create(
                model="headrace-demo", prompt=PROMPTS[0], temperature=0, max_tokens=5,
                extra_body={field: {"target_token": 0}, "return_token_ids": True,
                            "ignore_eos": True},
            )  # fmt: skip
            assert answer.choices[0].token_ids == [0] * 5
        with pytest.raises(openai.BadRequestError, match="must be an integer"):
            client.completions.create(
                model="headrace-demo",
                prompt="x",
                extra_body={"headrace_xargs": {"target_token": "x"}},
            )
        chat = client.chat.completions.create(
            model="headrace-demo", messages=[{"role": "user", "content": "hi"}], max_tokens=3,
            extra_body={"vllm_xargs": {"target_token": 65}, "return_token_ids": True},
        )  # fmt: skip
        assert chat.choices[0].token_ids == [65] * 3
        answer = client.completions.create(
            model="headrace-demo", prompt=PROMPTS[2], temperature=0, max_tokens=12,
            extra_body={"return_token_ids": True},
        )  # fmt: skip
        assert answer.choices[0].token_ids == plain[2]
