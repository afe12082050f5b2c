"""Replayed steps give the bits of eager ones: every family, any batch, every instruction set."""

from __future__ import annotations

import dataclasses
import logging
import re
import threading

import pytest
import torch
from captured import SETTINGS, Comparison, make_worker
from families import FAMILIES, VOCAB_SIZE, save_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace import LLM, SamplingParams
from headrace_core.errors import ReplayFailed
from headrace_core.step import ScheduledStep
from headrace_engine.execution.inputs import StepInputs
from headrace_kernels.cpu import library

if library.path() is None:
    pytest.skip("the native library is not built", allow_module_level=True)

MAX_LEN = 120
VARIANTS = {
    **{family: (family, {"dtype": "float32"}) for family in FAMILIES},
    **{f"{family}-bfloat16": (family, {"dtype": "bfloat16"}) for family in ("qwen3", "gemma3")},
    **{
        f"{family}-{method}": (family, {"dtype": "bfloat16", "quantization": method})
        for family, method in (
            ("qwen3", "int8"),
            ("qwen3_moe", "int4_g32"),
            ("deepseek_v3", "int8"),
        )
    },
    **{
        f"gemma3-{kind}-cache": (
            "gemma3",
            {"dtype": "bfloat16", "kv_cache_dtype": kind, "calculate_kv_scales": True},
        )
        for kind in ("int8", "fp8")
    },
    "glm_moe_dsa-fp8-cache": (
        "glm_moe_dsa",
        {"dtype": "bfloat16", "kv_cache_dtype": "fp8", "calculate_kv_scales": True},
    ),
}


@pytest.fixture(scope="module", params=list(VARIANTS))
def compared(request, tmp_path_factory):
    family, changes = VARIANTS[request.param]
    folder = tmp_path_factory.mktemp(family)
    save_model(family, folder)
    worker = make_worker(folder, **changes)
    yield Comparison(worker, VOCAB_SIZE)
    worker.close()


REQUESTS = st.tuples(st.integers(1, 40), st.integers(0, 80)).map(lambda r: (r[0], r[0] + r[1]))
DECODES = st.tuples(st.just(1), st.integers(1, MAX_LEN))


@pytest.mark.keep(10, every_value=False)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    lengths=st.lists(DECODES, min_size=1, max_size=5)
    | st.lists(st.one_of(REQUESTS, DECODES), min_size=1, max_size=5),
    all_rows=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_batch_gives_the_same_bits(compared, lengths, all_rows, seed):
    decoding = all(num_new == 1 for num_new, _ in lengths)
    compared.check(compared.batch(lengths, all_rows=all_rows and decoding, seed=seed))


def test_a_bad_index_raises_what_the_eager_step_raises(compared, caplog):
    """But where layers are recurrent: their states may have moved on, so nothing runs again."""
    batch = compared.batch([(1, 5), (1, 9)])
    bad = dataclasses.replace(batch, input_ids=torch.tensor([0, VOCAB_SIZE]))
    rows = torch.arange(2).numpy()
    inputs = StepInputs(["a", "b"], rows, rows + 1, rows, 2, [], [], bad, {}, rows, None)
    step = ScheduledStep(0, {"a": 1, "b": 1})
    # The embedding's rows come out of a table, or out of the packed head that shares it.
    told = r"call \d, (embedding|linear_rows), reported status 1"
    if compared.runner.requests.state_groups:
        with pytest.raises(ReplayFailed, match=told):
            compared.runner._forward(inputs, step, None)
    else:
        with pytest.raises(IndexError, match=rf"embedding: an id is outside \[0, {VOCAB_SIZE}\)"):
            compared.runner._forward(inputs, step, None)
        assert re.search(rf"replay failed \({told}\); the step runs eagerly", caplog.text)
    compared.check(batch)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    save_model("qwen3", folder)
    return folder


@pytest.mark.parametrize("level", library.ISA_LEVELS)
def test_every_instruction_set(qwen3, level, monkeypatch):
    if level not in library.levels():
        pytest.skip(f"this machine has no {level}")
    monkeypatch.setenv(library.ISA_VARIABLE, level)
    for dtype in ("float32", "bfloat16"):
        worker = make_worker(qwen3, dtype=dtype)
        compared = Comparison(worker, VOCAB_SIZE)
        for seed in range(4):
            compared.check(compared.batch([(1, 5), (7, 30), (1, 90), (3, 3)], seed=seed))
        worker.close()


def test_what_cannot_be_captured_runs_eagerly_and_says_why(tmp_path, caplog):
    """Kernels that are torch's because a user insists."""
    save_model("llama", tmp_path)
    caplog.set_level(logging.INFO, "headrace_engine.execution.capture")
    with LLM(str(tmp_path), kernels={"rms_norm": "reference"}, **SETTINGS) as llm:
        output = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4), use_tqdm=False)
    assert len(output[0].outputs[0].token_ids) == 4
    (line,) = [m for m in caplog.messages if m.startswith("steps run eagerly")]
    assert "torch operation aten." in line


def test_two_engines_on_two_threads(qwen3):
    """Each captures and replays on its own; neither sees the other."""
    prompts = [[7 + i, 9, 11 * i + 3] for i in range(4)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    found: dict[int, list[list[int]]] = {}

    def run(number: int) -> None:
        with LLM(str(qwen3), kv_cache_memory_bytes=8 << 20, **SETTINGS) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found[number] = [output.outputs[0].token_ids for output in outputs]

    run(0)
    threads = [threading.Thread(target=run, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[1] == found[2] == found[0]
