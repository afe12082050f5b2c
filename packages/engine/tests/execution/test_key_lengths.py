"""Which steps have fewer keys than tokens."""

from __future__ import annotations

import numpy as np
import torch

from headrace_core.step import NewRequest
from headrace_engine.execution.prompt_table import PromptTable
from headrace_testing.fakes.requests import new_request

ROWS, LENGTHS = np.array([4, 2, 7]), np.array([8, 5, 8])


def attending_to(num_tokens: int | None) -> NewRequest:
    return new_request("a", [1] * 8, (), num_attended_tokens=num_tokens)


def test_only_steps_with_such_a_request_have_any() -> None:
    attended = PromptTable(torch.device("cpu"))
    assert attended.key_lens(ROWS, LENGTHS) is None
    attended.add(3, attending_to(2))
    assert attended.key_lens(ROWS, LENGTHS) is None
    attended.add(2, attending_to(4))
    lengths = attended.key_lens(ROWS, LENGTHS)
    assert lengths is not None
    assert (lengths.tolist(), lengths.dtype) == ([8, 4, 8], np.int32)
    attended.remove(2, "a")
    attended.add(2, attending_to(None))  # the row's next request
    assert attended.key_lens(ROWS, LENGTHS) is None


def test_a_request_that_is_gone_is_forgotten() -> None:
    attended = PromptTable(torch.device("cpu"))
    attended.add(7, attending_to(1))
    attended.remove(7, "a")
    attended.remove(4, "a")
    assert attended.key_lens(ROWS, LENGTHS) is None


def test_a_number_beyond_the_prompt_is_all_of_it() -> None:
    attended = PromptTable(torch.device("cpu"))
    attended.add(2, attending_to(9))
    assert attended.key_lens(ROWS, LENGTHS) is None
