"""Sampling parameters against the model, the device and the logits processors."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence

from headrace_core.errors import GenerateError, RequestError, UnsupportedFeature
from headrace_core.sampling.logits_processor import LogitsProcessor
from headrace_core.sampling.params import SamplingParams
from headrace_core.served_model import ServedModel
from headrace_core.text import Tokenizer
from headrace_engine.input_processing.tokens import check_ids, need_tokenizer
from headrace_engine.kv_transfer.params import check_transfer_params

logger = logging.getLogger(__name__)


class ParamsChecks:
    """Checks of one engine. Thread-safe.

    Args:
        tokenizer: None: what names text is refused.
        model: facts and limits.
        processors: logits processors that the engine runs; they check requests.
        check_device: refuses what the device cannot honour.
        kv_role: of the engine's KV connector; "": it has none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        model: ServedModel,
        processors: Sequence[type[LogitsProcessor]],
        check_device: Callable[[SamplingParams], None] | None,
        kv_role: str = "",
    ) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._processors = tuple(processors)
        self._check_device = check_device
        self._kv_role = kv_role

    def check(self, params: SamplingParams) -> None:
        """Refuse what this engine cannot honour.

        Raises:
            RequestError: naming the field.
            GenerateError: a logits processor failed to check the request.
        """
        size = self._model.vocab_size
        if self._check_device is not None:
            self._check_device(params)
        self._check_count("logprobs", params.logprobs)
        self._check_count("prompt_logprobs", params.prompt_logprobs)
        check_ids("stop_token_ids", params.stop_token_ids or (), size)
        check_ids("allowed_token_ids", params.allowed_token_ids or (), size)
        check_ids("logprob_token_ids", params.logprob_token_ids or (), size)
        check_ids("logit_bias", params.logit_bias or (), size)
        if params.stop_strings:
            need_tokenizer(self._tokenizer, "stop")
        check_transfer_params(params.extra_args, self._kv_role)
        for processor in self._processors:
            _ask(processor, params)

    def bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Tokens of each bad word, as it is spelled at the beginning of a text and after a space."""
        found: list[list[int]] = []
        for word in params.bad_words or ():
            tokenizer = need_tokenizer(self._tokenizer, "bad_words")
            bare = word.lstrip()
            for spelling in (bare, " " + bare) if bare else (word,):
                ids = tokenizer.encode(spelling, add_special_tokens=False)
                if ids and ids not in found:
                    check_ids("bad_words", ids, self._model.vocab_size)
                    found.append(ids)
        return found

    def check_possible(
        self,
        params: SamplingParams,
        bad_words: Sequence[Sequence[int]],
        stop_token_ids: Collection[int],
    ) -> None:
        """Refuse fields that together leave no first token.

        Args:
            params: checked.
            bad_words: the tokens of each.
            stop_token_ids: those that end the output, the model's included.

        Raises:
            RequestError: naming the fields.
        """
        size = self._model.vocab_size
        excluded = {
            "bad_words": {word[0] for word in bad_words if len(word) == 1},
            "logit_bias": {i for i, bias in (params.logit_bias or {}).items() if bias == -math.inf},
            "min_tokens": {i for i in stop_token_ids if i < size} if params.min_tokens else set(),
        }
        allowed = params.allowed_token_ids
        if allowed is None and sum(map(len, excluded.values())) < size:
            return  # as nearly always: the vocabulary is large
        left = set(range(size) if allowed is None else allowed)
        to_blame = [name for name, ids in excluded.items() if not ids.isdisjoint(left)]
        if left.difference(*excluded.values()):
            return
        field = "allowed_token_ids" if allowed is not None else to_blame[0]
        of_what = "its tokens" if allowed is not None else f"the {size} tokens of the vocabulary"
        raise RequestError(
            f"{field}: with {' and '.join(to_blame)}, none of {of_what} is possible; at least one must be",
            param=field,
        )

    def _check_count(self, name: str, count: int | None) -> None:
        if count is None:
            return
        size, most = self._model.vocab_size, self._model.max_logprobs
        wanted = size if count == -1 else count
        limit, source = (size, "the vocabulary's size") if most == -1 else (most, "max_logprobs")
        if wanted > limit:
            whole = f" (the whole vocabulary, {size})" if count == -1 else ""
            raise RequestError(
                f"{name} = {count}{whole}: must be at most {source} = {limit}",
                param=name,
                value=count,
            )


def check_with_embeds(params: SamplingParams) -> None:
    """Refuse what a prompt of embeddings does not have."""
    if params.prompt_logprobs is not None:
        raise UnsupportedFeature(
            "prompt_logprobs: must be absent with prompt_embeds, which has no tokens to describe",
            param="prompt_logprobs",
        )


def check_encodes(params: SamplingParams, media: Sequence[object]) -> None:
    """Refuse what an engine that only encodes media has no answer to.

    Raises: UnsupportedFeature: the prompt brings none, or the request asks for more.
    """
    if not media:
        raise UnsupportedFeature(
            "prompt: must bring media: this engine only encodes them (ec_role = 'ec_producer')",
            param="prompt",
        )
    for name, none in _SAYS_OF_TOKENS.items():
        value = getattr(params, name)
        if value != none:
            raise UnsupportedFeature(
                f"{name} = {value!r:.100}: must be {none!r} or left out: this engine only encodes media "
                "(ec_role = 'ec_producer')",
                param=name,
            )


_SAYS_OF_TOKENS: Mapping[str, object] = {
    "n": 1, "logprobs": None, "prompt_logprobs": None, "structured_outputs": None,
}  # fmt: skip
"""Parameters about what the language model makes of a prompt -> the value that asks for nothing."""


def _ask(processor: type[LogitsProcessor], params: SamplingParams) -> None:
    """Have a processor check a request. Its own words are for the client, a bug's are not."""
    try:
        processor.validate_params(params)
    except RequestError:
        raise
    except ValueError as error:
        raise RequestError(f"{processor.__name__}: {error}", param="extra_args") from error
    except (Exception, SystemExit) as error:
        name = f"{processor.__module__}:{processor.__qualname__}"
        logger.exception("logits processor %s failed to check a request", name)
        raise GenerateError(f"logits processor {name} failed to check the request") from error
