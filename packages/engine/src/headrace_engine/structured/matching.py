"""Constraints in the worker: each follows its request's tokens and says which may be next."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import groupby

import numpy as np
import numpy.typing as npt

from headrace_core.grammar import Constraint, GrammarMatcher, Vocabulary
from headrace_engine.structured.budget import MatchingBudget, MatchingClock
from headrace_engine.structured.marker import MarkerGate, MarkerTokens
from headrace_engine.structured.matching_threads import MatchingThreads
from headrace_engine.structured.spelling import spell
from headrace_engine.structured.store import Compiled, GrammarStore

logger = logging.getLogger(__name__)

Words = npt.NDArray[np.int32]

COMPILE_WAIT = 60.0
"""Longest wait for a grammar that is not there when its request first runs, in seconds. The core
holds requests back until it is, so nothing waits here but what was evicted in between."""
SLOW_FILL = 5e-3
"""Seconds for the masks of several requests together, above which each of them is filled and
charged by itself in the next step."""
SLOW_MATCH = 1e-3
"""Processor time, in seconds, to take a token or to fill a mask, above which a constraint is matched
beside the steps from the next token on."""
QUICK_TOKENS = 4
"""Tokens in a row below it, after which it is matched within the steps again."""
MAX_MARKERS = 16
"""Markers whose tokens are remembered: as many as there are reasoning formats in use, one."""


TOO_SLOW = (
    "structured_outputs: matching the constraint takes too long; write it with less ambiguity, or "
    "raise structured_outputs_config.matching_seconds"
)


class RowConstraint:
    """One request's constraint.

    Args:
        constraint: as admitted.
        compiled: its grammar.
        vocabulary: the tokens' bytes.
        marker: the text from which on the constraint holds; None: it holds from the first token on.
        budget: what matching may take; beyond it no token is possible any more.
        threads: match it while it is slow; None: it is matched within the steps in any case.
    """

    def __init__(
        self,
        constraint: Constraint,
        compiled: Compiled,
        vocabulary: Vocabulary,
        marker: MarkerTokens | None,
        budget: MatchingBudget,
        threads: MatchingThreads | None = None,
    ) -> None:
        self.backend = compiled.backend
        self.budget = budget
        self.alone = False
        """True where its mask is filled in a batch of its own, as it may be the slow one."""
        self.is_slow = False
        """True where it is matched beside the steps: the next mask may not be there in time."""
        self.matching: Future[None] | None = None
        """Ends when the next mask is there; None: it is not matched beside the steps. Nothing else
        of the constraint may be used until :meth:`settle`."""
        self.error: str | None = None
        """The error that was raised beside the steps; no token is possible then."""
        self.words: Words | None = None
        """[ceil(V / 32)]; the tokens that may be next; None: any. Set by :func:`fill_masks`."""
        self.banned: Sequence[int] = ()
        """Tokens that may not be next, where nearly all may be. Set by :func:`fill_masks`."""
        self.closes: int | None = None
        """The token that closes the reasoning, while the output is in it: a model that would rather
        end its output closes the reasoning instead, so that the constrained part comes. None: ends
        are as the mask says. Set by :func:`fill_masks`."""
        self._ends = [i for i in constraint.end_token_ids if 0 <= i < vocabulary.size]
        self._vocabulary = vocabulary
        self._grammar = compiled.grammar
        self._marker = marker
        closing = _marks(constraint.start_after, vocabulary) if marker else []
        self._closing = closing[0] if len(closing) == 1 else None
        self._opening = _marks(constraint.may_begin_with, vocabulary) if marker else []
        """The rest of the text that may stand in front of the marker, as tokens."""
        self._in_opening = False
        """The output has begun that text: it can no longer be preceded by white space."""
        self._gate: MarkerGate | None = None
        self._matcher: GrammarMatcher | None = None
        if marker is None or self._opening:
            self._matcher = compiled.grammar.matcher()
        else:
            self._shut()
        self._ended = False
        self._broken = False
        kind = constraint.grammar.kind
        self._threads = threads if kind in compiled.backend.releases_gil else None
        self._longest = 0.0
        """Seconds of the longest piece of what was matched beside the steps last."""
        self._num_quick = 0

    def observe(self, token_id: int) -> None:
        """The output has grown by a token."""
        if self._is_over:
            self.is_slow = False
        elif self.is_slow:
            self._match_beside([token_id])
        else:
            with self.budget.one_token():
                self._observe(token_id)
            if self.judge():
                self._match_beside([])

    def replay(self, output: Sequence[int]) -> None:
        """Observe an output that is there already; where that takes long, beside the steps."""
        seconds = 0.0
        for done, token_id in enumerate(output):
            if self._is_over:
                return
            with self.budget.one_token():
                self._observe(token_id)
            seconds += self.budget.last
            if self.judge() or (seconds > SLOW_FILL and self._threads is not None):
                self.is_slow = True
                self._match_beside(output[done + 1 :])
                return

    def judge(self) -> bool:
        """True if the last piece of matching was slow, and the next ones can be done beside the
        steps: they are, from now on."""
        if self.budget.last > SLOW_MATCH and self._threads is not None:
            self.is_slow, self._num_quick = True, 0
            return True
        return False

    def settle(self) -> None:
        """Take what was matched beside the steps, after waiting for it."""
        if self.matching is None:
            return
        self.matching.result()
        self.matching = None
        self._num_quick = 0 if self._longest > SLOW_MATCH else self._num_quick + 1
        self.is_slow = self._num_quick < QUICK_TOKENS

    def drop(self) -> None:
        """The request is gone: what has not begun of its matching never does."""
        if self.matching is not None:
            self.matching.cancel()

    @property
    def _is_over(self) -> bool:
        """True if further tokens change nothing."""
        return self._ended or self.budget.exceeded

    def _match_beside(self, token_ids: Sequence[int]) -> None:
        assert self._threads is not None
        self.matching = self._threads.submit(partial(self._match, token_ids))

    def _match(self, token_ids: Sequence[int]) -> None:
        """Take tokens and fill the next mask; runs in a thread."""
        self._longest = 0.0
        try:
            for token_id in token_ids:
                if self._is_over:
                    break
                with self.budget.one_token():
                    self._observe(token_id)
                self._longest = max(self._longest, self.budget.last)
            matcher = self.matcher
            if matcher is None:
                self.take_none()
                return
            with self.budget.one_token():
                _fill([(self, matcher)])
            self._longest = max(self._longest, self.budget.last)
        except Exception as error:  # of a library: this request's failure, and nobody else's
            logger.exception("matching a constraint failed")
            self.error = f"{type(error).__name__}: {error}"
            self._broken = True
            self.take_none()

    def _observe(self, token_id: int) -> None:
        if token_id in self._ends:
            self._ended = True
        elif self._opening and token_id == self._opening[0]:
            self._open(token_id)
        elif self._gate is not None:
            behind = self._gate.feed(token_id)
            if behind is not None:
                self._gate = None
                self._matcher = self._grammar.matcher()
                self._broken = not self._matcher.advance(self._spelled(behind))
        else:
            if self._in_opening or not self._vocabulary.tokens[token_id].isspace():
                self._opening = []
            if self._matcher is None or not self._matcher.advance([token_id]):
                logger.error("the grammar takes no token %d, which its mask allowed", token_id)
                self._broken = True

    def _open(self, token_id: int) -> None:
        """The output goes on as what may stand in front; the grammar follows as far as it can."""
        self._in_opening = True
        del self._opening[0]
        if not self._opening:
            self._shut()
        elif self._matcher is not None and not self._matcher.advance([token_id]):
            self._matcher = None

    def _shut(self) -> None:
        """Nothing holds until the marker has come."""
        assert self._marker is not None
        self._gate = MarkerGate(self._marker, self._vocabulary, self._may_begin)
        self._matcher = None

    @property
    def matcher(self) -> GrammarMatcher | None:
        """The matcher whose mask holds for the next token, if it is a grammar's."""
        return None if self._ended or self._broken or self.budget.exceeded else self._matcher

    @property
    def failure(self) -> str | None:
        """Reason other than the constraint itself why no token is possible; None: there is none, or
        none is known while it is matched beside the steps."""
        if self.matching is not None:
            return None
        if self.budget.exceeded:
            return TOO_SLOW
        gave_up = self._matcher.failure if self._matcher is not None else ""
        return (
            f"structured_outputs: matching the constraint was given up: {gave_up}"
            if gave_up
            else None
        )

    def take(self, words: Words) -> None:
        """The grammar's mask of the next token; tokens that end the output are added or removed."""
        matcher = self._matcher
        assert matcher is not None
        ends = matcher.complete
        for token_id in self._ends:
            bit = _bit(token_id)
            word = words[token_id // 32]
            words[token_id // 32] = word | bit if ends else word & ~bit
        if self._opening:
            words[self._opening[0] // 32] |= _bit(self._opening[0])
        self.words, self.banned, self.closes = words, (), None

    def take_none(self) -> None:
        """No grammar's mask holds for the next token."""
        self.words, self.banned, self.closes = None, (), None
        if self._ended:
            return
        if self._broken or self._opening or self.budget.exceeded:
            self.words = np.zeros(self._vocabulary.num_words, np.int32)
            for token_id in [] if self.budget.exceeded else self._opening[:1]:
                self.words[token_id // 32] |= _bit(token_id)
        elif self._gate is not None:
            self.banned = [*self._gate.forbidden(), *self._ends]
            self.closes = self._closing

    @property
    def ends(self) -> Sequence[int]:
        """Tokens that end the output."""
        return self._ends

    def _may_begin(self, text: bytes) -> bool:
        try:
            return self._grammar.matcher().advance(self._spelled(text))
        except ValueError:
            return False  # no tokens spell it: nothing could have written it otherwise

    def _spelled(self, text: bytes) -> list[int]:
        return spell(self._vocabulary, text) if text else []


def _marks(text: str, vocabulary: Vocabulary) -> list[int]:
    """The tokens of a mark: its own, or those of its text; [] if there are none."""
    if not text:
        return []
    own = vocabulary.special_ids.get(text)
    try:
        return [own] if own is not None else spell(vocabulary, text.encode())
    except ValueError:
        return []


def _bit(token_id: int) -> np.int32:
    bit = 1 << (token_id % 32)
    return np.int32(bit if bit < 1 << 31 else bit - (1 << 32))


def fill_masks(
    constraints: Iterable[RowConstraint], *, allows_late: bool = False
) -> list[RowConstraint]:
    """Find out for each which tokens may be next; those of one backend together.

    Args:
        constraints: of the rows that get a token.
        allows_late: do not wait for those that are matched beside the steps.

    Returns:
        Those that are not known yet; [] unless ``allows_late``.
    """
    waiting: list[tuple[RowConstraint, GrammarMatcher]] = []
    beside: list[RowConstraint] = []
    for constraint in constraints:
        if constraint.matching is not None:
            beside.append(constraint)
            continue
        matcher = constraint.matcher
        if matcher is None:
            constraint.take_none()
        else:
            waiting.append((constraint, matcher))
    alone = [pair for pair in waiting if pair[0].alone]
    shared = [pair for pair in waiting if not pair[0].alone]
    for pair in alone:
        with pair[0].budget.one_token():
            pair[0].alone = _fill([pair]) > SLOW_FILL / 2
        pair[0].judge()
    shared.sort(key=lambda pair: pair[0].backend.name)
    for _, group in groupby(shared, key=lambda pair: pair[0].backend.name):
        _fill_together(list(group))
    late = [one for one in beside if allows_late and one.matching and not one.matching.done()]
    for constraint in beside:
        if constraint not in late:
            constraint.settle()
    return late


def _fill_together(group: Sequence[tuple[RowConstraint, GrammarMatcher]]) -> None:
    """Fill masks, perhaps in threads of the backend, whose time is nobody's in particular."""
    if len(group) == 1:
        with group[0][0].budget.one_token():
            _fill(group)
        group[0][0].judge()
    elif _fill(group) > SLOW_FILL:
        for constraint, _ in group:
            constraint.alone = True


def _fill(group: Sequence[tuple[RowConstraint, GrammarMatcher]]) -> float:
    """Fill masks of one backend; returns the seconds that it took."""
    start = time.perf_counter()
    backend = group[0][0].backend
    bitmask = np.zeros((len(group), backend.vocabulary.num_words), np.int32)
    backend.fill_bitmasks([(matcher, row) for row, (_, matcher) in enumerate(group)], bitmask)
    for words, (constraint, _) in zip(bitmask, group):
        constraint.take(words)
    return time.perf_counter() - start


class ConstraintMaker:
    """Makes a request's constraint when the worker takes the request in. One thread only.

    Args:
        store: the compiled grammars.
        threads: match slow constraints; None: new ones, as many as there are by default.
    """

    def __init__(self, store: GrammarStore, threads: MatchingThreads | None = None) -> None:
        self._store = store
        self._threads = threads or MatchingThreads()
        self._markers: dict[str, MarkerTokens] = {}
        self._clock: MatchingClock | None = None

    def make(self, constraint: Constraint, output: Sequence[int]) -> RowConstraint:
        """A constraint that has seen the output so far: not empty after a preemption.

        Raises:
            RequestError: the grammar does not compile after all.
            TimeoutError: it took too long.
        """
        compiled = self._store.request(constraint).result(COMPILE_WAIT)
        vocabulary = self._store.vocabulary
        marker = self._marker(constraint.start_after, vocabulary)
        if self._clock is None:
            self._clock = MatchingClock()
        budget = MatchingBudget(self._store.matching_seconds, self._clock)
        made = RowConstraint(constraint, compiled, vocabulary, marker, budget, self._threads)
        made.replay(output)
        return made

    def close(self) -> None:
        """End the threads that match slow constraints. Idempotent."""
        self._threads.close()
        if self._clock is not None:
            self._clock.close()

    def _marker(self, text: str, vocabulary: Vocabulary) -> MarkerTokens | None:
        if not text:
            return None
        if text not in self._markers:
            if len(self._markers) >= MAX_MARKERS:
                self._markers.clear()
            self._markers[text] = MarkerTokens(text.encode(), vocabulary)
        return self._markers[text]
