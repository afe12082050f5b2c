from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace_core.errors import ConfigError
from headrace_core.sampling.params import SamplingParams
from headrace_engine.sampling import Sampler
from headrace_reference import sample, top_logprobs


def test_greedy_takes_the_largest_and_of_equals_the_first(kit: Any) -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 3.0, 3.0, 5.0]])
    assert kit.choose(logits, [kit.Row(), kit.Row()]).token_ids.tolist() == [1, 0]


def test_a_mixed_batch(kit: Any) -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0], [0.0, 3.0, 2.0], [9.0, 0.0, 0.0]])
    rows = [
        kit.Row(),
        kit.Row(SamplingParams(temperature=1.0, top_k=1)),
        kit.Row(SamplingParams(temperature=1.0, allowed_token_ids=[2])),
    ]
    assert kit.choose(logits, rows).token_ids.tolist() == [1, 1, 2]


@pytest.mark.req("REL-01")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.5}])
def test_rows_that_are_not_finite_fail_alone(kit: Any, bad: float, params: Any) -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    rows = [kit.Row(SamplingParams(seed=i, logprobs=2, **params)) for i in range(4)]
    healthy = kit.choose(logits, rows)
    logits[2, 17] = bad
    output = kit.choose(logits, rows)
    assert list(output.errors) == [2]
    assert "not finite" in output.errors[2]
    for r in (0, 1, 3):
        assert output.token_ids[r] == healthy.token_ids[r]
        assert output.logprobs[r] == healthy.logprobs[r]


def test_logits_of_minus_infinity_are_impossible_not_wrong(kit: Any) -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf]])
    for params in (SamplingParams(), SamplingParams(top_p=0.1), kit.greedy()):
        output = kit.choose(logits, [kit.Row(params)])
        assert not output.errors
        assert output.token_ids.tolist() == [1]


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'best'.*raw_logprobs"):
        Sampler(sample, top_logprobs, logprobs_mode="best")
