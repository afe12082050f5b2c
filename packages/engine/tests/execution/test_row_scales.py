"""Pages whose rows have scales: what is bound covers them, and nothing twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace_core.errors import ConfigError
from headrace_core.kv import FullAttentionSpec, KVCacheConfig, KVCacheGroup, MLASpec
from headrace_engine.execution.cache import bind_cache, split_rows, unbind

STORAGES = {"int8_per_token_head": torch.int8, "int4_per_token_head": torch.uint8}
BLOCKS = 5


@pytest.fixture(params=STORAGES)
def stored(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def bound(tiny: Any, stored: str) -> Any:
    model = tiny.LM()
    for layer in model.layers:
        layer.kv_spec = FullAttentionSpec(tiny.BLOCK_SIZE, 2, 4, stored)
    spec = model.layers[0].kv_spec
    config = KVCacheConfig((BLOCKS,), (KVCacheGroup(("layers.0", "layers.1"), spec),))
    buffers = bind_cache(model.attention_layers(), {}, config, torch.device("cpu"))
    return model, spec, buffers


@pytest.mark.parametrize(
    ("head_dim", "width"), [(128, (132, 68)), (64, (68, 36)), (6, (12, 8)), (2, (8, 8))]
)
def test_a_row_has_its_numbers_and_a_scale(head_dim: int, width: tuple[int, int]) -> None:
    for name, expected in zip(STORAGES, width, strict=True):
        spec = FullAttentionSpec(16, 8, head_dim, name)
        assert spec.row_width == expected
        assert spec.page_bytes == 2 * 16 * 8 * expected
    latent = MLASpec(16, 1, 576, "int8_per_token_head")
    assert latent.page_bytes == 16 * (576 + 8)


def test_layers_get_numbers_and_scales(tiny: Any, stored: str) -> None:
    model, spec, _ = bound(tiny, stored)
    for layer in model.layers:
        assert layer.cache.dtype is STORAGES[stored]
        assert layer.cache.shape == (2, BLOCKS, tiny.BLOCK_SIZE, 2, spec.row_numbers)
        for scale in (layer.spec.k_scale, layer.spec.v_scale):
            assert scale.shape == (BLOCKS, tiny.BLOCK_SIZE, 2)
            assert scale.dtype is torch.float32


def test_a_block_is_its_own_page(tiny: Any, stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers and scales of block 3 are its page's bytes, each once, where blocks come first."""
    backend = type(tiny.LM().layers[0].backend)
    monkeypatch.setattr(backend, "cache_stride_order", lambda self: (1, 0, 3, 2, 4))
    model, spec, buffers = bound(tiny, stored)
    layer = model.layers[0]
    layer.cache[:, 3] = 1
    layer.spec.k_scale[3] = layer.spec.v_scale[3] = 1.0
    touched = buffers[0][0].view(BLOCKS, spec.page_bytes) != 0
    assert not touched[:3].any()
    assert not touched[4:].any()
    # Of a float32 1.0 two bytes are not 0.
    rows = 2 * tiny.BLOCK_SIZE * 2
    assert int(touched[3].sum()) == rows * (spec.row_numbers + 2)
    layer.cache[:, 3] = 0
    assert (layer.spec.k_scale[3] == 1).all(), "numbers and scales overlap"


def test_scales_of_a_head_stand_behind_its_rows(stored: str) -> None:
    spec = FullAttentionSpec(16, 1, 128, stored)
    rows = torch.zeros(1, 1, 1, 16, spec.row_width, dtype=STORAGES[stored])
    numbers, scales = split_rows(rows, spec)
    assert numbers.stride()[-2:] == (spec.row_numbers, 1)
    assert scales.stride(-1) == 1
    assert scales.storage_offset() * 4 == 16 * spec.row_numbers


def test_scales_of_latents_follow_their_row(stored: str) -> None:
    """So that a token's place is a multiple of what tokens are apart, in numbers and in scales."""
    spec = MLASpec(16, 1, 576, stored)
    rows = torch.zeros(3, 16, spec.row_width, dtype=STORAGES[stored])
    numbers, scales = split_rows(rows, spec)
    assert numbers.stride(0) == 16 * numbers.stride(1)
    assert scales.stride(0) == 16 * scales.stride(1)
    assert scales.shape == (3, 16, 2)


def test_what_is_let_go_is_let_go(tiny: Any, stored: str) -> None:
    model, _, _ = bound(tiny, stored)
    unbind(model.attention_layers(), {})
    for layer in model.layers:
        assert layer.cache is None
        assert layer.spec.k_scale is None
        assert layer.spec.v_scale is None


def test_a_backend_that_tears_rows_apart_is_refused(
    tiny: Any, stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = type(tiny.LM().layers[0].backend)
    monkeypatch.setattr(backend, "cache_stride_order", lambda self: (1, 0, 3, 4, 2))
    with pytest.raises(ConfigError, match="does not keep a row together"):
        bound(tiny, stored)
