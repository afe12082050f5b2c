"""Pooling: what a caller may ask of it, what a user may set, and what a checkpoint comes to.

A pooling model turns the hidden states of a prompt into vectors or scores. What it can do is a list
of *tasks*; each request has one.

================  ==========================================================================
``embed``         one vector for the prompt
``classify``      one row of probabilities (or logits) for the prompt
``score``         the same with one label: how well the two texts of a pair fit
``token_embed``   one vector for each token
``token_classify``  one row for each token
``plugin``        whatever an IO processor makes of the results
================  ==========================================================================
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from headrace_core.errors import ConfigError, RequestError
from headrace_core.sampling import RequestOutputKind, check_plain

if TYPE_CHECKING:
    from headrace_core.engine import ServedModel

logger = logging.getLogger(__name__)

POOLING_TASKS = ("embed", "classify", "score", "token_embed", "token_classify", "plugin")
EMBED_TASKS = ("embed", "token_embed")
CLASSIFY_TASKS = ("classify", "score", "token_classify")
TOKEN_TASKS = ("token_embed", "token_classify")
"""Tasks whose result has a row for each token of the prompt."""
POOLING_TYPES = ("LAST", "ALL", "CLS", "STEP", "MEAN")

VALID_PARAMS: Mapping[str, tuple[str, ...]] = {
    "embed": ("dimensions", "normalize", "prompt_name", "num_left_out"),
    "token_embed": ("dimensions", "normalize", "prompt_name"),
    "classify": ("use_activation",),
    "score": ("use_activation",),
    "token_classify": ("use_activation",),
}
"""Task -> fields of :class:`PoolingParams` that mean something to it."""
_MODEL_DEFAULTS = ("dimensions", "normalize", "use_activation")
"""Of these, what a :class:`PoolingInfo` has by the same name."""
_STEP_PARAMS = ("step_tag_id", "returned_token_ids")


@dataclass(frozen=True, kw_only=True)
class PoolerConfig:
    """How hidden states are pooled, as a user sets it (``--pooler-config`` JSON).

    What is None follows from the checkpoint's Sentence Transformers files, else from its class.

    Raises:
        ConfigError: naming the field and what it may be.
    """

    pooling_type: str | None = None
    """One of :data:`POOLING_TYPES`, in any case: which tokens the result is made of."""
    normalize: bool | None = None
    """Divide embeddings by their length."""
    dimensions: int | None = None
    """Cut embeddings to so many numbers unless a request says otherwise; only for models that were
    trained for it."""
    enable_chunked_processing: bool | None = None
    """Embed texts beyond the model's positions in windows, and take their weighted mean.
    Cost: accuracy, as no window knows the others."""
    max_embed_len: int | None = None
    """Longest text with the above, in tokens; None: the context's length."""
    use_activation: bool | None = None
    """Turn the logits of classification into probabilities."""
    softmax: bool | None = None
    """Old name of ``use_activation``."""
    activation: bool | None = None
    """Old name of ``use_activation``."""
    logit_bias: float | None = None
    """Subtracted from the logits of classification before the activation."""
    step_tag_id: int | None = None
    """With STEP: the rows at this token only."""
    returned_token_ids: tuple[int, ...] | None = None
    """With STEP: these columns only."""

    def __post_init__(self) -> None:
        kind = self.pooling_type
        if isinstance(kind, str):
            object.__setattr__(self, "pooling_type", kind.upper())
        _accept("pooling_type", self.pooling_type, (None, *POOLING_TYPES))
        for name in ("normalize", "enable_chunked_processing", "use_activation", "softmax",
                     "activation"):  # fmt: skip
            _accept(name, getattr(self, name), (None, True, False))
        for name in ("dimensions", "max_embed_len"):
            _check_whole(name, getattr(self, name), 1)
        _check_whole("step_tag_id", self.step_tag_id, 0)
        bias = self.logit_bias
        if bias is not None and (type(bias) not in (int, float) or not -1e30 < bias < 1e30):
            _refuse("logit_bias", bias, "a number that float32 holds")
        self._check_columns()
        for old in ("softmax", "activation"):
            if getattr(self, old) is not None:
                logger.warning("pooler_config.%s is an old name of use_activation", old)
                if self.use_activation is None:
                    object.__setattr__(self, "use_activation", getattr(self, old))

    def _check_columns(self) -> None:
        columns: Any = self.returned_token_ids
        if columns is None:
            return
        if not isinstance(columns, list | tuple) or not columns:
            _refuse("returned_token_ids", columns, "a list of token ids")
        for column in columns:
            _check_whole("returned_token_ids", column, 0)
        object.__setattr__(self, "returned_token_ids", tuple(columns))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> PoolerConfig:
        """From JSON.

        Raises:
            ConfigError: a key is unknown, or its value wrong.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for name, value in values.items():
            if name not in known:
                _refuse(name, value, f"left out: no such field; fields are {', '.join(known)}")
        return cls(**values)


def as_pooler_fields(given: object) -> Mapping[str, Any]:
    """What a user gave as ``pooler_config``, as a mapping.

    Args:
        given: a mapping, a :class:`PoolerConfig`, or None for nothing.

    Raises:
        ConfigError: it is something else.
    """
    if given is None:
        return {}
    if isinstance(given, PoolerConfig):
        fields = dataclasses.asdict(given)
        return {name: value for name, value in fields.items() if value is not None}
    if isinstance(given, Mapping):
        return given
    raise ConfigError(
        f"pooler_config = {given!r}: must be a JSON object, or from Python a PoolerConfig",
        field="pooler_config",
    )


def _refuse(name: str, value: object, accepted: str) -> None:
    raise ConfigError(
        f"pooler_config.{name} = {value!r}: must be {accepted}", field=f"pooler_config.{name}"
    )


def _accept(name: str, value: object, choices: tuple[object, ...]) -> None:
    if not any(value is choice or (isinstance(value, str) and value == choice)
               for choice in choices):  # fmt: skip
        shown = ", ".join("null" if c is None else str(c) for c in choices)
        _refuse(name, value, f"one of {shown}")


def _check_whole(name: str, value: object, minimum: int) -> None:
    if value is not None and (
        isinstance(value, bool) or not isinstance(value, int) or value < minimum
    ):
        _refuse(name, value, f"a whole number of at least {minimum}")


@dataclass(frozen=True, slots=True)
class PoolingTraits:
    """How a class pools by itself, before its checkpoint and the user have their say.

    Whoever resolves a checkpoint needs it without importing the class. headrace's own classes are in
    a table; a class of another distribution has it as the class variable ``pooling_traits``, and is
    imported to be asked.
    """

    purpose: Literal["embed", "classify", "token_classify"]
    """What the class makes of a prompt: a vector, a row of logits, a row for each token."""
    pooling_type: str
    """Unless checkpoint or user say otherwise."""
    pooling_types: tuple[str, ...] = POOLING_TYPES
    """What may be said otherwise."""
    causal: bool = False
    """See :attr:`PoolingInfo.causal`."""
    token_types: bool = False
    """The class reads segments where ``type_vocab_size`` is above 1."""
    positions_follow_padding: bool = False
    """The first position is ``pad_token_id + 1`` (RoBERTa): the table has fewer than it has rows."""
    tasks: tuple[str, ...] = ()
    """Where they are not those that follow from the purpose."""
    normalize: bool = True
    """Unless checkpoint or user say otherwise."""
    num_labels: int = 0
    """Where the config's number is not the class's; 0: the config's."""
    activation: str = ""
    """The same of :attr:`PoolingInfo.activation`."""
    step_tag_id: int | None = None
    """Of classes that judge steps: the token that ends one, unless the user says otherwise."""
    sparse: bool = False
    """See :attr:`PoolingInfo.sparse`."""


@dataclass(frozen=True, slots=True)
class DenseModule:
    """A linear layer between pooling and normalisation (Sentence Transformers' ``Dense``)."""

    path: str
    """Folder of its weights below the checkpoint's: ``linear.weight`` [out, in], ``linear.bias``; "":
    they are among the model's own tensors."""
    in_features: int
    out_features: int
    bias: bool
    activation: str = "Identity"
    """Name of a class of ``torch.nn``."""


@dataclass(frozen=True, slots=True)
class LateInteraction:
    """How a multi-vector model (ColBERT, arXiv:2004.12832) marks and shortens its texts."""

    query_marker: str = ""
    """Token put behind the first special token of a query (``[Q]``); "": none."""
    document_marker: str = ""
    query_marker_id: int | None = None
    """Where the marker is one token of the vocabulary: a tokenizer may cut its text to pieces."""
    document_marker_id: int | None = None
    query_length: int = 32
    """Tokens of a query, with its special ones; shorter ones are filled up if ``expand_queries``."""
    document_length: int = 180
    expand_queries: bool = True
    """Fill queries up with the mask token."""
    attend_to_expansion: bool = False
    """Whether the filled-up tokens are attended to; they attend to the query's own in any case."""
    skip_words: tuple[str, ...] = ()
    """Tokens of documents whose vectors are left out (punctuation)."""
    skip_ids: tuple[int, ...] = ()
    """Their ids; words that are no token are left out."""
    expansion_id: int | None = None
    """Token that queries are filled up with; None: the tokenizer's mask token."""


@dataclass(frozen=True, slots=True)
class PairChat:
    """Pairs that are scored are conversations of the roles ``query`` and ``document``, with the default
    prompt as the system's message, which the checkpoint's chat template renders."""

    content_format: str = "auto"
    """``auto``, ``string`` or ``openai``: what the template expects ``content`` to be."""
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What the template gets besides."""


@dataclass(frozen=True, slots=True)
class PoolingInfo:
    """Everything that a checkpoint and the user say of pooling: nothing left open. Plain data."""

    tasks: tuple[str, ...]
    """Of :data:`POOLING_TASKS`."""
    pooling_type: str
    causal: bool
    """Whether a token sees only those before it, in all layers: then prompts may be computed in
    chunks and their beginnings reused (where the pooling type allows it)."""
    embedding_size: int = 0
    """Numbers of an uncut embedding; 0: it embeds nothing."""
    normalize: bool = True
    use_activation: bool = True
    dimensions: int | None = None
    matryoshka: tuple[int, ...] | None = None
    """Sizes to which embeddings may be cut; () = any; None = none."""
    num_labels: int = 0
    labels: tuple[str, ...] = ()
    """Name of each label, by index; () where the config has none."""
    activation: str = "softmax"
    """``identity``, ``sigmoid``, ``softmax``, or the name of a class of ``torch.nn``."""
    head_dtype: str = "float32"
    logit_bias: float | None = None
    step_tag_id: int | None = None
    returned_token_ids: tuple[int, ...] | None = None
    dense: tuple[DenseModule, ...] = ()
    enable_chunked_processing: bool = False
    max_embed_len: int | None = None
    native_len: int = 0
    """Longest prompt that is computed in one piece: the model's positions, or fewer if the context
    is set to fewer. Longer texts are embedded in windows of so many tokens."""
    scoring: str = ""
    """How pairs are scored: ``cross`` (both texts in one prompt), ``cosine`` (of embeddings),
    ``late_interaction`` (of token embeddings); "" = not at all."""
    score_template: str | None = None
    """Jinja template of a pair's prompt, for decoders that score; None: the tokenizer's own pair."""
    pair_chat: PairChat | None = None
    """None: pairs are two texts."""
    sparse: bool = False
    """Embeddings have an entry for each token of the vocabulary, nearly all of them 0."""
    sparse_sum: bool = False
    """A word's weight is the sum over the text's tokens, not the maximum."""
    sparse_log_twice: bool = False
    """The logarithm is taken twice."""
    late_interaction: LateInteraction | None = None
    prompts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Named texts to put before those that are embedded (Sentence Transformers' ``prompts``)."""
    default_prompt_name: str | None = None
    """The prompt of requests that name none; of :attr:`prompts`. None: then nothing is put."""
    include_prompt: bool = True
    """False: such a prompt's tokens are read, and left out of what is pooled (types CLS and MEAN)."""
    lower_case: bool = False
    """Texts are made lower-case first (Sentence Transformers' ``do_lower_case``)."""
    token_types: bool = False
    """The model tells the two texts of a pair apart by ids (BERT's segments)."""
    max_token_types: int = 2

    @property
    def chunks(self) -> bool:
        """Whether a prompt may be computed in several steps."""
        return self.causal

    @property
    def reuses_prefixes(self) -> bool:
        """Whether cached beginnings of prompts give what computing them would."""
        return self.causal and self.pooling_type == "LAST"

    def prompt_text(self, name: str | None) -> str:
        """What comes before a text that is embedded.

        Args:
            name: of :attr:`prompts`; None: the default one, if there is any.

        Raises:
            RequestError: there is no prompt of this name; lists those there are.
        """
        if name is None:
            return self.prompts[self.default_prompt_name] if self.default_prompt_name else ""
        if not isinstance(name, str) or name not in self.prompts:
            _fail("prompt_name", name, f"one of {sorted(self.prompts)}" if self.prompts else
                  "left out: the checkpoint names no prompts")  # fmt: skip
        return self.prompts[name]


@dataclass(slots=True)
class PoolingParams:
    """What one request asks of a pooling model. The order of the fields is part of the wire form.

    Raises:
        RequestError: from the constructor and :meth:`verify`, naming the field.
    """

    truncate_prompt_tokens: int | None = None
    """Keep the last so many tokens; -1 = as many as the model takes; None = refuse longer prompts."""
    dimensions: int | None = None
    normalize: bool | None = None
    softmax: bool | None = None
    activation: bool | None = None
    use_activation: bool | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    task: str | None = None
    requires_token_ids: bool = False
    """Whether the pooler reads the prompt's ids. It always gets them: either value is served."""
    skip_reading_prefix_cache: bool | None = None
    extra_kwargs: dict[str, Any] | None = None
    """For plug-ins: an IO processor, or the pooler of another distribution's class; refused where there
    is neither (:func:`check_extra_kwargs`). Plain data, as ``SamplingParams.extra_args``."""
    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY
    """Nothing else: a prompt is pooled once it is complete."""
    prompt_name: str | None = None
    """The prompt to put before texts, of :attr:`PoolingInfo.prompts`; None: the default one."""
    num_left_out: int | None = None
    """First tokens that an embedding of type CLS or MEAN is not made of, though they are read; at least
    one token is kept. None: those of the prompt, where the checkpoint says so
    (:attr:`PoolingInfo.include_prompt`), else none."""

    def __post_init__(self) -> None:
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
        """What a task makes of them is another question."""
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


def check_extra_kwargs(params: PoolingParams, model: ServedModel) -> None:
    """Refuse extra keywords where nobody reads them.

    Raises:
        RequestError: the model's pooler is headrace's own.
    """
    if params.extra_kwargs and not model.reads_extra_kwargs:
        _fail("extra_kwargs", params.extra_kwargs, f"left out: {model.architecture} is pooled by "
              "headrace's own code, which reads none; a plug-in's class may, and an IO processor "
              "that checks parameters (validate_or_generate_params)")  # fmt: skip


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
