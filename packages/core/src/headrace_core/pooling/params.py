"""Parameters of one request to a pooling model."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from headrace_core.arrays import own_value, own_values
from headrace_core.errors import RequestError
from headrace_core.pooling.info import (
    CLASSIFY_TASKS,
    EMBED_TASKS,
    POOLING_TASKS,
    TOKEN_TASKS,
    PoolingInfo,
)
from headrace_core.sampling.params import RequestOutputKind, check_plain

logger = logging.getLogger(__name__)

VALID_PARAMS: Mapping[str, tuple[str, ...]] = {
    "embed": ("dimensions", "normalize", "prompt_name", "num_left_out"),
    "token_embed": ("dimensions", "normalize", "prompt_name"),
    "classify": ("use_activation",),
    "score": ("use_activation",),
    "token_classify": ("use_activation",),
}
"""Task -> fields of :class:`PoolingParams` that mean something to it."""
_MODEL_DEFAULTS = ("dimensions", "normalize", "use_activation")
"""Fields whose defaults come from the :class:`PoolingInfo` field of the same name."""
_NUMBERS = (
    "truncate_prompt_tokens", "dimensions", "normalize", "softmax", "activation", "use_activation",
    "step_tag_id", "requires_token_ids", "skip_reading_prefix_cache", "num_left_out",
)  # fmt: skip
_STEP_PARAMS = ("step_tag_id", "returned_token_ids")


@dataclass(slots=True)
class PoolingParams:
    """Parameters of one request to a pooling model. The order of the fields is part of the wire form.

    Raises:
        RequestError: from the constructor and :meth:`verify`, naming the field.
    """

    truncate_prompt_tokens: int | None = None
    """Keep so many tokens; -1 = as many as the model takes; None = refuse longer prompts."""
    dimensions: int | None = None
    normalize: bool | None = None
    softmax: bool | None = None
    activation: bool | None = None
    use_activation: bool | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    task: str | None = None
    requires_token_ids: bool = False
    """True if the pooler reads the prompt's ids. It always gets them: either value is served."""
    skip_reading_prefix_cache: bool | None = None
    extra_kwargs: dict[str, Any] | None = None
    """For plug-ins: an IO processor, or the pooler of another distribution's class; refused where there
    is neither (:meth:`~headrace_core.served_model.ServedModel.check_extra_kwargs`). Plain data, as
    ``SamplingParams.extra_args``."""
    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY
    """Nothing else: a prompt is pooled once it is complete."""
    prompt_name: str | None = None
    """The prompt to put before texts, of :attr:`PoolingInfo.prompts`; None: the default one."""
    num_left_out: int | None = None
    """First tokens that an embedding of type CLS or MEAN is not made of, though they are read; at least
    one token is kept. None: those of the prompt, where the checkpoint says so
    (:attr:`PoolingInfo.include_prompt`), else none."""
    truncation_side: Literal["left", "right"] = "left"
    """Side at which a prompt loses the tokens that ``truncate_prompt_tokens`` does not keep: its beginning
    (``left``) or its end. Special tokens around a text stay."""

    def __post_init__(self) -> None:
        self._make_own()
        if self.output_kind is not RequestOutputKind.FINAL_ONLY:
            _fail("output_kind", self.output_kind, "RequestOutputKind.FINAL_ONLY: pooling has final "
                  "outputs only")  # fmt: skip
        if self.extra_kwargs is not None:
            check_plain("extra_kwargs", self.extra_kwargs, dict)
        value = self.truncate_prompt_tokens
        wrong = value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or value < -1 or value == 0
        )
        if wrong:
            raise RequestError(
                f"truncate_prompt_tokens = {value!r}: must be -1, at least 1, or None",
                param="truncate_prompt_tokens",
                value=value,
            )
        if self.truncation_side not in ("left", "right"):
            _fail("truncation_side", self.truncation_side, "'left' or 'right'")

    def _make_own(self) -> None:
        """Numbers of other libraries become Python's (:mod:`headrace_core.arrays`)."""
        for name in _NUMBERS:
            value = getattr(self, name)
            if type(value) not in (int, bool, type(None)):
                setattr(self, name, own_value(value))
        if self.returned_token_ids is not None:
            self.returned_token_ids = own_values(self.returned_token_ids)

    def clone(self) -> PoolingParams:
        """A deep copy."""
        clone = copy.copy(
            self
        )  # made for each request: only what can be changed is worth looking into
        clone.returned_token_ids = copy.copy(self.returned_token_ids)
        clone.extra_kwargs = copy.deepcopy(self.extra_kwargs)
        return clone

    def verify(self, task: str, info: PoolingInfo | None, model_name: str = "") -> None:
        """Check against a task and a model, and fill in what was left open. Changes this object.

        Args:
            task: what is asked for.
            info: None: nothing is known of the model, and nothing is filled in from it.
            model_name: as it is served, for messages.
        """
        if self.task is None:
            self.task = task
        elif self.task != task:
            _fail("task", self.task, f"{task!r}, which the call asks for")
        self._check_values(info)
        self._fold_old_names()
        if task == "plugin":
            if self.skip_reading_prefix_cache is None:
                self.skip_reading_prefix_cache = True
            return
        if info is not None:
            self._fill_from(task, info)
        elif self.skip_reading_prefix_cache is None:
            self.skip_reading_prefix_cache = False
        self._fill_defaults(task)
        if self.dimensions is not None and task in EMBED_TASKS:
            self._check_dimensions(info, model_name)
        if self.prompt_name is not None and task in EMBED_TASKS and info is not None:
            info.prompt_text(self.prompt_name)
        offending = [n for n in (*_MODEL_DEFAULTS, "prompt_name", "num_left_out")
                     if getattr(self, n) is not None and n not in VALID_PARAMS[task]]  # fmt: skip
        if offending:
            _fail_params(task, VALID_PARAMS[task], offending)

    def _check_values(self, info: PoolingInfo | None) -> None:
        """Check values independently of how a task uses them."""
        self._make_own()
        for name in ("normalize", "use_activation", "softmax", "activation"):
            if getattr(self, name) not in (None, True, False):
                _fail(name, getattr(self, name), "True, False or None")
        if self.requires_token_ids not in (True, False):
            _fail("requires_token_ids", self.requires_token_ids, "True or False")
        if self.extra_kwargs is not None:
            check_plain("extra_kwargs", self.extra_kwargs, dict)
        left_out: Any = self.num_left_out
        if left_out is not None and (type(left_out) is not int or left_out < 0):
            _fail("num_left_out", left_out, "at least 0")
        labels = info.num_labels if info is not None else 0
        columns: Any = self.returned_token_ids
        if columns is not None:
            if not isinstance(columns, list | tuple) or not columns:
                _fail("returned_token_ids", columns, "a list of token ids")
            for column in columns:
                if type(column) is not int or column < 0 or (labels and column >= labels):
                    accepted = f"in 0..{labels - 1}" if labels else "a token id"
                    _fail("returned_token_ids", column, accepted)
        tag: Any = self.step_tag_id
        if tag is not None and (type(tag) is not int or tag < 0):
            _fail("step_tag_id", tag, "a token id")

    def _fold_old_names(self) -> None:
        for old in ("softmax", "activation"):
            value = getattr(self, old)
            if value is not None:
                _warn_of_old_name(old)
                if self.use_activation is None:
                    self.use_activation = value
                setattr(self, old, None)

    def _fill_from(self, task: str, info: PoolingInfo) -> None:
        for name in VALID_PARAMS.get(task, ()):
            if name in _MODEL_DEFAULTS and getattr(self, name) is None:
                setattr(self, name, getattr(info, name))
        if self.skip_reading_prefix_cache is None:
            self.skip_reading_prefix_cache = task in TOKEN_TASKS
        given = [name for name in _STEP_PARAMS if getattr(self, name) is not None]
        if info.pooling_type != "STEP":
            if given:
                _fail_params(task, VALID_PARAMS.get(task, ()), given)
            return
        if self.step_tag_id is None:
            self.step_tag_id = info.step_tag_id
        if self.returned_token_ids is None and info.returned_token_ids is not None:
            self.returned_token_ids = list(info.returned_token_ids)

    def _fill_defaults(self, task: str) -> None:
        if task in EMBED_TASKS:
            self.normalize = True if self.normalize is None else self.normalize
        elif task in CLASSIFY_TASKS:
            self.use_activation = True if self.use_activation is None else self.use_activation
        else:
            raise RequestError(
                f"task = {task!r}: Unknown pooling task; must be one of {list(POOLING_TASKS)}",
                param="task",
                value=task,
            )

    def _check_dimensions(self, info: PoolingInfo | None, model_name: str) -> None:
        size = self.dimensions
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            _fail("dimensions", size, "greater than 0")
        if info is None:
            return
        assert size is not None
        if info.matryoshka is None:
            _fail("dimensions", size, f"left out: model {model_name!r} does not support matryoshka "
                  "representation (hf_overrides can say that it does: is_matryoshka, "
                  "matryoshka_dimensions)")  # fmt: skip
        elif info.matryoshka and size not in info.matryoshka:
            _fail("dimensions", size, f"one of {list(info.matryoshka)}, the sizes that model "
                  f"{model_name!r} was trained for")  # fmt: skip
        elif size > info.embedding_size:
            _fail("dimensions", size, f"at most {info.embedding_size}, the size of an embedding")


@functools.cache
def _warn_of_old_name(name: str) -> None:
    """Once: every request may bring it."""
    logger.warning("pooling parameter %s is an old name of use_activation", name)


def _fail(name: str, value: object, accepted: str) -> None:
    raise RequestError(f"{name} = {value!r}: must be {accepted}", param=name, value=value)


def _fail_params(task: str, valid: tuple[str, ...], offending: list[str]) -> None:
    raise RequestError(
        f"{', '.join(offending)}: must be left out for task {task!r}, whose parameters are "
        f"{list(valid)}",
        param=offending[0],
    )
