"""Caches of one byte with measured scales: equal bits in every mode, close to a full cache."""

from __future__ import annotations

import re

import pytest
import torch
from families import VOCAB_SIZE, save_model
from modes import MODES, SETTINGS, run

from headrace import LLM, SamplingParams
from headrace.assembly import resolve_engine, worker_factory
from headrace.engine_args import EngineArgs
from headrace_core.errors import ConfigError
from headrace_core.kv import KVCacheConfig
from headrace_engine.execution.kv_scales import measuring_batch
from headrace_engine.kv.grouping import plan_groups
from headrace_engine.startup import StartupTimeline
from headrace_kernels.cpu import library

FAMILIES = ("llama3", "qwen3", "gemma2", "gemma3", "gpt2")
"""Head norms, windows beside full layers, a soft cap, learned positions."""


INT8 = {"kv_cache_dtype": "int8", "calculate_kv_scales": True}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Folders by family."""
    folders = {family: tmp_path_factory.mktemp(f"{family}-") for family in FAMILIES}
    for family, folder in folders.items():
        save_model(family, folder)
    return folders


@pytest.fixture(
    scope="module", params=[(f, k) for f in FAMILIES for k in ("int8", "fp8")], ids="-".join
)
def measured(request, checkpoints):
    """A checkpoint, the cache's settings, and its answers one request at a time."""
    family, kind = request.param
    settings = {"kv_cache_dtype": kind, "calculate_kv_scales": True, "dtype": "bfloat16"}
    return checkpoints[family], settings, run(checkpoints[family], alone=True, **settings)


@pytest.mark.keep(8, every_value=False)
@pytest.mark.skipif(library.path() is None, reason="the native library is not built")
@pytest.mark.parametrize(
    "mode", ["batched", "prefix-hits", "chunked", "preempted", "engine-process", "eager"]
)
def test_every_mode_gives_the_same_bits(measured, mode):
    folder, settings, alone = measured
    assert run(folder, **settings, **MODES[mode]) == alone


def _started(folder, **settings):
    """A worker that has warmed up, and its cache."""
    args = EngineArgs(model=str(folder), **{**SETTINGS, "max_num_seqs": 4, **settings})
    worker = worker_factory(resolve_engine(args.create_engine_config()), StartupTimeline())()
    worker.load()
    cache = KVCacheConfig((100,), plan_groups(worker.kv_specs()))
    worker.allocate_cache(cache)
    worker.warm_up()
    return worker, cache


def _logits(folder, **settings):
    """[V] of the last of 60 tokens."""
    worker, cache = _started(folder, **settings)
    prompt = measuring_batch(
        cache, vocab_size=VOCAB_SIZE, max_model_len=60, device=torch.device("cpu")
    ).batch
    with torch.inference_mode():
        logits = worker._ready().whole_step(prompt)[0].float().clone()
    worker.close()
    return logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("kind", "limit"), [("int8", 0.03), ("fp8", 0.12)])
def test_logits_are_close_to_those_of_a_full_cache(checkpoints, family, kind, limit):
    """Native kernels, float32 activations; the model's weights are random, its logits far from flat."""
    expected = _logits(checkpoints[family])
    logits = _logits(checkpoints[family], kv_cache_dtype=kind, calculate_kv_scales=True)
    error = float((logits - expected).square().mean().sqrt() / expected.square().mean().sqrt())
    assert 0 < error < limit


def test_the_measuring_prompt_stays_nowhere(checkpoints, caplog):
    """Not in a block, not in the prefix cache; the log has the range of the scales."""
    caplog.set_level("INFO", "headrace_engine.execution.kv_scales")
    worker, cache = _started(checkpoints["gemma3"], **INT8)
    prompt = measuring_batch(
        cache, vocab_size=VOCAB_SIZE, max_model_len=100, device=torch.device("cpu")
    ).batch.input_ids.tolist()
    for layer in worker._layers.values():
        assert not layer.kv_cache.any()
        for scale in (layer.spec.k_scale, layer.spec.v_scale):
            assert scale.dtype is torch.float32
            assert 0 < float(scale.min()) == float(scale.max()) < 1
    worker.close()
    told = r"cache scales of 6 layers, measured in [\d.]+ s: keys [\d.]+ to [\d.]+, values [\d.]+ to [\d.]+"
    assert re.fullmatch(told, caplog.messages[0])
    with LLM(str(checkpoints["gemma3"]), **SETTINGS, **INT8) as llm:
        stats = llm.engine.stats()
        assert stats.num_free_blocks == stats.num_blocks
        [output] = llm.generate([prompt], SamplingParams(max_tokens=1), use_tqdm=False)
        assert output.num_cached_tokens == 0


@pytest.mark.parametrize("engine_process", [False, True], ids=["one-process", "engine-process"])
def test_a_bad_constant_is_refused(checkpoints, monkeypatch, engine_process):
    monkeypatch.setenv("K_SCALE_CONSTANT", "200")  # fine for fp8
    with pytest.raises(ConfigError, match=r"K_SCALE_CONSTANT = '200': .* between 1 and 127"):
        LLM(str(checkpoints["qwen3"]), **SETTINGS, **INT8, engine_process=engine_process)


def test_a_backend_that_cannot_says_so(checkpoints):
    with pytest.raises(ConfigError, match=r"'sdpa' cannot serve .*kv_cache_dtype not supported"):
        LLM(str(checkpoints["qwen3"]), **SETTINGS, **INT8, attention_backend="sdpa")
