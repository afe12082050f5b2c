"""Conformance suite of draft proposers. Inherit, and say how one is made::

class TestMine(DraftProposerConformance):
    def make(self):
        return Mine({})
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import pytest

from headrace_core.speculation import DraftProposer, DraftTask


def task(
    token_ids: Sequence[int], *, most: int = 4, request_id: str = "a", num_prompt_tokens: int = 1
) -> DraftTask:
    """A request with these tokens; a view that cannot be written to, as a proposer must not."""
    ids = np.array(token_ids, np.int32)
    ids.flags.writeable = False
    return DraftTask(request_id, ids, num_prompt_tokens, most)


class DraftProposerConformance(ABC):
    """What the engine relies on."""

    vocab_size = 100

    @abstractmethod
    def make(self) -> DraftProposer:
        """A proposer that has seen nothing."""

    def sequences(self) -> list[list[int]]:
        """One token, an even one, one that repeats, a random one."""
        generator = np.random.default_rng(3)
        return [
            [5],
            [7] * 40,
            [1, 2, 3, 4] * 12,
            generator.integers(0, self.vocab_size, 300).tolist(),
        ]

    @pytest.mark.parametrize("most", [1, 3, 32])
    def test_every_task_gets_guesses_that_are_tokens(self, most: int) -> None:
        tasks = [
            task(ids, most=most, request_id=str(number))
            for number, ids in enumerate(self.sequences())
        ]
        found = self.make().propose(tasks)
        assert len(found) == len(tasks)
        for guess in found:
            assert all(0 <= int(token) < self.vocab_size for token in guess)
            assert all(int(token) == token for token in guess)

    def test_a_guess_does_not_depend_on_the_order(self) -> None:
        tasks = [task(ids, request_id=str(number)) for number, ids in enumerate(self.sequences())]
        there = list(map(list, self.make().propose(tasks)))
        back = list(map(list, self.make().propose(tasks[::-1])))
        assert there == back[::-1]

    def test_nothing_is_asked(self) -> None:
        assert not self.make().propose([])

    def test_requests_go_at_any_time(self) -> None:
        """Also those that it was never asked for, those without output, and one twice."""
        proposer = self.make()
        for ids in self.sequences():
            proposer.finish("a", np.array(ids, np.int32), 1)
            proposer.finish("a", np.array(ids, np.int32), len(ids))
        assert len(proposer.propose([task([1, 2, 3])])) == 1

    def test_what_it_was_told_of_is_not_kept_by_reference(self) -> None:
        """The engine writes other tokens where a request's were."""
        proposer, memory = self.make(), np.array([1, 2, 3, 4, 5, 6, 7, 8] * 3, np.int32)
        proposer.finish("a", memory, 1)
        before = list(map(list, proposer.propose([task([9, 3, 4, 5])])))
        memory[:] = 50
        assert list(map(list, proposer.propose([task([9, 3, 4, 5])]))) == before
