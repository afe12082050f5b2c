"""What users write to change logits before a token is chosen: batch-level logits processors.

A processor sees every step's logits of the whole batch, [num_requests, vocabulary], and keeps its own
state by slot: the row of a request in that tensor. Who comes, goes and moves between two steps it is
told by a :class:`BatchUpdate`. For processors that think in single requests there is
:class:`AdapterLogitsProcessor`, which does that bookkeeping.

Nothing here needs torch until a processor is given tensors.
"""

from __future__ import annotations

import enum
import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from headrace_core import plugins
from headrace_core.errors import ConfigError
from headrace_core.sampling import SamplingParams

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from headrace_core.config import EngineConfig


class MoveDirectionality(enum.Enum):
    """What a move does to the slots it names."""

    UNIDIRECTIONAL = "unidirectional"
    """The first slot's request goes to the second; the first is empty afterwards."""
    SWAP = "swap"
    """Both requests change places."""


AddedRequest = tuple[int, SamplingParams, "list[int] | None", list[int]]
"""(slot, parameters, prompt token ids, output token ids).

The prompt's ids are None if it came as embeddings. The output's ids are a live list: the engine
appends each token that it samples, so a processor that keeps the list always sees the output so
far. Only the engine may change it.
"""
MovedRequest = tuple[int, int, MoveDirectionality]
"""(from slot, to slot, kind)."""


@dataclass(frozen=True, slots=True)
class BatchUpdate:
    """How the batch of a step differs from that of the step before.

    To be applied in the order removed, added, moved; moves in the order of their list. The slot of
    an added request is the one at the time of adding, before any move. Adding to an occupied slot
    replaces who was there; so does a one-way move.
    """

    batch_size: int
    """Requests after the update: rows of the logits that the step's ``apply`` gets."""
    removed: Sequence[int] = ()
    """Slots whose requests have gone and which no added request took over."""
    added: Sequence[AddedRequest] = ()
    moved: Sequence[MovedRequest] = ()


class LogitsProcessor(ABC):
    """A rule that changes logits of a batch. Used from one thread, that of the engine's steps."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Check what the processor reads of a request, usually ``sampling_params.extra_args``.

        Called when a request is taken in, also in a process that runs no model.

        Raises:
            ValueError: the request is refused with this message (HTTP 400).
        """
        return None

    @abstractmethod
    def __init__(self, config: EngineConfig, device: torch.device, is_pin_memory: bool) -> None:
        """Made once per worker, with positional arguments (name them as you like).

        Args:
            config: the engine's, resolved.
            device: where the logits are.
            is_pin_memory: whether copies to the device profit from pinned memory.
        """
        raise NotImplementedError

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """True if the largest logit of a row always stays the largest.

        Asked once, after construction. Such a processor is left out of steps in which all requests
        are greedy, and works after the temperature and ``min_p``; any other works before them.
        """
        raise NotImplementedError

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Take over how the batch has changed; None: it has not. Called before every ``apply``."""
        raise NotImplementedError

    @abstractmethod
    def apply(self, logits: Tensor) -> Tensor:
        """Change logits [batch_size, vocabulary], float32, in place or in a new tensor.

        Rows of requests that do not use the processor must stay as they are. A row whose request
        gets no token in this step holds zeros; what becomes of it is ignored.
        """
        raise NotImplementedError


RequestLogitsProcessor = (
    Callable[[Sequence[int], "Tensor"], "Tensor"]
    | Callable[[Sequence[int], Sequence[int], "Tensor"], "Tensor"]
)
"""A rule for one request: (output ids, row) -> row, or (prompt ids, output ids, row) -> row; told
apart by the number of parameters. The row is [vocabulary], float32."""

State = TypeVar("State")


def process_dict_updates(
    states: dict[int, State],
    update: BatchUpdate | None,
    make_state: Callable[[SamplingParams, list[int] | None, list[int]], State | None],
) -> bool:
    """Keep a sparse mapping from slots to states in step with the batch.

    Args:
        states: changed in place.
        update: as :meth:`LogitsProcessor.update_state` gets it.
        make_state: makes an added request's state from (parameters, prompt ids, output ids); None:
            the request does not use the processor.

    Returns:
        Whether ``states`` has changed.
    """
    if update is None:
        return False
    changed = False
    for slot in update.removed:
        changed |= states.pop(slot, None) is not None
    for slot, params, prompt_ids, output_ids in update.added:
        state = make_state(params, prompt_ids, output_ids)
        changed |= states.pop(slot, None) is not None or state is not None
        if state is not None:
            states[slot] = state
    for source, target, kind in update.moved:
        first, second = states.pop(source, None), states.pop(target, None)
        if first is not None:
            states[target] = first
        if second is not None and kind is MoveDirectionality.SWAP:
            states[source] = second
        changed |= first is not None or second is not None
    return changed


class AdapterLogitsProcessor(LogitsProcessor):
    """A batch-level processor made of rules for single requests.

    Subclasses define :meth:`new_req_logits_processor` and :meth:`is_argmax_invariant`, and
    ``validate_params`` if a request can be wrong. A subclass with a constructor of its own calls
    this one's.
    """

    def __init__(self, config: EngineConfig, device: torch.device, is_pin_memory: bool) -> None:
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


GROUP = "headrace.logits_processors"
"""Entry-point group; what is installed there is always loaded."""
_FIELD = "model.logits_processors"


def load_processors(wanted: Sequence[Any]) -> tuple[type[LogitsProcessor], ...]:
    """The classes of a start: every installed plug-in by name, then those wanted, each once.

    Args:
        wanted: classes, or their names as ``package.module:Class``.

    Raises:
        ConfigError: a module cannot be imported, a name is missing in it, or it is no subclass of
            :class:`LogitsProcessor`; names the class as it was given.
        PluginConflict, PluginLoadError: from an installed plug-in.
    """
    found = [_checked(plugin.target, plugin.load()) for plugin in plugins.installed(GROUP).values()]
    return tuple(dict.fromkeys([*found, *named_processors(wanted)]))


def named_processors(wanted: Sequence[Any]) -> list[type[LogitsProcessor]]:
    """Those classes, by themselves or by their names; raises as :func:`load_processors`."""
    return [_checked(one, _import(one) if isinstance(one, str) else one) for one in wanted]


def processor_name(processor: Any) -> str:
    """``package.module:Class`` of a class that another process can import; a name stays as it is.

    Raises:
        ConfigError: the class is local to a function or to the main program.
    """
    if isinstance(processor, str):
        return processor
    name = f"{processor.__module__}:{processor.__qualname__}"
    if processor.__module__ == "__main__" or "<locals>" in name:
        raise ConfigError(
            f"{_FIELD}: {name} cannot be imported by another process; define the class in a module "
            "of its own, or run without --engine-process",
            field=_FIELD,
        )
    return name


def _import(name: str) -> object:
    module_name, colon, path = name.partition(":")
    if not (module_name and colon and path):
        raise ConfigError(
            f"{_FIELD}: {name!r} is not a class name of the form 'package.module:Class'",
            field=_FIELD,
        )
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"{_FIELD}: {name!r}: the module {module_name!r} could not be imported: "
            f"{type(error).__name__}: {error}",
            field=_FIELD,
        ) from error
    found: object = module
    for part in path.split("."):
        if not hasattr(found, part):
            raise ConfigError(
                f"{_FIELD}: {name!r}: the module {module_name!r} has no {path!r}", field=_FIELD
            )
        found = getattr(found, part)
    return found


def _checked(name: object, found: object) -> type[LogitsProcessor]:
    if isinstance(found, type) and issubclass(found, LogitsProcessor):
        return found
    raise ConfigError(
        f"{_FIELD}: {name!r} is not a subclass of headrace.logits_process.LogitsProcessor",
        field=_FIELD,
    )
