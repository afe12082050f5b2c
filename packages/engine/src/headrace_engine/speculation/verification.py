"""Which rows of logits belong to a request's guesses, and who goes on to the next one.

Every token is drawn as it is without guesses: by the request's parameters, its own random number for that
place in its output and all that depends on the tokens before. A guess that is what was drawn makes the next
row's logits those of the output; the first that is not ends the run. Whatever is guessed, outputs are the
same tokens, with the same log-probabilities. For a guess that is certain this accepts as often as rejection
sampling (Leviathan et al. 2023, arXiv:2211.17192), whose ``min(1, p / q)`` is p then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from headrace_core.step import RequestStepResult

Ints = npt.NDArray[np.int64]


class DraftRun:
    """The sampled requests of one step, position after position.

    Args:
        request_ids: of the R sampled requests.
        rows: [R]; of the request table.
        drafts: guesses by request; who has none is left out.
    """

    def __init__(
        self, request_ids: list[str], rows: Ints, drafts: Mapping[str, Sequence[int]]
    ) -> None:
        self.request_ids = request_ids
        """Those that get a token from the logits at :attr:`depth`."""
        self.rows = rows
        self.depth = 0
        self._drafts = drafts
        counts = np.array([1 + len(drafts.get(i, ())) for i in request_ids], np.int64)
        self._starts = np.cumsum(counts) - counts

    @property
    def logits_rows(self) -> Ints:
        """Rows of the step's logits, one for each request."""
        return self._starts + self.depth

    def advance(self, results: Mapping[str, RequestStepResult]) -> None:
        """Go on to the next position with those whose guess was chosen."""
        depth = self.depth
        self.keep([self._goes_on(i, results[i].token_ids, depth) for i in self.request_ids])
        self.depth += 1

    def keep(self, wanted: Sequence[bool]) -> None:
        """Leave out the requests that are not wanted."""
        chosen = np.flatnonzero(wanted)
        self.request_ids = [self.request_ids[r] for r in chosen.tolist()]
        self.rows, self._starts = self.rows[chosen], self._starts[chosen]

    def _goes_on(self, request_id: str, token_ids: Sequence[int], depth: int) -> bool:
        draft = self._drafts.get(request_id, ())
        return depth < len(draft) and len(token_ids) > depth and token_ids[depth] == draft[depth]
