"""Cache scales: measured once at start, from the same tokens, leaving nothing behind."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch

from headrace_core.errors import ConfigError, ModelError
from headrace_core.kv import KVCacheConfig
from headrace_core.sampling.params import SamplingParams
from headrace_engine.execution.capture import Capture
from headrace_engine.execution.kv_scales import (
    MEASURED_TOKENS,
    measure_kv_scales,
    measuring_batch,
)
from headrace_engine.execution.scale_constants import ScaleConstants
from headrace_engine.worker.settings import WorkerLimits

CONSTANTS = ScaleConstants(90.0, 100.0)


class Scaled:
    """A tiny layer with an int8 cache; remembers what it stored while it was measured."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.spec = layer.spec
        self.kv_spec = dataclasses.replace(layer.kv_spec, dtype="int8")
        self.backend = layer.backend
        self.measure: Any = None
        self.stored: list[tuple[Any, Any]] = []

    def bind_cache(self, kv_cache: Any, group: int) -> None:
        self.cache, self.group = kv_cache, group

    def measure_kv_scales(self, measure: Any) -> None:
        self.measure = measure

    def __call__(self, x: Any, batch: Any) -> Any:
        query, key, value = self.layer.project(x)
        if self.cache is None or not batch.groups:
            return x
        if self.measure is not None:
            self.stored.append((key, value))
            self.spec = self.measure(self.spec, key, value)
        scales = {"k_scale": self.spec.k_scale, "v_scale": self.spec.v_scale}
        where, ops = batch.groups[self.group], self.backend.ops
        ops.cache_write(key, value, self.cache[0], self.cache[1], where.slot_mapping, **scales)
        out = ops.paged_attention(
            query, self.cache[0], self.cache[1], where.block_table, batch.cu_seqlens_q,
            batch.seq_lens, max_seqlen_q=batch.max_seqlen_q, max_seqlen_k=batch.max_seqlen_k,
            scale=self.spec.scale, sliding_window=self.spec.sliding_window, **scales,
        )  # fmt: skip
        return x + out.reshape(x.shape)


class Incapable(Scaled):
    measure_kv_scales = None  # type: ignore[assignment]


def scaled_model(
    tiny: Any, windows: tuple[int | None, ...] = (None, None), kind: Any = Scaled
) -> Any:
    model = tiny.LM(windows)
    model.layers = [kind(layer) for layer in model.layers]
    return model


def started(tiny: Any, model: Any, **settings: Any) -> Any:
    """A harness whose worker has warmed up."""
    made = tiny.Harness(model, kv_scales=CONSTANTS, **settings)
    made.worker.warm_up()
    return made


def largest(layer: Scaled) -> list[tuple[float, float]]:
    return [(float(k.abs().max()), float(v.abs().max())) for k, v in layer.stored]


@pytest.mark.parametrize(
    "windows", [(None, None), (None, 6, None)], ids=["one-group", "two-groups"]
)
def test_every_layer_gets_its_own_and_nothing_stays(
    tiny: Any, windows: tuple[int | None, ...], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model = scaled_model(tiny, windows)
    started(tiny, model)
    for layer in model.layers:
        [(key, value)] = largest(layer)
        assert layer.measure is None
        assert layer.spec.k_scale.tolist() == pytest.approx([key / 90] * 2)
        assert layer.spec.v_scale.tolist() == pytest.approx([value / 100] * 2)
        assert not layer.cache.any()
    scales = {float(layer.spec.k_scale[0]) for layer in model.layers}
    assert len(scales) == len(windows), "each layer its own"
    [line] = [m for m in caplog.messages if m.startswith("cache scales of")]
    assert line.startswith(f"cache scales of {len(windows)} layers, measured in 0.")
    assert f"keys {min(scales):.3g} to {max(scales):.3g}" in line


def test_later_layers_see_what_they_see_in_service(tiny: Any) -> None:
    """The second layer's keys are those behind a first layer that already rounds."""
    model = scaled_model(tiny)
    made = started(tiny, model)
    batch = measuring_batch(
        made.config, vocab_size=tiny.VOCAB, max_model_len=tiny.MAX_LEN, device=torch.device("cpu")
    ).batch
    model.layers[1].measure = lambda spec, *_: spec
    with torch.inference_mode():
        model.forward(made.worker._ready().with_metadata(batch))
    first, again = model.layers[1].stored
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])


def test_they_are_the_same_whatever_else_is_configured(tiny: Any) -> None:
    """Steps of another size would otherwise change outputs."""
    found = []
    for tokens, seqs in ((64, 16), (5, 2)):
        model = scaled_model(tiny)
        limits = WorkerLimits(
            vocab_size=tiny.VOCAB,
            max_model_len=tiny.MAX_LEN,
            max_num_batched_tokens=tokens,
            max_num_seqs=seqs,
        )
        made = tiny.Harness(model, kv_scales=CONSTANTS, limits=limits)
        made.worker.warm_up()
        found.append([(layer.spec.k_scale, layer.spec.v_scale) for layer in model.layers])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


def test_requests_leave_them_alone(tiny: Any) -> None:
    model = scaled_model(tiny)
    made = started(tiny, model)
    before = [layer.spec for layer in model.layers]
    model.embed.data *= 3  # keys and values of requests are larger than what was measured
    tokens = made.generate(made.new("a", [1, 2, 3, 4, 5], SamplingParams(temperature=0)), 4)
    assert len(tokens) == 4
    assert all(layer.spec is spec for layer, spec in zip(model.layers, before))


def test_they_are_there_before_steps_are_captured(tiny: Any) -> None:
    model, seen = scaled_model(tiny), []

    def factory() -> None:  # "these kernels cannot be recorded"
        seen.extend(layer.spec.k_scale is not None for layer in model.layers)

    started(tiny, model, capture=Capture(factory, (8,)))
    assert seen == [True, True]


def test_without_being_asked_nothing_is_measured(tiny: Any) -> None:
    model = scaled_model(tiny)
    tiny.Harness(model).worker.warm_up()
    assert all(layer.spec.k_scale is None and not layer.stored for layer in model.layers)


# --- what is wrong with a model ---------------------------------------------------------------


def test_a_layer_that_cannot_is_named_with_its_class(tiny: Any) -> None:
    model = scaled_model(tiny, kind=Incapable)
    with pytest.raises(
        ConfigError, match=r"'layers.0' is a Incapable, .*measure_kv_scales"
    ) as caught:
        started(tiny, model)
    assert caught.value.field == "cache.calculate_kv_scales"


def test_a_model_with_nothing_to_measure_is_refused(tiny: Any) -> None:
    """As one of recurrent layers only is."""
    with pytest.raises(ConfigError, match="no layer of the model caches") as caught:
        started(tiny, tiny.LM())
    assert caught.value.field == "cache.calculate_kv_scales"


def test_a_layer_of_wide_numbers_needs_no_scales(tiny: Any) -> None:
    small, wide = scaled_model(tiny).layers[0], tiny.LM().layers[1]

    def run() -> None:
        small.spec = small.measure(small.spec, torch.ones(3, 2, 4), torch.ones(3, 2, 4))

    measure_kv_scales({"layers.0": small, "layers.1": wide}, CONSTANTS, run)
    assert small.spec.k_scale.tolist() == pytest.approx([1 / 90] * 2)
    assert wide.spec.k_scale is None


def run_with(model: Any, key: torch.Tensor, value: torch.Tensor) -> None:
    def run() -> None:
        for layer in model.layers:
            layer.spec = layer.measure(layer.spec, key, value)

    measure_kv_scales(model.attention_layers(), CONSTANTS, run)


def test_zeros_get_a_scale_of_one(tiny: Any) -> None:
    model, value = scaled_model(tiny), torch.ones(3, 2, 4)
    run_with(model, torch.zeros(3, 2, 4), value)
    assert model.layers[0].spec.k_scale.tolist() == [1, 1]
    assert model.layers[0].spec.v_scale.tolist() == pytest.approx([0.01, 0.01])
    run_with(model, value * 1e-45, value)  # the quotient is no float32
    assert model.layers[0].spec.k_scale.tolist() == [1, 1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("what", ["keys", "values"])
def test_what_is_not_finite_is_an_error_that_names_the_layer(
    tiny: Any, bad: float, what: str
) -> None:
    model, good = scaled_model(tiny), torch.ones(3, 2, 4)
    broken = good.clone()
    broken[1, 0, 2] = bad
    with pytest.raises(ModelError, match=f"{what} of layer 'layers.0' are not finite"):
        run_with(model, *((broken, good) if what == "keys" else (good, broken)))
    assert all(layer.measure is None for layer in model.layers)


def test_a_layer_that_the_pass_does_not_come_by_is_an_error(tiny: Any) -> None:
    model = scaled_model(tiny)
    with pytest.raises(ModelError, match=r"did not come by layers \['layers.0', 'layers.1'\]"):
        measure_kv_scales(model.attention_layers(), CONSTANTS, lambda: None)


# --- the batch --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("longest", "num_blocks", "windows", "expected"),
    [
        (96, 400, (None, None), 96),
        (5000, 400, (None, None), MEASURED_TOKENS),
        (5000, 11, (None, None), 40),  # ten blocks and the null block
        (5000, 11, (None, 6), 20),  # two groups share them
        (1, 400, (None, None), 1),
    ],
)
def test_the_prompt_fits_context_and_cache(
    tiny: Any, longest: int, num_blocks: int, windows: tuple[int | None, ...], expected: int
) -> None:
    groups = tiny.Harness(scaled_model(tiny, windows)).config.groups
    batch, (blocks,) = measuring_batch(
        KVCacheConfig((num_blocks,), groups), vocab_size=tiny.VOCAB, max_model_len=longest,
        device=torch.device("cpu"),
    )  # fmt: skip
    assert batch.num_tokens == int(batch.seq_lens[0]) == expected
    assert 0 <= int(batch.input_ids.min()) <= int(batch.input_ids.max()) < tiny.VOCAB
    slots = torch.cat([group.slot_mapping for group in batch.groups])
    assert len(slots.unique()) == len(groups) * expected, "no two tokens in one place"
    used = sorted({int(slot) // tiny.BLOCK_SIZE for slot in slots})
    assert used == list(range(blocks.start, blocks.stop)), "never the null block"
    assert used[-1] < num_blocks
    for group in batch.groups:
        tables = group.block_table[0, batch.positions // tiny.BLOCK_SIZE]
        assert torch.equal(
            group.slot_mapping, tables * tiny.BLOCK_SIZE + batch.positions % tiny.BLOCK_SIZE
        )


def test_the_prompt_is_always_the_same(tiny: Any) -> None:
    config = tiny.Harness(scaled_model(tiny)).config
    settings = {"vocab_size": 1000, "max_model_len": 64, "device": torch.device("cpu")}
    torch.manual_seed(1)
    first = measuring_batch(config, **settings).batch.input_ids
    torch.manual_seed(2)
    assert torch.equal(first, measuring_batch(config, **settings).batch.input_ids)
    assert len(first.unique()) > 50
