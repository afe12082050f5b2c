"""Caches with a scale for each token and head, in the whole engine: equal bits in every mode, the logits
of keys and values rounded so, and as many more blocks as rows are shorter."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch
from families import VOCAB_SIZE, save_model
from modes import MODES, SETTINGS, run

from headrace import LLM
from headrace.assembly import resolve_engine, worker_factory
from headrace.engine_args import EngineArgs
from headrace_core.errors import ConfigError
from headrace_core.kv import KVCacheConfig
from headrace_engine.execution.kv_scales import measuring_batch
from headrace_engine.kv.grouping import plan_groups
from headrace_engine.startup import StartupTimeline
from headrace_kernels.cpu import library

INT8, INT4 = "int8_per_token_head", "int4_per_token_head"
LARGEST = {INT8: 127.0, INT4: 7.0}
FAMILIES = ("qwen3", "gemma3", "gemma4", "deepseek_v3", "bamba")
"""Head norms; windows beside full layers; layers that share caches; latents; recurrences."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Folders by family."""
    folders = {family: tmp_path_factory.mktemp(f"{family}-") for family in FAMILIES}
    for family, folder in folders.items():
        save_model(family, folder)
    return folders


@pytest.fixture(
    scope="module", params=[(f, k) for f in FAMILIES for k in (INT8, INT4)], ids="-".join
)
def served(request, checkpoints):
    """A checkpoint, the cache's settings, and its answers one request at a time."""
    family, kind = request.param
    settings = {"kv_cache_dtype": kind, "dtype": "bfloat16"}
    return checkpoints[family], settings, run(checkpoints[family], alone=True, **settings)


@pytest.mark.keep(8, every_value=False)
@pytest.mark.skipif(library.path() is None, reason="the native library is not built")
@pytest.mark.parametrize("mode", ["batched", "prefix-hits", "chunked", "preempted", "eager"])
def test_every_mode_gives_the_same_bits(served, mode):
    folder, settings, alone = served
    assert run(folder, **settings, **MODES[mode]) == alone


def _started(folder, **settings):
    """A worker with a cache, and the cache."""
    settings = {**SETTINGS, "max_num_seqs": 4, **settings}
    worker = worker_factory(
        resolve_engine(EngineArgs(model=str(folder), **settings).create_engine_config()),
        StartupTimeline(),
    )()
    worker.load()
    groups = plan_groups(worker.kv_specs())
    cache = KVCacheConfig((60,) * (1 + max(group.pool for group in groups)), groups)
    worker.allocate_cache(cache)
    worker.warm_up()
    return worker, cache


def _logits(folder, prepare=None, **settings):
    """[V] of the last of 60 tokens; ``prepare`` gets the model's layers first."""
    worker, cache = _started(folder, **settings)
    if prepare is not None:
        for layer in worker._layers.values():
            prepare(layer)
    prompt = measuring_batch(
        cache, vocab_size=VOCAB_SIZE, max_model_len=60, device=torch.device("cpu")
    ).batch
    with torch.inference_mode():
        logits = worker._ready().whole_step(prompt)[0].float().clone()
    worker.close()
    return logits


def _rounded(x, largest):
    """x [..., D] rounded to whole multiples of its largest magnitude / largest."""
    step = x.abs().amax(-1, keepdim=True) / largest
    return torch.where(step > 0, torch.round(x / step) * step, x)


def _rounding(kind):
    """Makes a layer round what it has written into a cache of floats, token by token and head by head."""
    largest = LARGEST[kind]

    def write_heads(write, *args, **options):
        write(*args, **options)
        for cache in args[5:7]:
            at = args[7] // cache.shape[1], args[7] % cache.shape[1]
            cache[at] = _rounded(cache[at], largest)

    def write_latents(write, latent, rope_key, cache, slots, **options):
        write(_rounded(latent, largest), _rounded(rope_key, largest), cache, slots, **options)

    def prepare(layer):
        heads, latents = layer.ops.rotary_cache_write, layer.ops.mla_cache_write
        layer.ops = dataclasses.replace(
            layer.ops,
            rotary_cache_write=lambda *args, **options: write_heads(heads, *args, **options),
            mla_cache_write=lambda *args, **options: write_latents(latents, *args, **options),
        )

    return prepare


def _distance(a, b):
    return float((a - b).square().mean().sqrt() / b.square().mean().sqrt())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", LARGEST)
def test_logits_are_those_of_rounded_keys_and_values(checkpoints, family, kind):
    """float32 activations. A number between two steps may be rounded the other way: hence the limit."""
    folder = checkpoints[family]
    expected = _logits(folder, _rounding(kind), enforce_eager=True)
    logits = _logits(folder, kv_cache_dtype=kind)
    plain = _logits(folder)
    assert _distance(logits, expected) < _distance(plain, expected) / 10


def _num_blocks(folder, **settings):
    with LLM(str(folder), **{**SETTINGS, "dtype": "bfloat16", **settings}) as llm:
        return llm.engine.stats().num_blocks


def test_a_budget_holds_as_many_more_blocks_as_rows_are_shorter(checkpoints):
    """Heads of 32 numbers: 64 bytes, 32 and a scale, 16 and a scale."""
    plain = _num_blocks(checkpoints["qwen3"])
    for kind, row in ((INT8, 36), (INT4, 20)):
        blocks = _num_blocks(checkpoints["qwen3"], kv_cache_dtype=kind)
        assert blocks + 1 == (plain + 1) * 64 // row, "with the null block"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"calculate_kv_scales": True}, "a scale for each token and head"),
        ({"attention_backend": "sdpa"}, "'sdpa' cannot serve .*kv_cache_dtype not supported"),
    ],
)
def test_what_cannot_go_together_is_refused(checkpoints, settings, words):
    with pytest.raises(ConfigError, match=words):
        LLM(str(checkpoints["qwen3"]), **SETTINGS, kv_cache_dtype=INT8, **settings)


@pytest.mark.skipif(library.path() is None, reason="the native library is not built")
def test_steps_are_captured(checkpoints, caplog):
    folder = str(checkpoints["qwen3"])
    with (
        caplog.at_level(logging.INFO, "headrace_engine.execution"),
        LLM(folder, **SETTINGS, kv_cache_dtype=INT4),
    ):
        pass
    assert "captured steps of up to" in caplog.text
