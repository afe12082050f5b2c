"""Which steps have fewer keys than tokens."""

from __future__ import annotations

import numpy as np

from headrace_engine.execution.attended import AttendedTokens

ROWS, LENGTHS = np.array([4, 2, 7]), np.array([8, 5, 8])


def test_only_steps_with_such_a_request_have_any() -> None:
    attended = AttendedTokens()
    assert attended.key_lens(ROWS, LENGTHS) is None
    attended.set(3, 2)
    assert attended.key_lens(ROWS, LENGTHS) is None
    attended.set(2, 4)
    lengths = attended.key_lens(ROWS, LENGTHS)
    assert lengths is not None
    assert (lengths.tolist(), lengths.dtype) == ([8, 4, 8], np.int32)
    attended.set(2, None)  # the row's next request
    assert attended.key_lens(ROWS, LENGTHS) is None


def test_a_request_that_is_gone_is_forgotten() -> None:
    attended = AttendedTokens()
    attended.set(7, 1)
    attended.clear(7)
    attended.clear(4)
    assert attended.key_lens(ROWS, LENGTHS) is None


def test_a_number_beyond_the_prompt_is_all_of_it() -> None:
    attended = AttendedTokens()
    attended.set(2, 9)
    assert attended.key_lens(ROWS, LENGTHS) is None
