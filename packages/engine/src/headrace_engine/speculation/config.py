"""Settings of speculative decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace_core import plugins
from headrace_core.config import option, require
from headrace_core.errors import HeadraceError, PluginError
from headrace_core.speculation import DraftProposer

DRAFT_MODEL = "draft_model"
HEADS = ("mlp_speculator", "medusa", "eagle", "eagle3")
"""Methods of checkpoints that read the model's hidden states."""
WITHIN = (
    "mtp", "deepseek_mtp", "mimo_mtp", "glm4_moe_mtp", "ernie_mtp", "qwen3_next_mtp",
    "longcat_flash_mtp", "pangu_ultra_moe_mtp",
)  # fmt: skip
"""Methods of layers in the model's own checkpoint."""
BY_MODEL = (DRAFT_MODEL, *HEADS, *WITHIN)
"""Methods that are no proposers of ``headrace.draft_proposers``."""
_BUILT_IN = ("ngram", "suffix", *BY_MODEL)
_SUFFIX_DRAFTS = 32
_MOST_FACTOR = 1e6
_OF_METHODS = (
    ("prompt_lookup_", ("ngram",)), ("suffix_decoding_", ("suffix",)),
    ("quantization", (DRAFT_MODEL, *HEADS)), ("revision", (DRAFT_MODEL, *HEADS)),
    ("options", ("a plug-in's name",)),
)  # fmt: skip
"""Beginnings of settings that some methods read."""


def _of_plugin(method: str | None) -> str:
    """Words behind the name of a method that is not built in, which may be misspelt."""
    return "" if method in _BUILT_IN else f", a plug-in's; built in are {', '.join(_BUILT_IN)}"


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Speculative decoding: tokens are guessed, and checked several in a step. Outputs do not change."""

    method: str | None = option(
        None, "Who guesses: ngram (what followed the last tokens where they came before), suffix (what "
        "followed most often, in earlier outputs too), draft_model (a smaller model), eagle, eagle3, "
        "mlp_speculator, medusa (trained heads), mtp (layers of the model's own checkpoint), or a plug-in's "
        "name. Default: what the model is, if there is one, else nobody.",
        cost="a step that checks guesses takes longer than one that does not",
    )  # fmt: skip
    model: str | None = option(
        None, "draft_model and heads: folder or hub name of a checkpoint with the model's vocabulary.",
        cost="its weights, and its keys and values of every request",
    )  # fmt: skip
    quantization: str | None = option(None, "As --quantization, of the draft model or head.")
    revision: str | None = option(
        None, "Branch, tag or commit on the hub, of the draft model or head."
    )
    num_speculative_tokens: int | None = option(
        None, "Guesses a request and step, at most. Default for suffix: 32; for heads what they are made "
        "for, if they say it; others need a number.",
        cost="room in the cache for as many tokens of each running request; of recurrent layers, 8 states",
    )  # fmt: skip
    adaptive: bool = option(
        True, "Check only as many guesses as pay: by how many were right and how long steps take."
    )
    disable_by_batch_size: int | None = option(
        None,
        "Running requests above which nothing is guessed. Default: guesses stop where they do not pay.",
    )
    prompt_lookup_max: int | None = option(None, "ngram: longest run of tokens that is sought.")
    prompt_lookup_min: int | None = option(None, "ngram: shortest run that counts. Default: 1.")
    suffix_decoding_max_tree_depth: int = option(
        24, "suffix: longest run of tokens that is sought."
    )
    suffix_decoding_max_cached_requests: int = option(
        10000, "suffix: earlier outputs that are kept, the oldest goes first. 0: none.",
        cost="about 300 bytes a token of them",
    )  # fmt: skip
    suffix_decoding_max_spec_factor: float = option(
        1.0, "suffix: guesses for each token of the run that was found."
    )
    suffix_decoding_min_token_prob: float = option(
        0.1, "suffix: estimated probability below which a guess is not made."
    )
    options: Mapping[str, Any] = option({}, "Settings of a plug-in's method, as it knows them.")

    def __post_init__(self) -> None:
        if self.method is None and self.model is None:
            self._check_nothing_is_set()
            return
        require(
            (self.model is not None) == (self.method in (None, DRAFT_MODEL, *HEADS)),
            "speculative_config.model",
            self.model,
            f"a checkpoint with method = {', '.join(map(repr, (DRAFT_MODEL, *HEADS)))}, and left out with "
            "others",
        )
        count = self.num_speculative_tokens
        says = self.method in (None, "suffix", *HEADS, *WITHIN)
        require(
            count is not None or says,
            "speculative_config.num_speculative_tokens",
            count,
            f"a number with method = {self.method!r}{_of_plugin(self.method)}",
        )
        require(count is None or 1 <= count <= 256, "speculative_config.num_speculative_tokens", count,
               "in 1..256")  # fmt: skip
        most = self.disable_by_batch_size
        require(
            most is None or most >= 1,
            "speculative_config.disable_by_batch_size",
            most,
            "at least 1",
        )
        if self.method == "ngram":
            self._check_ngram()
        self._check_suffix()
        if self.method in ("ngram", "suffix", *BY_MODEL):  # a plug-in gets all, and may read them
            self._check_others()

    def _check_nothing_is_set(self) -> None:
        for field in dataclasses.fields(self):
            self._check_left_out(
                field,
                "left out without speculative_config.method: ngram, suffix or a plug-in's name",
            )

    def _check_others(self) -> None:
        """Refuse what only other methods read."""
        for field in dataclasses.fields(self):
            for beginning, methods in _OF_METHODS:
                if field.name.startswith(beginning) and self.method not in methods:
                    known = " or ".join(map(repr, methods))
                    self._check_left_out(
                        field, f"left out with method = {self.method!r}: it is read with {known}"
                    )

    def _check_left_out(self, field: dataclasses.Field[Any], accepted: str) -> None:
        value = getattr(self, field.name)
        default = field.default if field.default is not dataclasses.MISSING else {}
        require(value == default, f"speculative_config.{field.name}", value, accepted)

    def _check_ngram(self) -> None:
        longest, shortest = self.prompt_lookup_max, self.prompt_lookup_min
        shortest = 1 if shortest is None else shortest
        name = "speculative_config.prompt_lookup_max"
        require(
            longest is not None and longest >= 1, name, longest, "at least 1 with method = 'ngram'"
        )
        require(
            1 <= shortest <= (longest or 0),
            "speculative_config.prompt_lookup_min",
            self.prompt_lookup_min,
            f"in 1..prompt_lookup_max = {longest}",
        )

    def _check_suffix(self) -> None:
        for name, least in (
            ("max_tree_depth", 1),
            ("max_cached_requests", 0),
            ("max_spec_factor", 0.01),
        ):
            field = f"suffix_decoding_{name}"
            value = getattr(self, field)
            require(value >= least, f"speculative_config.{field}", value, f"at least {least}")
        factor, name = self.suffix_decoding_max_spec_factor, "suffix_decoding_max_spec_factor"
        require(
            factor <= _MOST_FACTOR,
            f"speculative_config.{name}",
            factor,
            f"at most {_MOST_FACTOR:g}",
        )
        value = self.suffix_decoding_min_token_prob
        require(
            0 <= value <= 1, "speculative_config.suffix_decoding_min_token_prob", value, "in 0..1"
        )

    @property
    def num_drafts(self) -> int:
        """Guesses a request and step, at most; 0: nobody guesses."""
        if self.method is None and self.model is None:
            return 0
        return self.num_speculative_tokens or _SUFFIX_DRAFTS

    def make_proposer(self) -> DraftProposer | None:
        """Who guesses; None: nobody, or a model.

        Raises:
            PluginNotFound, PluginLoadError: no such method, or its package does not import.
            PluginError: it is no :class:`DraftProposer`, or cannot be made.
            ConfigError: the method refuses its settings.
        """
        if self.method is None or self.method in BY_MODEL:
            return None
        settings = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        made = plugins.load("headrace.draft_proposers", str(self.method))
        if not (isinstance(made, type) and issubclass(made, DraftProposer)):
            raise PluginError(
                f"draft proposer {self.method!r}: must be a subclass of DraftProposer, not {made!r:.200}"
            )
        try:
            return made({**settings, **self.options})
        except HeadraceError:
            raise
        except Exception as error:
            raise PluginError(
                f"draft proposer {self.method!r} cannot be made: {type(error).__name__}: {error}"
            ) from error
