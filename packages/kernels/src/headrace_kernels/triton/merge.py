"""Joining two attention results over disjoint parts of the keys (ATTN-MERGE).

With log-sum-exps lp and ls of the parts, ``m = max(lp, ls)``, ``wp = exp(lp - m)`` and
``ws = exp(ls - m)``: ``output = (wp op + ws os) / (wp + ws)``, ``lse = m + ln(wp + ws)``
(Milakov & Gimelshein 2018, arXiv:1805.02867; used as here in FlashInfer, arXiv:2501.01005).
"""

# Kernels are traced by triton, not called: their parameters have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headrace_kernels.triton.launch import padded


@triton.jit
def _load_lse(lse_ptr, at):
    """Some libraries say +inf for a row without keys; it is -inf here."""
    lse = tl.load(lse_ptr + at).to(tl.float32)
    return tl.where(lse == float("inf"), float("-inf"), lse)


@triton.jit
def _merge_kernel(
    out_ptr,
    out_lse_ptr,
    prefix_ptr,
    prefix_lse_ptr,
    suffix_ptr,
    suffix_lse_ptr,
    out_strides,
    prefix_strides,
    suffix_strides,
    num_tokens,
    HEAD_DIM: tl.constexpr,
    D_BLOCK: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dim = tl.arange(0, D_BLOCK)
    inside = dim < HEAD_DIM
    at = head * num_tokens + token
    prefix_lse = _load_lse(prefix_lse_ptr, at)
    suffix_lse = _load_lse(suffix_lse_ptr, at)
    top = tl.maximum(prefix_lse, suffix_lse)
    shift = tl.where(top == float("-inf"), 0.0, top)  # -inf - -inf would be NaN
    prefix_weight = tl.exp(prefix_lse - shift)
    suffix_weight = tl.exp(suffix_lse - shift)
    total = prefix_weight + suffix_weight

    prefix_at = prefix_ptr + token * prefix_strides[0] + head * prefix_strides[1]
    suffix_at = suffix_ptr + token * suffix_strides[0] + head * suffix_strides[1]
    prefix = tl.load(prefix_at + dim * prefix_strides[2], mask=inside, other=0.0).to(tl.float32)
    suffix = tl.load(suffix_at + dim * suffix_strides[2], mask=inside, other=0.0).to(tl.float32)
    # A part without keys may hold anything, NaN included; it is left out, not multiplied by 0.
    prefix = tl.where(prefix_weight == 0.0, 0.0, prefix * prefix_weight)
    suffix = tl.where(suffix_weight == 0.0, 0.0, suffix * suffix_weight)
    out = (prefix + suffix) / tl.where(total == 0.0, 1.0, total)
    out_at = out_ptr + token * out_strides[0] + head * out_strides[1]
    tl.store(out_at + dim * out_strides[2], out.to(out_ptr.dtype.element_ty), mask=inside)
    if HAS_LSE:
        lse = tl.where(total == 0.0, float("-inf"), shift + tl.log(total))
        tl.store(out_lse_ptr + at, lse)


def merge_attn_states(
    output: Tensor,
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
    output_lse: Tensor | None = None,
) -> None:
    """Write the joint result to ``output``, and its log-sum-exp to ``output_lse`` if given.

    Args:
        output: [T, Hq, D]; shares no memory with the inputs.
        prefix_output, suffix_output: [T, Hq, D], any strides.
        prefix_lse, suffix_lse: [Hq, T] float32, natural logarithm; -inf or +inf = no keys.
        output_lse: [Hq, T] float32, contiguous; -inf where neither part has keys (output 0).
    """
    num_tokens, num_heads, head_dim = output.shape
    if not num_tokens:
        return
    _merge_kernel[(num_tokens, num_heads)](
        output,
        output_lse,
        prefix_output,
        prefix_lse.contiguous(),
        suffix_output,
        suffix_lse.contiguous(),
        output.stride(),
        prefix_output.stride(),
        suffix_output.stride(),
        num_tokens,
        HEAD_DIM=head_dim,
        D_BLOCK=padded(head_dim),
        HAS_LSE=output_lse is not None,
        num_warps=1,
    )
