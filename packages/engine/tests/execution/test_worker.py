"""The worker's life: load, profile, allocate, warm up, run, close."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import pytest
import torch

from headrace_core.errors import (
    CapacityError,
    ConfigError,
    ModelError,
    RequestError,
    UnsupportedFeature,
    WeightsError,
)
from headrace_core.executor import MemoryProfile
from headrace_core.kv import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from headrace_core.ops import KernelNeed, bind_ops
from headrace_core.sampling.params import SamplingParams
from headrace_core.step import ScheduledStep
from headrace_engine.execution import ModelWorker
from headrace_engine.worker.settings import (
    AheadBytes,
    SamplingSettings,
    WeightSettings,
    WorkerLimits,
    WorkerSettings,
)
from headrace_testing.fakes.requests import new_request

LIMITS = WorkerLimits(vocab_size=37, max_model_len=96, max_num_batched_tokens=64, max_num_seqs=16)


def make_worker(model: Any, **changes: Any) -> ModelWorker:
    """A worker that builds a model.

    Args:
        changes: further fields of its settings.
    """
    settings = WorkerSettings(
        build_model=lambda: model,
        ops=bind_ops(KernelNeed("cpu", "float32"), choose={"*": "reference"}),
        device="cpu",
        dtype="float32",
        limits=LIMITS,
    )
    return ModelWorker(dataclasses.replace(settings, **changes))


def config_for(tiny: Any, num_blocks: int = 50) -> KVCacheConfig:
    spec = FullAttentionSpec(tiny.BLOCK_SIZE, 2, 4, "float32")
    return KVCacheConfig((num_blocks,), (KVCacheGroup(("layers.0", "layers.1"), spec),))


def test_kv_specs_are_in_execution_order_without_cacheless_layers(tiny: Any) -> None:
    model = tiny.LM((None, 6, None))
    model.layers[2].kv_spec = None
    worker = make_worker(model)
    worker.load()
    assert worker.kv_specs() == {
        "layers.0": model.layers[0].kv_spec,
        "layers.1": model.layers[1].kv_spec,
    }


@pytest.mark.req("REL-23")
def test_the_profile_runs_the_largest_step_without_a_cache(tiny: Any) -> None:
    model = tiny.LM()
    worker = make_worker(model)
    worker.load()
    profile = worker.profile()
    assert max(model.forwards) == 64
    assert max(model.logit_rows) == 16
    assert profile.weights >= sum(p.numel() * 4 for p in model.parameters())
    assert profile.activations >= 16 * 37 * 4
    assert profile.available > 0


@pytest.mark.req("REL-23")
def test_weights_that_are_packed_already_were_free_and_are_weights(tiny: Any) -> None:
    """Whatever else the process gives back or takes meanwhile."""
    packed = 1 << 45
    weights = WeightSettings(packed_ahead=lambda: AheadBytes(packed, packed))
    plain, ahead = make_worker(tiny.LM()), make_worker(tiny.LM(), weights=weights)
    profiles = []
    for worker in (plain, ahead):
        worker.load()
        profiles.append(worker.profile())
    assert profiles[0].available < packed // 2 < profiles[1].available
    assert profiles[0].weights < packed // 2 < profiles[1].weights


@pytest.mark.parametrize(
    ("tokens", "seqs", "longest", "most"),
    [(500, 1, 96, 96), (500, 2, 96, 192), (64, 16, 3, 48), (4, 16, 96, 4), (1, 1, 1, 1)],
)
def test_no_position_of_a_dummy_step_is_beyond_the_context(
    tiny: Any, tokens: int, seqs: int, longest: int, most: int
) -> None:
    class Checked(tiny.LM):  # type: ignore[misc, name-defined]
        def forward(self, batch: Any) -> torch.Tensor:
            assert int(batch.positions.max()) < longest
            assert int(batch.seq_lens.max()) == batch.max_seqlen_k <= longest
            assert batch.num_seqs <= seqs
            assert int(batch.cu_seqlens_q[-1]) == batch.num_tokens
            return super().forward(batch)

    model = Checked()
    limits = dataclasses.replace(
        LIMITS, max_num_batched_tokens=tokens, max_num_seqs=seqs, max_model_len=longest
    )
    worker = make_worker(model, limits=limits)
    worker.load()
    worker.profile()
    worker.allocate_cache(config_for(tiny))
    worker.warm_up()
    assert max(model.forwards) == most


@pytest.mark.req("REL-23")
def test_a_cache_that_no_system_can_give_is_named_with_its_size(tiny: Any) -> None:
    worker = make_worker(tiny.LM())
    worker.load()
    config = config_for(tiny, num_blocks=1 << 45)
    with pytest.raises(MemoryError, match=r"a KV cache of [\d.]+ [GTP]iB: the system refused"):
        worker.allocate_cache(config)


@pytest.mark.req("REL-23")
def test_the_profile_sees_what_a_step_takes(tiny: Any) -> None:
    """100 MiB more in a step are 100 MiB more in the profile, within a tenth."""

    class Hungry(tiny.LM):  # type: ignore[misc, name-defined]
        def forward(self, batch: Any) -> torch.Tensor:
            if batch.num_tokens == 64 and batch.num_seqs == 16:
                torch.ones(100 << 18)
            return super().forward(batch)

    worker = make_worker(Hungry())
    worker.load()
    assert worker.profile().activations == pytest.approx(100 << 20, rel=0.1)


@pytest.mark.req("REL-23")
def test_a_large_step_is_reckoned_from_small_ones(tiny: Any) -> None:
    """128 KiB a token and 256 KiB a sampled row are found again in a step that was never run."""

    class Hungry(tiny.LM):  # type: ignore[misc, name-defined]
        def forward(self, batch: Any) -> torch.Tensor:
            torch.ones(batch.num_tokens << 15)
            return super().forward(batch)

        def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
            torch.ones(hidden.shape[0] << 16)
            return super().compute_logits(hidden)

    model = Hungry()
    limits = dataclasses.replace(LIMITS, max_num_batched_tokens=4096, max_num_seqs=64)
    worker = make_worker(model, limits=limits)
    worker.load()
    profile = worker.profile()
    assert max(model.forwards) <= 256
    assert max(model.logit_rows) <= 16
    # Both, though they are not held at once; and the rows' own tokens.
    assert 0.9 * (512 << 20) < profile.activations < 1.2 * (512 + 16 + 8 << 20)
    assert profile.step_seconds > 0


def test_warm_up_leaves_no_trace(tiny: Any) -> None:
    model = tiny.LM()
    worker = make_worker(model)
    worker.load()
    worker.profile()
    worker.allocate_cache(config_for(tiny))
    worker.warm_up()
    assert {1, 16} <= set(model.forwards)
    assert all(not layer.cache.any() for layer in model.layers)
    prompt = [3, 1, 4, 1, 5]
    new = new_request("a", prompt, ([7, 3],))
    result = worker.execute(ScheduledStep(1, {"a": 5}, new_requests=[new]))
    assert result.requests["a"].token_ids == model.dense_greedy(prompt, 1)
    assert result.forward_seconds > 0
    used = model.layers[0].cache.flatten(2).any(-1).any(0).nonzero().flatten().tolist()
    assert used == [3, 7]


def test_order_of_calls_is_checked(tiny: Any) -> None:
    worker = make_worker(tiny.LM())
    with pytest.raises(ModelError, match="load"):
        worker.kv_specs()
    worker.load()
    with pytest.raises(ModelError, match="allocate_cache"):
        worker.execute(ScheduledStep(1, {}))


def test_close_frees_the_cache_and_may_be_called_twice(tiny: Any) -> None:
    model = tiny.LM()
    worker = make_worker(model)
    worker.load()
    worker.allocate_cache(config_for(tiny))
    cache = weakref.ref(model.layers[0].cache)
    worker.close()
    worker.close()
    gc.collect()
    assert cache() is None
    with pytest.raises(ModelError):
        worker.execute(ScheduledStep(1, {}))


def test_weights_are_read_again_under_the_same_plan(tiny: Any) -> None:
    old, new = tiny.LM(), tiny.LM()
    gone, seen = weakref.ref(old), list[Any]()

    def rebuild(changes: Any) -> Any:
        gc.collect()
        seen.append((dict(changes), gone() is None))  # memory for one model is enough
        return new

    build = [old].pop  # keeps nothing, as the lambda of make_worker would
    worker = make_worker(None, build_model=build, weights=WeightSettings(rebuild_model=rebuild))
    del old
    worker.load()
    worker.allocate_cache(config_for(tiny))
    worker.warm_up()
    worker.update_config({"load_config": {"load_format": "auto"}})
    worker.reload_weights()
    assert seen == [({"load_format": "auto"}, True)]
    assert new.forwards  # warmed up
    assert worker.execute(ScheduledStep(step_id=0, num_scheduled_tokens={})) is not None
    worker.close()


def test_weights_that_cannot_be_read_are_read_later(tiny: Any) -> None:
    def rebuild(changes: Mapping[str, str]) -> Any:
        if changes:
            raise WeightsError("model.safetensors: it is torn")
        return tiny.LM()

    worker = make_worker(tiny.LM(), weights=WeightSettings(rebuild_model=rebuild))
    worker.load()
    worker.allocate_cache(config_for(tiny))
    worker.warm_up()
    worker.update_config({"load_config": {"load_format": "auto"}})
    with pytest.raises(WeightsError, match="torn"):
        worker.reload_weights()
    with pytest.raises(ModelError, match="no model"):
        worker.execute(ScheduledStep(0, {}))
    worker.update_config({"load_config": {}})
    worker.reload_weights()
    assert worker.execute(ScheduledStep(1, {})).requests == {}


def test_a_worker_that_reads_its_weights_once(tiny: Any) -> None:
    worker = make_worker(tiny.LM())
    worker.load()
    worker.allocate_cache(config_for(tiny))
    with pytest.raises(UnsupportedFeature, match="reads its weights once"):
        worker.reload_weights()


@pytest.mark.parametrize(
    "changes",
    [None, {}, {"load": {}}, {"load_config": 3}, {"load_config": {"load_format": 3}},
     {"load_config": {"model_loader_extra_config": {"tensorizer_uri": "/etc/passwd"}}},
     {"load_config": {}, "model_config": {}}],
)  # fmt: skip
def test_only_how_weights_are_read_may_change(tiny: Any, changes: Any) -> None:
    with pytest.raises(RequestError, match=r"must be \{'load_config'"):
        make_worker(tiny.LM()).update_config(changes)


def test_a_strategy_that_there_is_not_is_refused_before_the_model_is_gone(tiny: Any) -> None:
    changes = {"load_config": {"safetensors_load_strategy": "psychic"}}
    with pytest.raises(RequestError, match=r"safetensors_load_strategy.*'psychic'"):
        make_worker(tiny.LM()).update_config(changes)


def test_an_empty_step(tiny: Any) -> None:
    worker = make_worker(tiny.LM())
    worker.load()
    worker.allocate_cache(config_for(tiny))
    assert worker.execute(ScheduledStep(4, {})).requests == {}


def test_it_says_when_the_model_is_about_to_run(tiny: Any) -> None:
    model, seen = tiny.LM(), []
    worker = make_worker(model)
    worker.when_launching(lambda: seen.append(len(model.forwards)))
    worker.load()
    worker.allocate_cache(config_for(tiny))
    ran = len(model.forwards)
    new = new_request("a", [1, 2], ([1],), SamplingParams())
    worker.execute(ScheduledStep(1, {"a": 2}, [new]))
    worker.execute(ScheduledStep(2, {"a": 1}))
    assert seen == [ran, ran + 1]
    assert len(model.forwards) == ran + 2


def test_layers_of_one_group_need_one_kind_of_backend(tiny: Any) -> None:
    model = tiny.LM()
    model.layers[1].backend = tiny.BlocksFirst(model.layers[0].backend.ops)
    worker = make_worker(model)
    worker.load()
    with pytest.raises(ConfigError, match=r"test-blocks-first.*test-paged"):
        worker.allocate_cache(config_for(tiny))


def test_layers_that_share_a_tensor_need_one_layout(tiny: Any) -> None:
    model = tiny.LM((None, 6))
    model.layers[1].backend = tiny.BlocksFirst(model.layers[0].backend.ops)
    worker = make_worker(model)
    worker.load()
    groups = tuple(KVCacheGroup((name,), spec) for name, spec in worker.kv_specs().items())
    with pytest.raises(ConfigError, match="share a pool of blocks"):
        worker.allocate_cache(KVCacheConfig((20,), groups))


def test_groups_share_tensors(tiny: Any) -> None:
    model = tiny.LM((None, 6))
    worker = make_worker(model)
    worker.load()
    groups = tuple(KVCacheGroup((name,), spec) for name, spec in worker.kv_specs().items())
    worker.allocate_cache(KVCacheConfig((20,), groups))
    first, second = (layer.cache for layer in model.layers)
    assert first.data_ptr() == second.data_ptr()
    assert [layer.group for layer in model.layers] == [0, 1]


def test_a_wrong_mode_is_refused_before_anything_is_loaded(tiny: Any) -> None:
    with pytest.raises(ConfigError, match="logprobs_mode"):
        make_worker(tiny.LM(), sampling=SamplingSettings(logprobs_mode="some"))


def test_the_profile_is_a_memory_profile(tiny: Any) -> None:
    worker = make_worker(tiny.LM())
    worker.load()
    assert isinstance(worker.profile(), MemoryProfile)


def test_memory_is_given_back_and_taken_again(tiny: Any) -> None:
    models = [tiny.LM(), tiny.LM(), tiny.LM()]
    gone, seen = weakref.ref(models[0]), list[dict[str, str]]()

    def rebuild(changes: Mapping[str, str]) -> Any:
        if changes.get("load_format") == "psychic":
            raise WeightsError("model.safetensors: it is torn")
        seen.append(dict(changes))
        return models.pop(0)

    weights = WeightSettings(rebuild_model=rebuild)
    worker = make_worker(None, build_model=lambda: models.pop(0), weights=weights)
    worker.load()
    worker.allocate_cache(config_for(tiny))
    worker.warm_up()
    worker.give_back_memory()
    assert gone() is None
    assert worker.report()["weights_bytes"] == worker.report()["cache_bytes"] == 0
    with pytest.raises(ModelError, match="no model"):
        worker.execute(ScheduledStep(0, {}))
    worker._load_changes = {"load_format": "psychic"}
    with pytest.raises(WeightsError, match="torn"):
        worker.read_weights(True)
    worker.read_weights(False)  # as they were read before, whatever was to change
    assert seen == [{}]
    with pytest.raises(ModelError, match="no cache"):
        worker.execute(ScheduledStep(0, {}))
    assert worker.restore_cache(), "warm_up() comes next"
    worker.warm_up()
    assert worker.report()["cache_bytes"] > 0
    assert worker.execute(ScheduledStep(1, {})).requests == {}
    worker.update_config({"load_config": {"load_format": "dummy"}})
    worker.give_back_memory()
    worker.read_weights(True)
    assert seen[-1] == {"load_format": "dummy"}
    worker.close()


def test_a_worker_that_reads_its_weights_once_does_not_sleep(tiny: Any) -> None:
    worker = make_worker(tiny.LM())
    worker.load()
    worker.allocate_cache(config_for(tiny))
    with pytest.raises(UnsupportedFeature, match="sleep: this worker reads its weights once"):
        worker.give_back_memory()
    assert worker.execute(ScheduledStep(0, {})).requests == {}


class FakePool:
    """A :class:`headrace_engine.sleep.memory_pool.MemoryPool` that tells what it was asked."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.error: Exception | None = None

    @contextlib.contextmanager
    def use(self, tag: str) -> Iterator[None]:
        self.told.append(f"use {tag}")
        yield

    def sleep(self, tags: Iterable[str], kept: Collection[str] = ()) -> None:
        self.told.append(f"sleep {' '.join(tags)}, kept {' '.join(kept) or 'nothing'}")
        if self.error is not None:
            raise self.error

    def wake(self, tags: Iterable[str]) -> None:
        self.told.append(f"wake {' '.join(tags)}")
        if self.error is not None:
            raise self.error

    def num_bytes(self, tag: str) -> int:
        return 0


def test_memory_that_sleeps_below_objects_that_stay(tiny: Any) -> None:
    """Level 1 neither reads nor captures again; level 2 lets everything go."""
    models, pool, seen = [tiny.LM()], FakePool(), list[dict[str, str]]()

    def rebuild(changes: Mapping[str, str]) -> Any:
        seen.append(dict(changes))
        return tiny.LM()

    weights = WeightSettings(rebuild_model=rebuild, memory_pool=pool)
    worker = make_worker(None, build_model=lambda: models.pop(0), weights=weights)
    worker.load()
    worker.allocate_cache(config_for(tiny))
    worker.warm_up()
    assert pool.told == ["use weights", "use kv_cache"]
    pool.told.clear()
    before = worker.get_model(), worker._ready(), worker._buffers
    worker.give_back_memory(True)
    worker.read_weights(False)
    assert not worker.restore_cache()
    assert pool.told == ["sleep weights kv_cache, kept weights", "wake weights", "wake kv_cache"]
    assert (worker.get_model(), worker._ready(), worker._buffers) == before
    assert worker.execute(ScheduledStep(1, {})).requests == {}
    assert seen == []

    pool.told.clear()
    worker.give_back_memory(True)
    worker.read_weights(True)  # others: what was kept is of no use
    assert worker.restore_cache()
    assert pool.told == [
        "sleep weights kv_cache, kept weights",
        "wake weights", "use weights", "wake kv_cache", "use kv_cache",
    ]  # fmt: skip
    assert worker.get_model() is not before[0]

    pool.told.clear()
    worker.give_back_memory(False)
    assert pool.told == ["sleep weights kv_cache, kept nothing"]
    with pytest.raises(ModelError, match="no model"):
        worker.execute(ScheduledStep(2, {}))
    worker.give_back_memory(True)  # nothing is there to be kept
    worker.read_weights(True)
    worker.restore_cache()
    assert worker.execute(ScheduledStep(3, {})).requests == {}
    worker.close()


def test_a_host_that_cannot_keep_the_weights_leaves_them_awake(tiny: Any) -> None:
    pool = FakePool()
    worker = make_worker(
        tiny.LM(), weights=WeightSettings(rebuild_model=lambda changes: tiny.LM(), memory_pool=pool)
    )
    worker.load()
    worker.allocate_cache(config_for(tiny))
    pool.error = CapacityError("the host is full")
    woken: list[str] = []
    pool.wake = woken.extend  # type: ignore[method-assign]
    with pytest.raises(CapacityError, match="the host is full"):
        worker.give_back_memory(True)
    assert woken == ["weights", "kv_cache"]
    assert worker.execute(ScheduledStep(1, {})).requests == {}


def test_a_device_without_room_sleeps_on(tiny: Any) -> None:
    pool = FakePool()
    worker = make_worker(
        tiny.LM(), weights=WeightSettings(rebuild_model=lambda changes: tiny.LM(), memory_pool=pool)
    )
    worker.load()
    worker.allocate_cache(config_for(tiny))
    model = worker.get_model()
    worker.give_back_memory(True)
    pool.error = CapacityError("the device is full")
    with pytest.raises(CapacityError, match="the device is full"):
        worker.read_weights(False)
    pool.error = None
    worker.read_weights(False)
    worker.restore_cache()
    assert worker.get_model() is model
