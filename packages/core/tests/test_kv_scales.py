from __future__ import annotations

import pytest

from headrace_core.config import CacheConfig
from headrace_core.errors import ConfigError
from headrace_core.kv import CACHE_DTYPES
from headrace_core.kv_scales import LARGEST, ScaleConstants, scale_constants

pytestmark = pytest.mark.spec("KV-QUANT")


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("float8_e4m3", (200, 100)), ("float8_e5m2", (200, 100)), ("int8", (90, 90))],
)
def test_constants_leave_headroom(dtype, expected):
    constants = scale_constants(dtype, {})
    assert constants == expected
    assert max(constants) < LARGEST[dtype]


def test_every_one_byte_cache_has_a_range():
    assert set(LARGEST) == {dtype for dtype in CACHE_DTYPES.values() if dtype}


def test_the_environment_replaces_them_one_by_one():
    environ = {"K_SCALE_CONSTANT": "127", "V_SCALE_CONSTANT": ""}
    assert scale_constants("int8", environ) == ScaleConstants(127, 90)
    assert scale_constants("float8_e4m3", {"V_SCALE_CONSTANT": "12.5"}) == (200, 12.5)


@pytest.mark.parametrize("variable", ["K_SCALE_CONSTANT", "V_SCALE_CONSTANT"])
@pytest.mark.parametrize(
    ("dtype", "text"),
    [("int8", "128"), ("float8_e4m3", "448.5"), ("float8_e5m2", "inf")]
    + [("int8", text) for text in ("many", "nan", "-3", "0", "0.5")],
)
def test_a_constant_that_cannot_be(variable, dtype, text):
    with pytest.raises(ConfigError, match=variable) as caught:
        scale_constants(dtype, {variable: text})
    assert repr(text) in str(caught.value)
    assert f"between 1 and {LARGEST[dtype]:g}" in str(caught.value)


def test_int8_without_measured_scales_is_refused():
    with pytest.raises(ConfigError) as caught:
        CacheConfig(kv_cache_dtype="int8")
    for part in ("cache.kv_cache_dtype = 'int8'", "cache.calculate_kv_scales = True",
                 "--calculate-kv-scales"):  # fmt: skip
        assert part in str(caught.value)


def test_measuring_for_a_cache_without_scales_is_refused():
    with pytest.raises(ConfigError) as caught:
        CacheConfig(calculate_kv_scales=True)
    assert "cache.calculate_kv_scales = True" in str(caught.value)
    assert "cache.kv_cache_dtype = 'auto'" in str(caught.value)


@pytest.mark.parametrize("kind", [kind for kind, dtype in CACHE_DTYPES.items() if dtype])
def test_every_one_byte_cache_may_be_measured(kind):
    assert CacheConfig(kv_cache_dtype=kind, calculate_kv_scales=True).calculate_kv_scales
