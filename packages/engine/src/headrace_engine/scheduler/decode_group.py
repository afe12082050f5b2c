"""Requests that decode and of which nothing else is to be said, counted together.

With thousands of running requests nearly all do the same in each step: one token is computed and one is
sampled, no block is gained, nothing ends. Here they take part in a step, and have its tokens, by two counters
of the group and one mapping for all of them; none is looked at. A request's own counters stand still
meanwhile: what it has gained is added to them when somebody reads them (:meth:`DecodeGroup.settle`, called by
the properties of :class:`~headrace_engine.scheduler.request.SchedulerRequest`), so that nobody else needs to
know of the group.

A member is looked at in a step that is known beforehand, the one in which something happens to it
(:attr:`SchedulerRequest.quiet_until`): :meth:`DecodeGroup.parts`. Whatever else happens to it takes it out
(:meth:`SchedulerRequest.disturb`). Its part of the steps in flight is then one like other requests'.

Steps are numbered by the group, without those in which it has no part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from headrace_engine.scheduler.request import InFlight, SchedulerRequest, by_order
from headrace_engine.token_rows import TokenRows

if TYPE_CHECKING:
    from headrace_engine.scheduler.request_tracker import RunningRequests

FEWEST_RUNNING = 256
"""Running requests from which on they join: fewer are looked at one by one in less time."""
MAX_UNREAD_STEPS = 32
"""Steps after which a member takes its tokens at the latest."""
KEPT_STEPS = MAX_UNREAD_STEPS + 8
"""Steps in flight when a member is looked at end later."""


class DecodeGroup:
    """The members that a scheduler's running requests have in common steps.

    Args:
        running: is told who is a member.
    """

    def __init__(self, running: RunningRequests) -> None:
        self._running = running
        self.size = 0
        """Members."""
        self.is_open = False
        """True if requests may join: many run, and the last step's tokens came by number."""
        self._num_scheduled = 0
        self._num_taken = 0
        """Scheduled steps whose tokens were taken."""
        self.num_moves = 0
        """The sum of both: a member that was settled since the last move is still."""
        self._tokens = TokenRows(KEPT_STEPS)
        """Members' tokens of the last steps that were taken."""
        self._left: deque[list[InFlight]] = deque()
        """By step in flight: parts of members that have left since it was scheduled."""
        self._due: dict[int, list[SchedulerRequest]] = {}
        """By step: members that it must look at; some have left, or are due at another step by now."""

    # -- members -------------------------------------------------------------------------------

    def join(self, state: SchedulerRequest) -> None:
        """A quiet request decodes with the group, from the step that is being filled on."""
        state.group = self
        state.group_scheduled = state.group_taken = self._num_scheduled
        state.group_moves = self.num_moves
        state.group_column = self._tokens.add(state.request_id)
        self.size += 1
        del self._running.outside[state]
        self.keep(state)

    def keep(self, state: SchedulerRequest) -> None:
        """A member that was looked at, and so is settled, goes on: it is looked at again when it ceases to be
        quiet, and before its last token is sampled."""
        until, last = state.quiet_until_known, state.max_num_tokens - 2
        steps = (until if until < last else last) - state.own_computed
        steps = 1 if steps < 1 else steps
        due = self._num_scheduled + (steps if steps < MAX_UNREAD_STEPS else MAX_UNREAD_STEPS)
        state.group_due = due
        if due in self._due:
            self._due[due].append(state)
        else:
            self._due[due] = [state]

    def leave(self, state: SchedulerRequest) -> None:
        """A member is looked at by itself from now on; its part of steps in flight stays."""
        self.settle(state)
        state.group = None
        self._tokens.remove(state.request_id)
        self._running.outside[state] = None
        for number in range(state.group_taken, self._num_scheduled):
            self._left[number - self._num_taken].append(InFlight(state, state.epoch, True))
        self.size -= 1
        if not self.size:
            self._due.clear()  # which refers to requests that have ended

    def dissolve(self) -> None:
        """Everybody leaves."""
        if self.size:
            for state in [state for state in self._running if state.group is self]:
                self.leave(state)

    def settle(self, state: SchedulerRequest) -> None:
        """Add to a member's own counters what it has gained with the group."""
        state.group_moves = self.num_moves
        scheduled = self._num_scheduled - state.group_scheduled
        if scheduled:
            state.group_scheduled += scheduled
            state.own_computed += scheduled
            state.own_placeholders += scheduled
            state.own_in_flight += scheduled
        taken = self._num_taken - state.group_taken
        if taken > 0:
            state.group_taken += taken
            state.own_placeholders -= taken
            state.own_in_flight -= taken
            state.own_token_ids += self._tokens.read(state.group_column, taken)

    def _settle_each(self, states: Sequence[SchedulerRequest]) -> None:
        """:meth:`settle` several: tokens of those that have gained as many, as most have, at once."""
        by_count: dict[int, list[SchedulerRequest]] = {}
        for state in states:
            scheduled = self._num_scheduled - state.group_scheduled
            taken = max(0, self._num_taken - state.group_taken)
            state.group_scheduled += scheduled
            state.group_moves = self.num_moves
            state.group_taken += taken
            state.own_computed += scheduled
            state.own_placeholders += scheduled - taken
            state.own_in_flight += scheduled - taken
            if taken:
                by_count.setdefault(taken, []).append(state)
        for count, some in by_count.items():
            columns = [state.group_column for state in some]
            for state, tokens in zip(some, self._tokens.read_each(columns, count)):
                state.own_token_ids += tokens

    # -- steps ---------------------------------------------------------------------------------

    def parts(
        self, room: int, prompts_last: bool
    ) -> tuple[list[SchedulerRequest], list[SchedulerRequest]] | None:
        """Who joins does so; others that run, and members that are due, are to be looked at, in this order.

        Args:
            room: requests of one token that the step which is being filled may hold.
            prompts_last: prompts that have begun are added behind all that decode.

        Returns:
            Those before, and those behind whom all members take part in the step (:meth:`schedule`); each
            member among them goes on (:meth:`keep`). None: the step need not have room for all
            members, as there are too many, or as prompts before some of them take of it.
        """
        running = self._running
        if room < len(running):
            return None
        alone = sorted(running.outside, key=by_order)
        border = len(alone)
        if not prompts_last:
            begun = (
                index
                for index, state in enumerate(alone)
                if len(state.own_token_ids) + state.own_placeholders - state.own_computed > 1
            )
            border = next(begun, border)
        if self.size and border < len(alone):
            last = next(state for state in reversed(running) if state.group is self)
            if last.sort_key > alone[border].sort_key:
                return None
        for state in alone[:border]:
            if state.may_join:
                self.join(state)
        looks = self._take_due()
        looks += [state for state in alone[:border] if state.group is None]
        looks.sort(key=by_order)
        return looks, alone[border:]

    def _take_due(self) -> list[SchedulerRequest]:
        """Members that the step which is being filled must look at, in no order; those leave whose last token
        it samples."""
        number = self._num_scheduled
        due = [s for s in self._due.pop(number, ()) if s.group is self and s.group_due == number]
        if number == self._num_taken:  # nobody has a placeholder: some are quiet for one step less
            after = self._due.get(number + 1, ())
            due += [
                s for s in after if s.group is self and s.group_due == number + 1 and not s.is_quiet
            ]
        due = list(dict.fromkeys(due))  # some are there twice
        self._settle_each(due)
        looks = []
        for state in due:
            computed = state.own_computed  # which is settled, as are placeholders
            if computed >= state.max_num_tokens - 2:  # ends_next
                self.leave(state)
            elif computed < state.quiet_until_known and state.is_quiet:
                self.keep(state)
                continue
            state.group_due = -1
            looks.append(state)
        return looks

    def schedule(self) -> int:
        """All members take part in a step; their number."""
        if self.size:
            self._num_scheduled += 1
            self.num_moves += 1
            self._left.append([])
        return self.size

    def take(self, tokens: dict[str, int]) -> list[InFlight]:
        """Take the tokens of the oldest step in flight.

        Args:
            tokens: by request id: of each member that was part of the step, and maybe others'.

        Returns:
            Parts of those that have left since it was scheduled, whose tokens were not taken.
        """
        self._tokens.put(tokens)
        self._num_taken += 1
        self.num_moves += 1
        return self._left.popleft()

    def remove(self, states: Iterable[SchedulerRequest | None]) -> None:
        """Have those leave who are members and have a part as such in the oldest step in flight."""
        for state in states:
            if state is not None and state.group is self and state.group_taken <= self._num_taken:
                self.leave(state)
