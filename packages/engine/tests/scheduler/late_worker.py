"""A worker that returns some tokens late, as one does whose constraints are slow to match."""

from __future__ import annotations

from collections.abc import Callable

from headrace_core.step import RequestStepResult, ScheduledStep, StepResult
from headrace_testing.engine.schedulers import CheckingWorker

NEVER = 1 << 30


class LateWorker:
    """Delays tokens of a checking worker.

    Args:
        worker: samples the tokens.
        delay: (request id, number of its tokens) -> by how many steps that token is late; 0: it is not.
            A late token may be set free before with :meth:`release`.
        is_slow: ids of requests that are said to be slow with every token.
    """

    def __init__(
        self,
        worker: CheckingWorker,
        delay: Callable[[str, int], int],
        is_slow: Callable[[str], bool] = lambda request_id: True,
    ) -> None:
        self.worker = worker
        self.delay = delay
        self.is_slow = is_slow
        self.late: dict[str, RequestStepResult] = {}
        self.steps_left: dict[str, int] = {}
        self.overdue: list[str] = []
        """Requests that were scheduled while a token of theirs was late."""

    def release(self, request_id: str) -> None:
        """Its late token comes with the next step."""
        self.steps_left[request_id] = 0

    def execute(self, step: ScheduledStep) -> StepResult:
        for request_id in step.gone_request_ids:
            self.late.pop(request_id, None)
        overdue = [i for i in self.late if i in step.num_scheduled_tokens]
        self.overdue += overdue
        late = {i: self.late.pop(i) for i in overdue}
        result = self.worker.execute(step)
        for request_id, found in result.requests.items():
            if not found.token_ids:
                continue
            found.is_slow = self.is_slow(request_id)
            count = len(self.worker._held[request_id].token_ids)
            steps = self.delay(request_id, count) if step.allows_late else 0
            # Guesses are checked only as far as no token is late.
            if steps and len(found.token_ids) == 1:
                self.late[request_id] = RequestStepResult(found.token_ids, is_slow=found.is_slow)
                self.steps_left[request_id] = steps
                found.token_ids, found.is_slow = [], True
        for request_id in [i for i in self.late if i not in step.num_scheduled_tokens]:
            self.steps_left[request_id] -= 1
            if self.steps_left[request_id] <= 0:
                late[request_id] = self.late.pop(request_id)
        result.late = late
        return result

    def skip(self, step: ScheduledStep) -> None:
        """As if the step had failed after its requests were taken in."""
        for request_id in step.gone_request_ids:
            self.late.pop(request_id, None)
        self.worker.skip(step)
