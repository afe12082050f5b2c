"""Parameters of generation: :class:`SamplingParams`.

The object is mutable because callers in training loops change it between calls; it is validated
when made and again when a request is taken in (:meth:`SamplingParams.validate`).
"""

from __future__ import annotations

import contextlib
import copy
import enum
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headrace_core.arrays import own_json, own_mapping, own_value, own_values
from headrace_core.errors import RequestError, UnsupportedFeature

logger = logging.getLogger(__name__)

GREEDY_BELOW = 1e-5
"""Temperatures below this mean greedy decoding."""
LEAST_TEMPERATURE = 1e-2
"""Non-greedy temperatures below this are raised to it: dividing by less overflows."""
MAX_N = 16384
MAX_BIAS = 1e30
"""Largest ``logit_bias``; float32 holds it and what is computed of it."""
MAX_LOGPROB_TOKEN_IDS = 16


class RequestOutputKind(enum.Enum):
    """Outputs that a request yields while it runs."""

    CUMULATIVE = 0
    """Each output holds everything generated so far."""
    DELTA = 1
    """Each output holds what is new since the last."""
    FINAL_ONLY = 2
    """One output, at the end."""


CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""The kinds of constraint: fields of :class:`StructuredOutputsParams`."""


_CONSTRAINT_FIELDS = (
    *CONSTRAINTS, "whitespace_pattern", "disable_fallback", "disable_any_whitespace",
    "disable_additional_properties", "enable_in_reasoning",
)  # fmt: skip


@dataclass
class StructuredOutputsParams:
    """A constraint on the output's form; exactly one of the six kinds.

    Numbers, lists and arrays of other libraries (numpy, torch), in a schema too, become Python's own
    (:mod:`headrace_core.arrays`).

    Raises:
        RequestError: none or several kinds are given, or one is empty.
    """

    json: str | dict[str, Any] | bool | None = None
    """JSON schema, as text or parsed."""
    regex: str | None = None
    """The whole output matches."""
    choice: list[str] | None = None
    """The output is one of these."""
    grammar: str | None = None
    """EBNF (``root ::= ...``) or Lark (``start: ...``)."""
    json_object: bool | None = None
    """Any JSON object."""
    structural_tag: str | dict[str, Any] | None = None
    """Free text with constrained parts between tags; JSON as text or parsed."""
    whitespace_pattern: str | None = None
    """Regex of the white space between JSON tokens, where the backend can."""
    disable_fallback: bool = False
    """The configured backend or an error; no other backend is tried."""
    disable_any_whitespace: bool = False
    """Compact JSON."""
    disable_additional_properties: bool = False
    """Objects hold the properties that the schema names, and no others."""
    enable_in_reasoning: bool = False
    """The constraint holds from the first token on: it describes the reasoning, too, or leaves none.
    The same option of the configuration does so for all requests."""

    def __post_init__(self) -> None:
        self.choice = own_values(self.choice)
        for name in _CONSTRAINT_FIELDS:
            value = getattr(self, name)
            if type(value) not in (str, bool, type(None)):
                with contextlib.suppress(RecursionError):  # it is refused later, by its depth
                    setattr(self, name, own_json(value))
        given = self._given()
        if len(given) != 1:
            raise RequestError(
                f"structured_outputs: exactly one constraint must be given, not {given or 'none'}; "
                f"they are {list(CONSTRAINTS)}",
                param="structured_outputs",
            )
        self._check_types()

    def _check_types(self) -> None:
        accepted: tuple[tuple[str, tuple[type, ...], str], ...] = (
            ("json", (str, dict, bool), "a JSON schema, as an object or as text"),
            ("regex", (str,), "text"),
            ("choice", (list,), "a list of at least one text"),
            ("grammar", (str,), "a grammar in EBNF (root ::= ...) or Lark (start: ...)"),
            ("structural_tag", (str, dict), "a JSON object, or its text"),
            ("whitespace_pattern", (str,), "a regex"),
            ("json_object", (bool,), "True, or None"),
            ("disable_fallback", (bool,), "True or False"),
            ("disable_any_whitespace", (bool,), "True or False"),
            ("disable_additional_properties", (bool,), "True or False"),
            ("enable_in_reasoning", (bool,), "True or False"),
        )
        for name, types, what in accepted:
            value = getattr(self, name)
            empty = name == "grammar" and isinstance(value, str) and not value.strip()
            if value is not None and (not isinstance(value, types) or empty):
                self._fail(name, what)
        texts = self.choice
        if texts is not None and not (texts and all(isinstance(text, str) for text in texts)):
            self._fail("choice", "a list of at least one text")

    def _fail(self, name: str, accepted: str) -> None:
        raise RequestError(
            f"structured_outputs.{name} = {getattr(self, name)!r:.100}: must be {accepted}",
            param=f"structured_outputs.{name}",
        )

    @property
    def kind(self) -> str:
        """Name of the constraint that is set, one of :data:`CONSTRAINTS`."""
        return self._given()[0]

    def _given(self) -> list[str]:
        """The kinds that are given; ``json = False`` is the schema that admits nothing."""
        return [
            name
            for name in CONSTRAINTS
            if getattr(self, name) not in (None, False) or (name == "json" and self.json is False)
        ]


@dataclass
class SamplingParams:
    """Choice of one request's tokens, and conditions for its end.

    Numbers, lists and arrays of other libraries (numpy, torch) become Python's own
    (:mod:`headrace_core.arrays`).

    Raises:
        RequestError: naming the field, its value and the accepted range; on construction and from
            :meth:`validate`.
    """

    n: int = 1
    """Completions of the same prompt."""
    presence_penalty: float = 0.0
    """-2..2; subtracted from the logits of tokens that the output already holds."""
    frequency_penalty: float = 0.0
    """-2..2; the same, times how often."""
    repetition_penalty: float = 1.0
    """> 0; logits of tokens in prompt or output are divided (if positive) or multiplied by it."""
    temperature: float = 1.0
    """>= 0; below 1e-5 greedy."""
    top_p: float = 1.0
    """(0, 1]; keep the smallest set of tokens whose probability reaches this."""
    top_k: int = 0
    """Keep this many; 0 or -1 = all."""
    min_p: float = 0.0
    """[0, 1]; drop tokens less likely than this times the likeliest."""
    seed: int | None = None
    """Makes the request's random choices its own, the same in any batch; -1 = none."""
    stop: str | list[str] | None = None
    """Texts that end the output."""
    stop_token_ids: list[int] | None = None
    """Tokens that end the output; they stay in it, and their texts unless they are special."""
    ignore_eos: bool = False
    max_tokens: int | None = 16
    """>= 1; None = until the context is full."""
    min_tokens: int = 0
    """EOS and stop tokens are impossible before this many tokens."""
    logprobs: int | None = None
    """Log-probabilities per output token: this many best, and the chosen one; -1 = all."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens. The prefix cache is not read then."""
    flat_logprobs: bool = False
    """Return them as :class:`~headrace_core.output.FlatLogprobs`."""
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    """Keep only the last this many prompt tokens; -1 = the context's length."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    """Token id -> value added to its logit; -inf: the token is never chosen."""
    allowed_token_ids: list[int] | None = None
    """Only these may be chosen."""
    bad_words: list[str] | None = None
    """Texts whose last token is forbidden where it would complete them."""
    thinking_token_budget: int | None = None
    """>= 0; after so many tokens of reasoning its end is forced. Needs an engine that knows the marks
    (``--reasoning-parser``)."""
    extra_args: dict[str, Any] | None = None
    """For plug-ins; nothing built in reads it. Text, numbers, True and False, None, or lists and
    mappings of those by text: what crosses a process border."""
    logprob_token_ids: list[int] | None = None
    """At most :data:`MAX_LOGPROB_TOKEN_IDS` tokens whose log-probabilities are reported with every
    output token, besides those that ``logprobs`` asks for."""
    logits_processors: list[Callable[..., Any]] | None = None
    """Refused: per-request processors are not supported; see ``ModelConfig`` for batch ones."""
    skip_clone: bool = False
    """:meth:`clone` returns the object itself; for objects dedicated to one request."""

    def __post_init__(self) -> None:
        self.validate()
        if self.seed == -1:
            self.seed = None
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        if self.greedy:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
        elif self.temperature < LEAST_TEMPERATURE:
            logger.warning(
                "temperature %g raised to %g: less overflows", self.temperature, LEAST_TEMPERATURE
            )
            self.temperature = LEAST_TEMPERATURE

    @classmethod
    def from_optional(cls, **values: Any) -> SamplingParams:
        """Like the constructor; None means the default, except for ``max_tokens``."""
        return cls(**{k: v for k, v in values.items() if v is not None or k == "max_tokens"})

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> Sequence[str]:
        return [self.stop] if isinstance(self.stop, str) else (self.stop or [])

    @property
    def wants_logprobs(self) -> bool:
        """True if output tokens come with log-probabilities."""
        return self.logprobs is not None or bool(self.logprob_token_ids)

    def all_stop_token_ids(self, eos_token_ids: Sequence[int]) -> frozenset[int]:
        """The caller's stop ids, and the model's unless ``ignore_eos``."""
        own = frozenset(self.stop_token_ids or ())
        return own if self.ignore_eos else own | frozenset(eos_token_ids)

    def clone(self) -> SamplingParams:
        """A deep copy, or the object itself if ``skip_clone``."""
        if self.skip_clone:
            return self
        own = copy.copy(self)
        for name in [name for name, value in vars(self).items() if type(value) not in _PLAIN]:
            setattr(own, name, copy.deepcopy(getattr(self, name)))
        return own

    def update_from_generation_config(self, generation_config: Mapping[str, Any]) -> None:
        """Add the model's further end tokens (``eos_token_id`` lists) to the stop ids."""
        eos = generation_config.get("eos_token_id")
        if not self.ignore_eos and isinstance(eos, list):
            self.stop_token_ids = sorted({*(self.stop_token_ids or ()), *eos})

    def validate(self) -> None:
        """Check every field and every pair that must agree; numbers of other libraries become Python's."""
        self._make_own()
        self._check_kinds()
        self._check_ranges()
        self._check_pairs()
        if self.logits_processors:
            raise UnsupportedFeature(
                "logits_processors: per-request callables are not supported; they cannot be batched",
                param="logits_processors",
            )

    def _make_own(self) -> None:
        for name in _NUMBERS:
            value = getattr(self, name)
            if type(value) not in _PLAIN:
                setattr(self, name, own_value(value))
        for name in _LISTS:
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, own_values(value))
        if self.logit_bias is not None:
            self.logit_bias = own_mapping(self.logit_bias)

    def _check_kinds(self) -> None:
        for name, accepted in _LISTS.items():
            value = getattr(self, name)
            is_one = isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable)
            if value is not None and is_one and not (name == "stop" and isinstance(value, str)):
                _fail(name, value, accepted)
        for name in _FLAGS:
            value = getattr(self, name)
            if type(value) is list or value not in (True, False):
                _fail(name, value, "True or False")
        bias: object = self.logit_bias
        if bias is not None and not isinstance(bias, Mapping):
            _fail("logit_bias", bias, "a mapping of token ids to numbers")
        kind: object = self.output_kind
        if not isinstance(kind, RequestOutputKind):
            _fail("output_kind", kind, f"of {[str(each) for each in RequestOutputKind]}")
        form: object = self.structured_outputs
        if form is not None and not isinstance(form, StructuredOutputsParams):
            _fail("structured_outputs", form, "a StructuredOutputsParams")

    def _check_ranges(self) -> None:
        _whole("n", self.n, 1, MAX_N)
        _real("presence_penalty", self.presence_penalty, -2, 2)
        _real("frequency_penalty", self.frequency_penalty, -2, 2)
        _real("repetition_penalty", self.repetition_penalty, 0, math.inf, open_low=True)
        _real("temperature", self.temperature, 0, math.inf)
        _real("top_p", self.top_p, 0, 1, open_low=True)
        _whole("top_k", self.top_k, -1, None)
        _real("min_p", self.min_p, 0, 1)
        _whole("max_tokens", self.max_tokens, 1, None, optional=True)
        _whole("min_tokens", self.min_tokens, 0, self.max_tokens)
        _whole("logprobs", self.logprobs, -1, None, optional=True)
        _whole("prompt_logprobs", self.prompt_logprobs, -1, None, optional=True)
        _whole("seed", self.seed, -(2**63), 2**63 - 1, optional=True)
        _whole("thinking_token_budget", self.thinking_token_budget, 0, None, optional=True)
        _whole("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, None, optional=True)
        if self.truncate_prompt_tokens == 0:
            _fail("truncate_prompt_tokens", 0, "-1, at least 1, or None")
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            for token in getattr(self, name) or ():
                _whole(name, token, 0, None)
        if len(self.logprob_token_ids or ()) > MAX_LOGPROB_TOKEN_IDS:
            _fail("logprob_token_ids", self.logprob_token_ids,
                  f"a list of at most {MAX_LOGPROB_TOKEN_IDS} token ids")  # fmt: skip
        for token, bias in (self.logit_bias or {}).items():
            _whole("logit_bias", token, 0, None)
            if bias != -math.inf:
                _real("logit_bias", bias, -MAX_BIAS, MAX_BIAS)
        if self.extra_args is not None:
            check_plain("extra_args", self.extra_args, dict)

    def _check_pairs(self) -> None:
        if self.n > 1 and self.greedy:
            _fail("n", self.n, "1 while temperature is 0 (all completions would be equal)")
        for text in self.stop_strings:
            if not isinstance(text, str) or not text:
                _fail("stop", text, "a non-empty string")
        if self.stop_strings and not self.detokenize:
            _fail("stop", self.stop, "absent while detokenize is off: there is no text to search")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            _fail("allowed_token_ids", self.allowed_token_ids, "a non-empty list")
        for word in self.bad_words or ():
            if not isinstance(word, str) or not word:
                _fail("bad_words", word, "a non-empty string")


_PLAIN = (int, float, bool, type(None))
_LISTS: Mapping[str, str] = {
    "stop": "text, or a list of texts",
    "stop_token_ids": "a list of token ids",
    "allowed_token_ids": "a list of token ids",
    "logprob_token_ids": "a list of token ids",
    "bad_words": "a list of texts",
}
"""Fields of several values, and what they may be."""
_FLAGS = (
    "ignore_eos", "flat_logprobs", "detokenize", "skip_special_tokens",
    "spaces_between_special_tokens", "include_stop_str_in_output", "skip_clone",
)  # fmt: skip
_NUMBERS = (
    "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p",
    "top_k", "min_p", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs",
    "truncate_prompt_tokens", "thinking_token_budget", *_FLAGS,
)  # fmt: skip

MAX_BEAM_WIDTH = 256


@dataclass
class BeamSearchParams:
    """Parameters of :meth:`headrace_core.engine.EngineClient.beam_search`.

    Raises:
        RequestError: naming the field; on construction and from :meth:`validate`.
    """

    beam_width: int
    """Sequences that are kept at every step, and found in the end; 1 is greedy decoding."""
    max_tokens: int
    """Longest output, in tokens."""
    ignore_eos: bool = False
    """End tokens are tokens like others."""
    temperature: float = 0.0
    """Has an effect only with ``logprobs_mode = processed_logprobs``: raw log-probabilities, by which
    sequences are ranked, do not depend on it."""
    length_penalty: float = 1.0
    """Power of the length by which a sum of log-probabilities is divided: above 0 long outputs gain."""
    include_stop_str_in_output: bool = False
    """Show the end token in texts."""
    early_stopping: bool | Literal["never"] = False
    """When to end with enough completed sequences. True: at once. False: when the best of the others
    scores less than the worst of them now; ``never``: when it could not score more at any length."""

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Check every field; numbers of other libraries become Python's."""
        for name in vars(self):
            setattr(self, name, own_value(getattr(self, name)))
        _whole("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        _whole("max_tokens", self.max_tokens, 1, None)
        _real("temperature", self.temperature, 0, math.inf)
        _real("length_penalty", self.length_penalty, -math.inf, math.inf)
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                _fail(name, getattr(self, name), "True or False")
        early: object = self.early_stopping
        if not isinstance(early, bool) and early != "never":
            _fail("early_stopping", self.early_stopping, "True, False or 'never'")


MAX_EXTRA_DEPTH = 16
"""Nesting of ``extra_args`` and ``extra_kwargs``."""


def check_plain(name: str, value: object, kind: type = object, depth: int = 0) -> None:
    """Refuse what is no plain data, which cannot cross a process border, naming the place."""
    if depth > MAX_EXTRA_DEPTH:
        _fail(name, "...", f"nested at most {MAX_EXTRA_DEPTH} deep")
    if not isinstance(value, kind):
        _fail(name, value, "a mapping of names to values")
    if value is None or isinstance(value, (bool, float)):
        return
    if isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            _fail(name, value, "an integer of at most 64 bits")
    elif isinstance(value, str):
        if not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
            _fail(name, value, "text; it holds half of a surrogate pair")
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                _fail(name, key, "a mapping whose keys are text")
            check_plain(f"{name}.{key}", item, depth=depth + 1)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            check_plain(f"{name}[{index}]", item, depth=depth + 1)
    else:
        _fail(name, value, "text, a number, True, False, None, or lists and mappings of those")


def _fail(name: str, value: object, accepted: str) -> None:
    raise RequestError(f"{name} = {value!r}: must be {accepted}", param=name, value=value)


def _whole(name: str, value: object, low: int, high: int | None, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not (whole and low <= value <= (value if high is None else high)):  # type: ignore[operator]
        bounds = f"of at least {low}" if high is None else f"in {low}..{high}"
        _fail(name, value, f"an integer {bounds}")


def _real(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    inside = real and math.isfinite(value) and low <= value <= high  # type: ignore[arg-type,operator]
    if not inside or (open_low and value == low):
        _fail(name, value, f"a number in {'(' if open_low else '['}{low:g}, {high:g}]")
