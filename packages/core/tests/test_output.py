from __future__ import annotations

import pytest

from headrace_core.output import CompletionOutput, FlatLogprobs, Logprob, RequestOutput

POSITIONS = [
    None,
    {5: Logprob(-0.1, 1, "a"), 7: Logprob(-2.0, 2, "b")},
    {1: Logprob(-3.0, 9, None)},
]


def test_flat_form_reads_like_a_list():
    flat = FlatLogprobs()
    flat.extend(POSITIONS)
    assert len(flat) == 3
    assert list(flat) == POSITIONS
    assert flat == POSITIONS
    assert flat[-1] == POSITIONS[-1]
    assert isinstance(flat[1:], FlatLogprobs)
    assert flat[1:] == POSITIONS[1:]
    assert flat.token_ids == [5, 7, 1]
    assert flat != POSITIONS[:2]


def test_flat_form_can_only_grow():
    flat = FlatLogprobs()
    flat.append(POSITIONS[1])
    with pytest.raises(TypeError):
        flat[0] = None
    with pytest.raises(TypeError):
        del flat[0]
    with pytest.raises(TypeError):
        flat.insert(0, None)


def _output(text, ids, *, index=0, finish=None, logprobs=None):
    completion = CompletionOutput(index, text, ids, -1.0, logprobs, finish)
    return RequestOutput("r", "p", [1], [completion], finish is not None)


def test_adding_deltas_rebuilds_the_whole():
    whole = _output("ab", [1, 2], logprobs=[{1: Logprob(-1.0)}])
    whole.add(_output("c", [3], logprobs=[{3: Logprob(-2.0)}], finish="stop"), aggregate=True)
    assert whole.finished
    completion = whole.outputs[0]
    assert (completion.text, completion.token_ids, completion.finish_reason) == (
        "abc",
        [1, 2, 3],
        "stop",
    )
    assert completion.logprobs == [{1: Logprob(-1.0)}, {3: Logprob(-2.0)}]


def test_adding_cumulative_outputs_replaces_by_index():
    whole = _output("a", [1])
    whole.add(_output("x", [9], index=1), aggregate=False)
    whole.add(_output("ab", [1, 2]), aggregate=False)
    assert [(o.index, o.text) for o in whole.outputs] == [(0, "ab"), (1, "x")]
