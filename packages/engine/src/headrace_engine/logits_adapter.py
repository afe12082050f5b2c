"""Logits processors made of rules for single requests.

Nothing here needs torch until a processor is given tensors. Users import it from
``headrace.logits_process``.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from headrace_core.sampling.logits_processor import (
    BatchUpdate,
    LogitsProcessor,
    process_dict_updates,
)
from headrace_core.sampling.params import SamplingParams

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from headrace_core.config import PluginSettings

RequestLogitsProcessor = (
    Callable[[Sequence[int], "Tensor"], "Tensor"]
    | Callable[[Sequence[int], Sequence[int], "Tensor"], "Tensor"]
)
"""A rule for one request: (output ids, row) -> row, or (prompt ids, output ids, row) -> row; told
apart by the number of parameters. The row is [vocabulary], float32."""


class AdapterLogitsProcessor(LogitsProcessor):
    """A batch-level processor made of rules for single requests.

    Subclasses define :meth:`new_req_logits_processor` and :meth:`is_argmax_invariant`, and
    ``validate_params`` if a request can be wrong. A subclass with a constructor of its own calls
    this one's.
    """

    def __init__(self, config: PluginSettings, device: torch.device, is_pin_memory: bool) -> None:
        self._rules: dict[int, Callable[[Tensor], Tensor]] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """The rule for a request with these parameters; None: it has none."""
        raise NotImplementedError

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rules, batch_update, self._bound)

    def apply(self, logits: Tensor) -> Tensor:
        for slot, rule in self._rules.items():
            logits[slot] = rule(logits[slot])
        return logits

    def _bound(
        self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
    ) -> Callable[[Tensor], Tensor] | None:
        """The request's rule with its tokens filled in: a function of the row alone."""
        rule: Any = self.new_req_logits_processor(params)
        if rule is None:
            return None
        count = len(inspect.signature(rule).parameters)
        if count == 2:
            return lambda row: rule(output_ids, row)
        if count == 3:
            return lambda row: rule(prompt_ids or [], output_ids, row)
        raise TypeError(
            f"{type(self).__name__}.new_req_logits_processor: the callable takes {count} arguments; "
            "it must take (output_ids, row) or (prompt_ids, output_ids, row)"
        )


class ForbiddenWords:
    """A rule for one request: sequences of tokens that its output must not complete.

    A :data:`RequestLogitsProcessor` for use in an :class:`AdapterLogitsProcessor`. Words of one token
    are impossible always, others where the output ends with all their tokens but the last.

    Args:
        words: token sequences, none empty.
    """

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self._words = [list(word) for word in words if word]
        self._checked = 0

    def __call__(self, output_ids: Sequence[int], row: Tensor) -> Tensor:
        """Make tokens of the row [vocabulary] impossible, in place.

        Raises:
            ValueError: a word holds tokens that the row has not; lists them.
        """
        self._check(row.shape[0])
        for word in self._words:
            before = len(word) - 1
            if not before or list(output_ids[-before:]) == word[:-1]:
                row[word[-1]] = float("-inf")
        return row

    def _check(self, vocab_size: int) -> None:
        if vocab_size == self._checked:
            return
        outside = sorted({i for word in self._words for i in word if not 0 <= i < vocab_size})
        if outside:
            raise ValueError(f"token ids {outside}: must be in 0..{vocab_size - 1}")
        self._checked = vocab_size
