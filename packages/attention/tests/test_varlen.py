"""``varlen`` keeps the contract of attention without a cache."""

from __future__ import annotations

import itertools

import pytest
import torch

from headrace_attention import varlen
from headrace_attention.varlen import LONG, VarlenBackend
from headrace_core.attention import AttentionLayerSpec
from headrace_core.ops import OpTable
from headrace_testing.attention.backends import assert_near
from headrace_testing.attention.encoders import EncoderBackendConformance
from headrace_testing.ops import varlen_case


class TestVarlen(EncoderBackendConformance):
    backend_class = VarlenBackend


def test_it_caches_nothing() -> None:
    assert "decoder" not in VarlenBackend.supported_attention_types


LENGTHS = [(3, 5), (LONG, 2 * LONG), (3, LONG, 7, 9, 200, LONG - 1), (1, 300), (250, 4), (0, 90, 0)]


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_towers_on_matrix_units(
    reference_ops: OpTable, monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...], kv_heads: int
) -> None:
    """Long sequences by torch, which is there on any CPU; each the same bits in any company."""
    asked: list[int] = []
    torchs = varlen.attend_alone
    monkeypatch.setattr(varlen, "_has_matrix_units", lambda: True)
    monkeypatch.setattr(varlen, "attend_alone", lambda *a: (asked.append(len(a[1])), torchs(*a))[1])
    case = varlen_case(lengths, dtype="bfloat16", num_heads=4, num_kv_heads=kv_heads, head_dim=72)
    layer = AttentionLayerSpec(
        "tower.0", 4, kv_heads, 72, case.options["scale"], attention_type="encoder"
    )
    backend = VarlenBackend(reference_ops)

    def attend(rows: slice, starts: list[int]) -> torch.Tensor:
        cu_seqlens = torch.tensor(starts, dtype=torch.int32)
        longest = int(cu_seqlens.diff().max())
        parts = (case.query[rows], case.key[rows], case.value[rows])
        return backend.attend(layer, *parts, cu_seqlens, longest)

    starts = case.cu_seqlens.tolist()
    together = attend(slice(0, starts[-1]), starts)
    assert together.is_contiguous()
    assert asked == [length for length in lengths if length >= LONG]
    assert_near(together, case.expected(), "bfloat16")
    for begin, end in itertools.pairwise(starts):
        if begin < end:
            assert torch.equal(attend(slice(begin, end), [0, end - begin]), together[begin:end])


@pytest.mark.parametrize(
    ("kind", "dtype", "units"),
    [
        ("encoder_only", "bfloat16", True),
        ("encoder", "float32", True),
        ("encoder", "bfloat16", False),
    ],
)
def test_all_else_by_the_op(
    reference_ops: OpTable, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: str, units: bool
) -> None:
    monkeypatch.setattr(varlen, "_has_matrix_units", lambda: units)
    monkeypatch.setattr(varlen, "attend_alone", lambda *_: pytest.fail("by torch"))
    case = varlen_case((3, 100), dtype=dtype)
    heads, kv_heads, size = case.query.shape[1], case.key.shape[1], case.query.shape[2]
    layer = AttentionLayerSpec(
        "layer.0", heads, kv_heads, size, case.options["scale"], attention_type=kind
    )
    found = VarlenBackend(reference_ops).attend(
        layer, case.query, case.key, case.value, case.cu_seqlens, 100
    )
    assert_near(found, case.expected(), dtype)
