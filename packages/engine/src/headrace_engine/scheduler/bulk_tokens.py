"""Takes the tokens of requests that merely go on, of which a worker says nothing but their number."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from headrace_core.step import RequestStepResult, ScheduledStep, StepResult
from headrace_engine.scheduler import decode_group
from headrace_engine.scheduler.request import InFlight, StepInFlight
from headrace_engine.scheduler.request_tracker import RequestTracker

ALL_TOKENS = range(1 << 62)


class BulkTokens:
    """Takes :attr:`StepResult.tokens`: of the group at once, of others one by one.

    Args:
        tracker: of the requests.
    """

    def __init__(self, tracker: RequestTracker) -> None:
        self._tracker = tracker
        self._group = tracker.decoding

    def take(
        self,
        landed: StepInFlight,
        step: ScheduledStep,
        result: StepResult,
        told: dict[str, int] | None,
    ) -> list[InFlight]:
        """Take the tokens of requests of which there is nothing else to tell.

        Args:
            landed: the step.
            told: gains the tokens, by request; None: each request has an output of its own.

        Returns:
            The other requests' parts of the step; their tokens are among ``result.requests`` now.
        """
        group, ends = self._group, self._tracker.stop_token_ids
        is_alike = told is not None and bool(result.tokens)
        group.is_open = is_alike and len(self._tracker.running) >= decode_group.FEWEST_RUNNING
        if not is_alike and group.size:
            group.dissolve()
        told = {} if told is None else told
        entries, before = landed.entries, len(told)
        if landed.is_grouped:
            entries = self._take_group(landed, step, result, told)
        if result.tokens:
            entries = self._take_each(entries, result, told, ends if is_alike else ALL_TOKENS)
        self._tracker.counters.generation_tokens += len(told) - before
        return entries

    def _take_group(
        self, landed: StepInFlight, step: ScheduledStep, result: StepResult, told: dict[str, int]
    ) -> list[InFlight]:
        """Take the tokens of all members to whom nothing else happens; the other parts of the step."""
        group, tokens = self._group, result.tokens
        if group.size:
            find = self._tracker.requests.get
            group.remove(map(find, self._exceptions(step, result)))
        entries = landed.with_left(group.take(tokens))
        if group.size:
            told.update(tokens)
            if len(tokens) > len(step.num_scheduled_tokens):  # of requests that were not asked for
                for name in tokens.keys() - step.num_scheduled_tokens.keys():
                    del told[name]
            for entry in entries:
                told.pop(entry[0].request_id, None)
            self._charge(told)
        return entries

    def _exceptions(self, step: ScheduledStep, result: StepResult) -> Iterable[str]:
        """Ids of requests of a step whose tokens are looked at, or have not come as such."""
        tokens, scheduled, ends = (
            result.tokens,
            step.num_scheduled_tokens,
            self._tracker.stop_token_ids,
        )
        found = list[str]()
        if len(tokens) != len(scheduled) or list(tokens) != list(scheduled):
            found += scheduled.keys() - tokens.keys()
        if not ends.isdisjoint(tokens.values()):
            found += [name for name, token in tokens.items() if token in ends]
        return found

    def _take_each(
        self,
        entries: list[InFlight],
        result: StepResult,
        told: dict[str, int],
        ends: Container[int],
    ) -> list[InFlight]:
        """Take tokens one by one, but those that may end a request (``ends``); returns the other parts."""
        others = list[InFlight]()
        find, requests, fair = result.tokens.get, result.requests, self._tracker.fair
        late = result.late  # whose output with an earlier token is told after those of ``told``
        for entry in entries:
            state = entry[0]
            token = find(state.request_id)
            token_ids = state.own_token_ids
            if token is None:
                others.append(entry)
            elif (
                state.told_epoch == entry[1]
                and token not in ends
                and len(token_ids) + 1 < state.max_num_tokens
                and not entry[3]
                and not (late and state.request_id in late)
            ):
                state.own_in_flight -= 1
                state.own_placeholders -= 1
                token_ids.append(token)
                told[state.request_id] = token
                state.goes_by_number = True
                if fair is not None:
                    fair.charge(state.request.owner, 1)
            else:
                requests[state.request_id] = RequestStepResult([token])
                others.append(entry)
        return others

    def _charge(self, told: Mapping[str, int]) -> None:
        """Count tokens for the owners of their requests."""
        fair, find = self._tracker.fair, self._tracker.requests
        if fair is not None:
            for name in told:
                fair.charge(find[name].request.owner, 1)
