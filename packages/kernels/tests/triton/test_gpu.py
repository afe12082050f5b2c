"""What only a GPU can show. Never run so far: no GPU was at hand when this was written.

Covered elsewhere without one: values (through the interpreter) and that every kernel compiles
(test_compiles.py). Not covered: that the compiled code computes the same, speed, float8 rounding,
bfloat16 as the hardware multiplies it, bitwise batch invariance of compiled code, graph capture.
On a machine with a GPU, core's suite (test_conformance.py) runs there as well, in all dtypes.
"""

from __future__ import annotations

import pytest
import torch

from headrace_kernels.triton import cache_write, unified_attention
from headrace_kernels.triton.unified_attention import Plan
from headrace_testing.ops import paged_case

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: compiled kernels are launched"
)

MIXED = [(1, 1), (1, 700), (5, 5), (170, 900), (3, 35)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_attention_of_real_sizes(head_dim: int, dtype: str) -> None:
    case = paged_case(
        MIXED, dtype=dtype, device="cuda", num_heads=32, num_kv_heads=8, head_dim=head_dim
    )
    tolerance = {"float16": 2e-3, "bfloat16": 1.5e-2}[dtype]
    torch.testing.assert_close(
        case.run(unified_attention.paged_attention).cpu().double(),
        case.expected(),
        atol=tolerance,
        rtol=tolerance,
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_batch_invariance_of_compiled_code(dtype: str) -> None:
    def run(*args: torch.Tensor, **options: object) -> torch.Tensor:
        return unified_attention.paged_attention(*args, batch_invariant=True, **options)  # type: ignore[arg-type]

    case = paged_case(MIXED, dtype=dtype, device="cuda", num_heads=8, head_dim=128)
    together = case.run(run)
    starts = case.cu_seqlens_q.tolist()
    for b in range(len(MIXED)):
        assert torch.equal(case.request(b).run(run), together[starts[b] : starts[b + 1]])


def test_captured_decode_follows_its_inputs() -> None:
    """A graph captured at one set of lengths is replayed at another."""
    case = paged_case([(1, 900), (1, 40)], dtype="bfloat16", device="cuda", head_dim=128)
    expected = case.run(unified_attention.paged_attention)
    lengths = case.seq_lens.clone()
    case.seq_lens.fill_(1)

    def run() -> torch.Tensor:
        return unified_attention.paged_attention(
            case.query,
            case.key_cache,
            case.value_cache,
            case.block_table,
            case.cu_seqlens_q,
            case.seq_lens,
            max_seqlen_q=1,
            max_seqlen_k=900,
            scale=128**-0.5,
            plan=Plan(16, 8, 16, split=True),
        )

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    case.seq_lens.copy_(lengths)
    graph.replay()
    torch.testing.assert_close(out, expected, atol=1.5e-2, rtol=1.5e-2)


@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_rounds_to_float8_as_torch_does(fp8: torch.dtype) -> None:
    key = torch.randn(64, 2, 32, device="cuda")
    caches = torch.zeros(2, 4, 16, 2, 32, dtype=fp8, device="cuda")
    cache_write.cache_write(key, key, caches[0], caches[1], torch.arange(64, device="cuda"))
    assert torch.equal(caches[0].flatten(0, 1).float(), key.to(fp8).float())
