"""Resolves :class:`PoolingInfo` from a checkpoint's files and the user's settings. No torch.

Precedence: the user, the Sentence Transformers files, the class, the conversion.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace_core.errors import ConfigError, UnsupportedModel
from headrace_core.pooling import (
    CLASSIFY_TASKS,
    EMBED_TASKS,
    DenseModule,
    LateInteraction,
    PoolerConfig,
    PoolingInfo,
    PoolingTraits,
)
from headrace_models.config.settings import Settings
from headrace_models.pooling.labels import classification_activation, label_names, num_labels
from headrace_models.pooling.pair_forms import PairForm
from headrace_models.pooling.sentence_transformers import SentenceModules

_SIZE_KEYS = ("hidden_size", "dim", "n_embd", "d_model")


def pooling_info(
    config: Mapping[str, Any],
    user: PoolerConfig,
    sentence: SentenceModules,
    traits: PoolingTraits,
    *,
    dtype: str,
    max_model_len: int,
    late: LateInteraction | None = None,
    pair: PairForm | None = None,
    template: str | None = None,
    size_key: str = "",
) -> PoolingInfo:
    """Everything that is to be known of how a checkpoint pools.

    Args:
        config: the text part of ``config.json``.
        traits: of the class, or of its conversion.
        dtype, max_model_len: resolved.
        late: of a multi-vector model.
        pair: of a reranker that has a form of its own.
        template: of a class's conversations (:mod:`.conversations`).
        size_key: key of the config that says how long an embedding is; "": as long as a hidden state.

    Raises:
        ConfigError: the user asks for what the class cannot do; names the field.
        UnsupportedModel: ``config.json`` contradicts itself.
    """
    kind = _pooling_type(user, sentence, traits)
    embeds = traits.purpose == "embed"
    labels = 0 if embeds else traits.num_labels or num_labels(config)
    tasks = _tasks(traits, kind, labels)
    size = _embedding_size(config, sentence.dense, traits, size_key) if embeds else 0
    matryoshka = _matryoshka(config) if embeds else None
    _check_honoured(user, tasks, labels)
    _check_dimensions(user, matryoshka, size)
    types = Settings(config).integer("type_vocab_size", 1, minimum=0) if traits.token_types else 0
    return PoolingInfo(
        tasks=tasks,
        pooling_type=kind,
        causal=traits.causal,
        embedding_size=size,
        normalize=_first(
            user.normalize, sentence.normalize if sentence.pools else None, traits.normalize
        ),
        use_activation=_first(user.use_activation, True),
        dimensions=user.dimensions,
        matryoshka=matryoshka,
        num_labels=labels,
        labels=() if embeds or traits.num_labels else label_names(config),
        activation=traits.activation
        or ("identity" if embeds else classification_activation(config, sentence.activation)),
        head_dtype=_head_dtype(config, dtype),
        logit_bias=pair.logit_bias if pair and user.logit_bias is None else user.logit_bias,
        step_tag_id=user.step_tag_id if kind != "STEP" else _step_tag(user, traits),
        returned_token_ids=user.returned_token_ids,
        dense=sentence.dense if embeds else (),
        enable_chunked_processing=bool(user.enable_chunked_processing),
        max_embed_len=user.max_embed_len,
        native_len=max_model_len,
        scoring=_scoring(tasks, multi_vector=sentence.multi_vector),
        score_template=pair.template if pair and "score" in tasks else template,
        pair_end_id=pair.end_id if pair else None,
        prompts=sentence.prompts,
        default_prompt_name=sentence.default_prompt_name,
        include_prompt=sentence.include_prompt,
        pair_chat=sentence.pair_chat if "score" in tasks else None,
        lower_case=sentence.lower_case,
        sparse=traits.sparse,
        sparse_sum=sentence.sparse_sum,
        sparse_log_twice=sentence.sparse_log_twice,
        late_interaction=late,
        token_types=types > 1,
        max_token_types=max(types, 1),
    )


def _first(*values: bool | None) -> bool:
    return next(value for value in values if value is not None)


def _pooling_type(user: PoolerConfig, sentence: SentenceModules, traits: PoolingTraits) -> str:
    wanted = user.pooling_type
    if wanted is not None and wanted not in traits.pooling_types:
        kinds = ", ".join(traits.pooling_types)
        raise _wrong("pooling_type", wanted, f"one of {kinds} for this model")
    if wanted is None and sentence.pooling_type in traits.pooling_types:
        wanted = sentence.pooling_type
    kind = wanted or traits.pooling_type
    for name in ("step_tag_id", "returned_token_ids"):
        if kind != "STEP" and getattr(user, name) is not None:
            raise _wrong(name, getattr(user, name), "left out unless pooling_type is STEP")
    return kind


def _check_honoured(user: PoolerConfig, tasks: tuple[str, ...], labels: int) -> None:
    """Refuse settings that would have no effect."""
    shown = ", ".join(tasks)
    meaningless = {
        "normalize": not set(tasks) & set(EMBED_TASKS),
        "use_activation": not set(tasks) & set(CLASSIFY_TASKS),
        "logit_bias": not labels,
        "enable_chunked_processing": "embed" not in tasks,
        "max_embed_len": "embed" not in tasks,
    }
    for name, refused in meaningless.items():
        value = getattr(user, name)
        if refused and value is not None and (name, value) != ("enable_chunked_processing", False):
            raise _wrong(name, value, f"left out for this model, whose tasks are {shown}")
    if user.max_embed_len is not None and not user.enable_chunked_processing:
        raise _wrong(
            "max_embed_len", user.max_embed_len, "left out unless enable_chunked_processing is true"
        )
    for column in user.returned_token_ids or ():
        if column >= labels:
            raise _wrong("returned_token_ids", column, f"in 0..{labels - 1}")


def _wrong(name: str, value: object, accepted: str) -> ConfigError:
    return ConfigError(
        f"pooler_config.{name} = {value!r}: must be {accepted}", field=f"pooler_config.{name}"
    )


def _scoring(tasks: tuple[str, ...], *, multi_vector: bool) -> str:
    if "score" in tasks:
        return "cross"
    if multi_vector:
        return "late_interaction"
    return "cosine" if "embed" in tasks else ""


def _step_tag(user: PoolerConfig, traits: PoolingTraits) -> int | None:
    return traits.step_tag_id if user.step_tag_id is None else user.step_tag_id


def _tasks(traits: PoolingTraits, kind: str, labels: int) -> tuple[str, ...]:
    """Tasks of the model: all give a row for each token, and one for the prompt if the kind pools so."""
    if traits.tasks:
        return traits.tasks
    whole = kind not in ("ALL", "STEP")
    if traits.purpose == "embed":
        return ("embed", "token_embed") if whole else ("token_embed",)
    if traits.purpose == "token_classify" or not whole:
        return ("token_classify",)
    return ("classify", *(("score",) if labels == 1 else ()), "token_classify")


def _embedding_size(
    config: Mapping[str, Any], dense: tuple[DenseModule, ...], traits: PoolingTraits, key: str
) -> int:
    if traits.sparse:
        return Settings(config).integer("vocab_size")
    keys = (key, *_SIZE_KEYS) if key else _SIZE_KEYS
    name = next((key for key in keys if config.get(key) is not None), _SIZE_KEYS[0])
    size = Settings(config).integer(name)
    for module in dense:
        if module.in_features != size:
            raise UnsupportedModel(
                f"{module.path}/config.json: in_features = {module.in_features}: must be {size}, the "
                "size of its input"
            )
        size = module.out_features
    return size


def _matryoshka(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    sizes = config.get("matryoshka_dimensions")
    if sizes is None:
        return () if Settings(config).flag("is_matryoshka", False) else None
    whole = isinstance(sizes, list | tuple) and sizes
    if not whole or any(type(size) is not int or size < 1 for size in sizes):
        raise UnsupportedModel(
            f"config.json: matryoshka_dimensions = {sizes!r}: must be a list of sizes of at least 1"
        )
    return tuple(sizes)


def _check_dimensions(user: PoolerConfig, sizes: tuple[int, ...] | None, size: int) -> None:
    wanted = user.dimensions
    if wanted is None:
        return
    if sizes is None:
        accepted = "left out: the model does not support matryoshka representation"
    elif sizes and wanted not in sizes:
        accepted = f"one of {list(sizes)}"
    elif wanted > size:
        accepted = f"at most {size}, the size of an embedding"
    else:
        return
    raise _wrong("dimensions", wanted, accepted)


def _head_dtype(config: Mapping[str, Any], dtype: str) -> str:
    stated = config.get("head_dtype", "float32")
    if stated not in ("float32", "model"):
        raise UnsupportedModel(f"head_dtype = {stated!r}: must be float32 or model")
    return dtype if stated == "model" else "float32"
