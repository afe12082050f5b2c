"""Pairs of texts to be scored: which prompts must be pooled for them, and what scores come of it.

``cross``              both texts in one prompt: by the tokenizer's rule for pairs, or by a template
                       that gets two messages, of the roles ``query`` and ``document``
``cosine``             the cosine of the two texts' embeddings
``late_interaction``   the sum, over the query's tokens, of the best match among the document's
                       (MaxSim, arXiv:2004.12832)

Texts that are embedded by themselves are so once, however many pairs they are in.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_core.lora import LoRARequest
from headrace_core.output import PoolingRequestOutput, ScoringOutput, all_versions
from headrace_core.pooling import PairChat, PoolingInfo, PoolingParams
from headrace_core.pooling.scoring import ScoreInput, pair_up
from headrace_core.request import ChatPrompt, Prompt, brings_media, modality_of
from headrace_core.served_model import ServedModel
from headrace_engine.input_processing.chat.content import PairSides
from headrace_engine.input_processing.control_tokens import RenderedPrompt
from headrace_engine.input_processing.late_interaction import MarkedTexts
from headrace_engine.input_processing.pooling import PairPrompt, PoolingPrompt, check_task
from headrace_engine.input_processing.prompts import PairParts
from headrace_engine.input_processing.tokens import need_tokenizer
from headrace_engine.output_processing.pooled import PooledOutput
from headrace_engine.pooling.activation import check_activation
from headrace_engine.pooling.jobs import PoolingJob

Scored = PoolingRequestOutput[ScoringOutput]
Pairs = Sequence[tuple[ScoreInput, ScoreInput]]
RenderPair = Callable[[str, str, str | None], RenderedPrompt | None]
"""(query, document, the call's template) -> prompt; None: the model has no template."""

_TEXT_FIELDS = frozenset({"prompt", "prompt_token_ids", "cache_salt"})
AT_ONCE = 256
"""Prompts of one call that are under way together on an asynchronous engine."""


Content = str | Sequence[Mapping[str, Any]]
"""Text, or parts as in a chat message."""


@dataclass(frozen=True, slots=True)
class ScorePlan:
    """Prompts to be pooled, and the pairs that they are for."""

    jobs: list[PoolingJob]
    pairs: list[tuple[int, int]]
    """Indices of the jobs of each pair; a cross-encoder's pair is one job, twice."""
    measure: Callable[[PooledOutput, PooledOutput], float]
    request_id: str

    def outputs(self, results: Sequence[PooledOutput]) -> list[Scored]:
        """One score for each pair, from one result for each job."""
        return [
            self._scored(index, results[first], results[second])
            for index, (first, second) in enumerate(self.pairs)
        ]

    def _scored(self, index: int, first: PooledOutput, second: PooledOutput) -> Scored:
        both = first is not second
        return PoolingRequestOutput(
            f"{self.request_id}-{index}" if len(self.pairs) > 1 else self.request_id,
            ScoringOutput(self.measure(first, second)),
            first.prompt_token_ids + second.prompt_token_ids if both else first.prompt_token_ids,
            first.num_cached_tokens + (second.num_cached_tokens if both else 0),
            metrics=second.metrics,
            weights_versions=all_versions((first.weights_versions, second.weights_versions)),
        )


class ScorePlanner:
    """Plans the scores of one model.

    Args:
        model: facts, as they are when a call comes.
        render: makes prompts of pairs, where there is a template.
        marked: makes prompts of texts for late interaction; None: the model has none.
    """

    def __init__(
        self,
        model: Callable[[], ServedModel],
        render: RenderPair,
        marked: MarkedTexts | None,
    ) -> None:
        self._model = model
        self._render = render
        self._marked = marked

    def plan(
        self,
        data_1: Sequence[ScoreInput],
        data_2: Sequence[ScoreInput],
        params: PoolingParams,
        request_id: str,
        *,
        priority: int = 0,
        chat_template: str | None = None,
        add_special_tokens: bool | None = None,
        lora_request: LoRARequest | None = None,
    ) -> ScorePlan:
        """Plan the prompts that must be pooled.

        Args:
            chat_template: of pairs; only for models that read both texts in one prompt.
            add_special_tokens: False: not even around texts; only for models that embed each text, and
                for pairs that a template makes one.

        Raises:
            UnsupportedFeature: the model scores nothing, or has no use for a template; or its texts
                are told apart by special tokens, which were to be left out.
            RequestError: the pairs fit no form (:func:`headrace_core.pooling.scoring.pair_up`), the template
                fails, or an activation is asked for where nothing has one.
        """
        info = self._scoring_info()
        if chat_template is not None and info.scoring != "cross":
            raise UnsupportedFeature(
                "chat_template: must be left out: the model reads each text by itself",
                param="chat_template",
            )
        check_activation(params, info)
        pairs = pair_up(data_1, data_2)

        def job(prompt: PoolingPrompt, task: str, index: int, side: str = "") -> PoolingJob:
            own_id = f"{request_id}-{index}"
            if add_special_tokens is False:
                _check_plain(prompt, info)
            return PoolingJob(
                prompt,
                params,
                task,
                own_id,
                priority,
                add_special_tokens,
                request_id,
                side,
                lora_request,
            )

        if info.scoring == "cross":
            jobs = [
                job(self._pair_prompt(index, pair, chat_template, info), "score", index)
                for index, pair in enumerate(pairs)
            ]
            return ScorePlan(jobs, [(i, i) for i in range(len(jobs))], _single, request_id)
        if info.scoring == "late_interaction":
            texts = self._token_texts(params, info)
            indices = [texts.pair(*pair) for pair in pairs]
            jobs = [job(p, "token_embed", i, s) for i, (p, s) in enumerate(texts.prompts)]
            return ScorePlan(jobs, indices, self._max_sim(info), request_id)
        modalities = self._model().modalities
        embedded = partial(_prompt_of, modalities=modalities)
        texts = _Distinct(embedded, embedded)
        indices = [texts.pair(*pair) for pair in pairs]
        jobs = [job(p, "embed", i, s) for i, (p, s) in enumerate(texts.prompts)]
        return ScorePlan(jobs, indices, _cosine, request_id)

    def _token_texts(self, params: PoolingParams, info: PoolingInfo) -> _Distinct:
        """Prompts of the sides whose tokens are compared.

        Raises:
            UnsupportedFeature: texts would be cut at a side that marks do not allow.
            RequestError: there is no tokenizer.
        """
        if info.late_interaction is None:
            conversation = self._conversation
            return _Distinct(conversation, conversation)
        if self._marked is None:
            need_tokenizer(None, "text_1")
        if params.truncation_side != "left":
            raise UnsupportedFeature(
                f"truncation_side = {params.truncation_side!r}: must be left out: this model's "
                "texts are cut where their marks demand it",
                param="truncation_side",
            )
        keep = params.truncate_prompt_tokens
        keep = None if keep == -1 else keep
        return _Distinct(
            lambda value: self._query(value, keep), lambda value: self._document(value, keep)
        )

    def _scoring_info(self) -> PoolingInfo:
        model = self._model()
        info = model.pooling
        if info is None or not info.scoring:
            check_task(model, "score", call="score")
            raise UnsupportedFeature(
                f"score: {model.architecture} cannot compare texts", param="task"
            )
        return info

    def _pair_prompt(
        self,
        index: int,
        pair: tuple[ScoreInput, ScoreInput],
        template: str | None,
        info: PoolingInfo,
    ) -> PoolingPrompt:
        first, second = pair
        modalities = self._model().modalities
        query = _content_of(first, "text_1", modalities)
        document = _content_of(second, "text_2", modalities)
        if info.pair_chat is not None and template is None:
            introduction = info.prompt_text(None)
            return _conversation(
                info.pair_chat, introduction, query, document, _salt(first, second)
            )
        if not (isinstance(query, str) and isinstance(document, str)):
            sides = PairSides(query, document, document_name=f"text_2[{index}]")
            return PairParts(sides, template, _salt(first, second))
        rendered, salt = self._render(query, document, template), _salt(first, second)
        if rendered is None:
            return PairPrompt(query, document, salt)
        return rendered._replace(cache_salt=salt)

    def _query(self, value: ScoreInput, keep: int | None) -> PoolingPrompt:
        assert self._marked is not None
        return self._marked.query(text_of(value, "text_1"), keep)

    def _document(self, value: ScoreInput, keep: int | None) -> Prompt:
        assert self._marked is not None
        return self._marked.document(text_of(value, "text_2"), keep)

    def _conversation(self, value: ScoreInput) -> PoolingPrompt:
        """One side, for a model whose template gives queries and pages their forms."""
        content = _content_of(value, "text_1", self._model().modalities)
        message = {"role": "user", "content": content}
        return ChatPrompt([message], add_generation_prompt=False, cache_salt=_salt(value))

    def _max_sim(self, info: PoolingInfo) -> Callable[[PooledOutput, PooledOutput], float]:
        skipped = self._marked.skipped if self._marked is not None else frozenset[int]()

        def measure(query: PooledOutput, document: PooledOutput) -> float:
            from headrace_engine.pooling.vectors import max_sim

            tokens = enumerate(document.prompt_token_ids)
            unmatched = [index for index, token in tokens if token in skipped]
            return max_sim(query.outputs.data, document.outputs.data, unmatched)

        return measure


class _Distinct:
    """Prompts of texts, each once for each side that reads it in its own way."""

    def __init__(
        self,
        first: Callable[[ScoreInput], PoolingPrompt],
        second: Callable[[ScoreInput], PoolingPrompt],
    ) -> None:
        self.prompts: list[tuple[PoolingPrompt, str]] = []
        """Each with the first side that has it."""
        self._makers = (first, second)
        self._same = first is second
        self._index: dict[Any, int] = {}

    def pair(self, first: ScoreInput, second: ScoreInput) -> tuple[int, int]:
        """The places of the two prompts."""
        return self._place(0, first), self._place(1, second)

    def _place(self, side: int, value: ScoreInput) -> int:
        key = (0 if self._same else side, _key(value))
        index = self._index.get(key)
        if index is None:
            index = self._index[key] = len(self.prompts)
            self.prompts.append((self._makers[side](value), f"text_{side + 1}"))
        return index


def _key(value: ScoreInput) -> object:
    """Equal for equal texts; of what is no text, only for the same object."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping) and set(value) <= _TEXT_FIELDS:
        parts = (value.get(name) for name in sorted(_TEXT_FIELDS))
        key = tuple(tuple(part) if isinstance(part, list) else part for part in parts)
        with contextlib.suppress(TypeError):  # what is malformed is refused where it is read
            hash(key)
            return key
    return id(value)


def _check_plain(prompt: PoolingPrompt, info: PoolingInfo) -> None:
    """Refuse to leave out the tokens that say what a text is.

    Raises:
        UnsupportedFeature: the model needs them.
    """
    if isinstance(prompt, PairPrompt) or info.scoring == "late_interaction":
        raise UnsupportedFeature(
            "add_special_tokens = False: must be True or left out: special tokens tell the model which "
            "text is which",
            param="add_special_tokens",
        )


def text_of(value: ScoreInput, param: str) -> str:
    """The text of one side of a pair.

    Raises:
        RequestError: there is none, or there are media, which the models served here do not read.
    """
    given: object = value
    if isinstance(given, Mapping):
        if brings_media(value):  # type: ignore[arg-type]
            raise UnsupportedFeature(
                f"{param}: media beside a prompt cannot be scored; give {{'content': [parts]}} to a model "
                "that takes media",
                param=param,
            )
        given = given.get("content") if given.get("prompt") is None else given["prompt"]
        if isinstance(given, list | tuple):
            return "\n".join(_part_text(part, param) for part in given)
    if isinstance(given, str):
        return given
    raise RequestError(
        f"{param} = {value!r:.100}: must be text, for a model that reads both texts in its own form",
        param=param,
    )


def _parts_of(value: ScoreInput, modalities: Sequence[str]) -> Sequence[Any] | None:
    """The parts of one side of a pair; None: it brings no media that the model takes."""
    parts = value.get("content") if isinstance(value, Mapping) else None
    if not isinstance(parts, list | tuple):
        return None
    return list(parts) if any(modality_of(part) in modalities for part in parts) else None


def _content_of(value: ScoreInput, param: str, modalities: Sequence[str]) -> Content:
    """One side of a pair, as a message has it."""
    parts = _parts_of(value, modalities)
    return text_of(value, param) if parts is None else parts


def _conversation(
    chat: PairChat, introduction: str, query: Content, document: Content, salt: str | None
) -> ChatPrompt:
    """A pair as a checkpoint takes it that was trained with a chat template."""
    contents = {"system": introduction, "query": query, "document": document}
    arguments = dict(chat.arguments)
    return ChatPrompt(
        messages=[
            {"role": role, "content": text}
            for role, text in contents.items()
            if text or role != "system"
        ],
        add_generation_prompt=bool(arguments.pop("add_generation_prompt", False)),
        chat_template_kwargs=arguments,
        content_format=chat.content_format,
        cache_salt=salt,
    )


def _salt(*sides: ScoreInput) -> str | None:
    """The salt that keeps a pair's cached blocks apart: that of either side."""
    salts = [side.get("cache_salt") for side in sides if isinstance(side, Mapping)]
    found = [salt for salt in salts if isinstance(salt, str)]
    return "/".join(found) or None


def _part_text(part: object, param: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(part, Mapping) and kind in (None, "text") and isinstance(part.get("text"), str):
        return str(part["text"])
    raise UnsupportedFeature(
        f"{param}: a part of type {kind!r} cannot be scored; the model reads text", param=param
    )


def _prompt_of(value: ScoreInput, modalities: Sequence[str]) -> Prompt:
    """A text to be embedded, in whatever form it came; parts with media are a user's message."""
    parts = _parts_of(value, modalities)
    if parts is not None:
        message = {"role": "user", "content": parts}
        return ChatPrompt([message], add_generation_prompt=False, cache_salt=_salt(value))
    if isinstance(value, Mapping) and "content" in value:
        return text_of(value, "text_1")
    return value  # type: ignore[return-value]


def _single(output: PooledOutput, _: PooledOutput) -> float:
    from headrace_engine.pooling.vectors import first_number

    return first_number(output.outputs.data)


def _cosine(first: PooledOutput, second: PooledOutput) -> float:
    from headrace_engine.pooling.vectors import cosine

    return cosine(first.outputs.data, second.outputs.data)
