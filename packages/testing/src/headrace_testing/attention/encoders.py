"""Conformance suite of attention in both directions, without a cache.

A backend's tests are one class::

    class TestMine(EncoderBackendConformance):
        backend_class = MyBackend

What the backend refuses is not tested, what it does not refuse must be right.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from headrace_core.attention import (
    SLIDING_WINDOW,
    SOFT_CAP,
    UNCACHED_TYPES,
    AttentionLayerSpec,
    AttentionNeed,
    EncoderBackend,
)
from headrace_core.ops import KernelNeed, OpTable, bind_ops
from headrace_testing.attention.backends import DTYPES, assert_near
from headrace_testing.ops import VarlenCase, varlen_case

LENGTHS = (1, 5, 64)

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no grouping": {"num_heads": 3, "num_kv_heads": 3},
    "one kv head": {"num_heads": 8, "num_kv_heads": 1},
    "odd head size": {"head_dim": 20},
    "window 1": {"sliding_window": 1},
    "window 7": {"sliding_window": 7},
    "window of nothing": {"sliding_window": 0},
    "soft cap": {"soft_cap": 5.0},
    "distance bias": {"reach": 64},
    "wide distance bias, window": {"reach": 90, "sliding_window": 9},
    "fewer keys": {"key_lens": (1, 3, 40)},
    "fewer keys, distance bias": {"key_lens": (1, 5, 7), "reach": 64},
    "rows that see nothing": {"key_lens": (1, 1, 20), "sliding_window": 4},
    "rows that see nothing, distance bias": {
        "key_lens": (0, 1, 20),
        "sliding_window": 4,
        "reach": 64,
    },
}


class EncoderBackendConformance:
    """Inherit, set ``backend_class``; every test of the contract then runs against it."""

    backend_class: ClassVar[type[EncoderBackend]]

    @pytest.fixture
    def ops(self) -> OpTable:
        """The ops handed to the backend."""
        return bind_ops(KernelNeed("cpu", "float32"), choose={"*": "reference"})

    @pytest.fixture
    def backend(self, ops: OpTable) -> EncoderBackend:
        return self.backend_class(ops)

    def case(
        self,
        dtype: str = "float32",
        *,
        reach: int = 0,
        key_lens: Sequence[int] | None = None,
        **options: Any,
    ) -> VarlenCase:
        """Sequences of :data:`LENGTHS`; skips what the backend refuses."""
        if key_lens is not None:
            options["key_lens"] = torch.tensor(key_lens, dtype=torch.int32)
        case = varlen_case(LENGTHS, dtype=dtype, **options)
        need = AttentionNeed(
            head_dim=case.query.shape[2],
            dtype=dtype,
            kv_cache_dtype="auto",
            block_size=16,
            attention_type="encoder_only",
            features=frozenset(options) & {SLIDING_WINDOW, SOFT_CAP},
        )
        reasons = self.backend_class.refuse(need)
        if reasons:
            pytest.skip(f"{self.backend_class.name} refuses: {'; '.join(reasons)}")
        if reach:
            bias = torch.randn(case.query.shape[1], 2 * reach - 1)
            case = dataclasses.replace(case, options={**case.options, "distance_bias": bias})
        return case

    def attend(self, backend: EncoderBackend, case: VarlenCase, **changes: Any) -> Tensor:
        layer = AttentionLayerSpec(
            name="layers.0.attention",
            num_heads=case.query.shape[1],
            num_kv_heads=case.key.shape[1],
            head_dim=case.query.shape[2],
            scale=case.options["scale"],
            sliding_window=case.options.get("sliding_window"),
            attention_type="encoder_only",
            extras={name: case.options[name] for name in ("soft_cap",) if name in case.options},
        )
        longest = int(case.cu_seqlens.diff().max())
        arguments = (case.query, case.key, case.value, case.cu_seqlens, longest)
        bias, lens = case.options.get("distance_bias"), case.options.get("key_lens")
        return backend.attend(layer, *arguments, distance_bias=bias, key_lens=lens, **changes)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
    def test_attends(self, backend: EncoderBackend, options: dict[str, Any], dtype: str) -> None:
        case = self.case(dtype, **options)
        assert_near(self.attend(backend, case), case.expected(), dtype)

    @pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
    def test_sequences_do_not_see_each_other(
        self, backend: EncoderBackend, options: dict[str, Any]
    ) -> None:
        """Each alone gives what it gives in the batch."""
        case = self.case(**options)
        together = self.attend(backend, case)
        for b in range(len(LENGTHS)):
            start, end = case.cu_seqlens[b : b + 2].tolist()
            alone = self.attend(backend, case.sequence(b))
            assert_near(alone, together[start:end].double(), "float32")

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_output_is_contiguous_and_of_the_querys_dtype(
        self, backend: EncoderBackend, dtype: str
    ) -> None:
        case = self.case(dtype)
        fused = case.query.untyped_storage()
        before = torch.tensor([], dtype=case.query.dtype).set_(fused).clone()
        out = self.attend(backend, case)
        assert (out.shape, out.dtype) == (case.query.shape, case.query.dtype)
        assert out.is_contiguous()
        after = torch.tensor([], dtype=case.query.dtype).set_(fused)
        assert torch.equal(after, before), "no input may be changed"

    def test_says_what_it_serves(self) -> None:
        """Both kinds of encoder, whatever is said of a cache that there is not."""
        for attention_type in UNCACHED_TYPES:
            need = AttentionNeed(
                head_dim=next(iter(self.backend_class.supported_head_dims), 64),
                dtype=self.backend_class.supported_dtypes[0],
                kv_cache_dtype="fp8",
                block_size=24,
                device=self.backend_class.supported_devices[0],
                attention_type=attention_type,
            )
            assert self.backend_class.refuse(need) == []
            refused = dataclasses.replace(need, attention_type="sideways")
            assert "attention type sideways not supported" in self.backend_class.refuse(refused)
