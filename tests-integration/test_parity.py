"""Every family against transformers in float32, and against itself in every mode of running.

Tokens must equal transformers' and log-probabilities agree within 1e-4; between our own modes both
must be equal bit for bit.
"""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, save_model
from modes import MODES, NUM_TOKENS, PROMPTS, run


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request, tmp_path_factory):
    """A checkpoint, transformers' answers to the prompts, and ours, one request at a time."""
    folder = tmp_path_factory.mktemp(f"{request.param}-")
    oracle = save_model(request.param, folder)
    expected = [_greedy(oracle, prompt) for prompt in PROMPTS]
    del oracle
    return folder, expected, run(folder, alone=True)


def _greedy(model: torch.nn.Module, prompt: list[int]) -> list[tuple[int, float]]:
    """transformers' greedy tokens and their log-probabilities, without its cache."""
    tokens, result = list(prompt), []
    for _ in range(NUM_TOKENS):
        with torch.inference_mode():
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1].float()
        logprobs = torch.log_softmax(logits, dim=-1)
        best = int(logprobs.argmax())
        result.append((best, float(logprobs[best])))
        tokens.append(best)
    return result


@pytest.mark.keep(8, every_value=False)
def test_tokens_equal_and_logprobs_agree_with_transformers(family):
    _, expected, alone = family
    for ours, theirs in zip(alone, expected, strict=True):
        assert [token for token, _ in ours] == [token for token, _ in theirs]
        for (_, our_logprob), (_, their_logprob) in zip(ours, theirs):
            assert our_logprob == pytest.approx(their_logprob, abs=1e-4)


@pytest.mark.req("REL-15")
@pytest.mark.keep(10, every_value=False)
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_every_mode_gives_the_same_bits(family, mode):
    folder, _, alone = family
    assert run(folder, **mode) == alone
