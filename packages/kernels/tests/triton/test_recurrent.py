"""Recurrences in half precision against the reference; in float32 the suite of core does that."""

from __future__ import annotations

import pytest
import torch

import headrace_reference as reference
from headrace_kernels.triton import channelwise, recurrent
from headrace_reference.definitions import definitions
from headrace_testing.attention.backends import assert_near
from headrace_testing.ops.recurrences import RecurrentCase
from headrace_testing.ops.recurrent import RecurrentConformance

pytestmark = pytest.mark.keep(4, every_value=False)  # interpreted, a case takes up to seconds

OPS = {
    "causal_conv": recurrent.causal_conv,
    "selective_scan": recurrent.selective_scan,
    "state_space_scan": recurrent.state_space_scan,
    "delta_rule": recurrent.delta_rule,
    "rg_lru": channelwise.rg_lru,
    "wkv": channelwise.wkv,
}


class Inputs(RecurrentConformance):
    """Where the suite takes its inputs from; runs no test by itself."""

    __test__ = False


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", OPS)
def test_recurrences(device: str, name: str, dtype: str) -> None:
    inputs = Inputs()
    Inputs.device = device
    lengths = (3, 1, 4)
    case = inputs.case(name, dtype, sum(lengths), 0)
    state, cu = inputs.states(case), inputs.bounds(lengths)
    where = inputs.indices(-1, 2, 2), inputs.indices(1, 3, 4)
    kept = state.detach().cpu().double()
    out = case.run(OPS[name], slice(None), state, *where, cu)
    exact = case.widened()
    expected = exact.run(
        definitions()[name].op, slice(None), kept, *(w.cpu() for w in where), cu.cpu()
    )
    assert_near(out, expected, dtype)


def test_a_head_whose_state_is_more_than_a_program_holds(device: str) -> None:
    inputs = Inputs()
    Inputs.device = device
    x, keys = inputs.rand(2, 1, 40), inputs.rand(2, 2, 1, 130, seed=1)
    by_token = {"x": x, "b": keys[0], "c": keys[1]}
    rates = -inputs.rand(1, seed=2).exp()
    case = RecurrentCase(
        "state_space_scan", by_token, {"a": rates, "d": None, "dt": None}, (1, 40, 130)
    )
    state, cu = inputs.states(case), inputs.bounds((2,))
    where, kept = (inputs.indices(1), inputs.indices(2)), state.cpu().double()
    out = case.run(recurrent.state_space_scan, slice(None), state, *where, cu)
    exact = (kept, *(w.cpu() for w in where), cu.cpu())
    expected = case.widened().run(reference.state_space_scan, slice(None), *exact)
    assert_near(out, expected, "float32")
    assert_near(state, kept, "float32")


@pytest.mark.parametrize("name", OPS)
def test_a_request_may_be_cut(device: str, name: str) -> None:
    """Token after token, the bits of one step."""
    inputs = Inputs()
    Inputs.device = device
    case = inputs.case(name, "float32", 6, 0)
    op, state = OPS[name], inputs.states(case)
    one = inputs.indices(1), inputs.indices(1)
    whole = case.run(op, slice(None), state.clone(), *one, inputs.bounds((6,)))
    state = state.clone()
    pieces = [
        case.run(op, slice(start, end), state, *one, inputs.bounds((end - start,)))
        for start, end in ((0, 1), (1, 2), (2, 6))
    ]
    assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_gated_rms_norm(device: str, dtype: str, norm_first: bool) -> None:
    inputs = Inputs()
    Inputs.device = device
    x, gate = inputs.rand(3, 80, dtype=dtype).chunk(2, dim=1)
    weight = inputs.rand(20, dtype=dtype, seed=1)
    options = {"group_size": 20, "norm_first": norm_first}
    out = recurrent.gated_rms_norm(x, gate, weight, 1e-5, **options)
    wide = (t.cpu().double() for t in (x, gate, weight))
    assert_near(out, reference.gated_rms_norm(*wide, 1e-5, **options), dtype)
