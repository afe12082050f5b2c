from __future__ import annotations

import pytest

from headrace_core.attention import LARGEST
from headrace_core.errors import ConfigError
from headrace_core.kv import CACHE_DTYPES, ROW_SCALED_BITS
from headrace_engine.execution.scale_constants import ScaleConstants, scale_constants


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("float8_e4m3", (200, 100)), ("float8_e5m2", (200, 100)), ("int8", (90, 90))],
)
def test_constants_leave_headroom(dtype, expected):
    constants = scale_constants(dtype, {})
    assert constants == expected
    assert max(constants) < LARGEST[dtype]


def test_every_one_byte_cache_has_a_range():
    constant = {dtype for dtype in CACHE_DTYPES.values() if dtype and dtype not in ROW_SCALED_BITS}
    assert set(LARGEST) == constant


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
