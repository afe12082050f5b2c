"""Pooling settings of a Sentence Transformers repository: ``modules.json`` and the files that it names. No
torch.

Format: the files that ``SentenceTransformer.save`` writes (sbert.net, versions 2 to 6).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from headrace_core.errors import ConfigError, UnsupportedModel
from headrace_core.pooling import DenseModule, PairChat
from headrace_models.config.json_object import read_json, read_object
from headrace_models.config.settings import Settings
from headrace_models.pooling.labels import torch_activation

POOLING_MODES: Mapping[str, str] = {"cls": "CLS", "mean": "MEAN", "lasttoken": "LAST"}
"""Their name -> ours."""
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Keys of files before version 6."""
_SETTINGS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)


_MARKERS = (
    "query_prefix", "document_prefix", "query_length", "document_length", "query_expansion",
    "do_query_expansion", "attend_to_expansion_tokens", "skiplist_words",
)  # fmt: skip
_CONTENT_FORMATS: Mapping[str, str] = {"auto": "auto", "flat": "string", "structured": "openai"}
"""Their name of a content format of templates -> ours."""
_SIZE_ARGUMENTS = frozenset(
    {"padding", "truncation", "max_length", "return_tensors", "restore_suffix"}
)
"""Arguments of chat templates that say how prompts are cut and padded; the template does not get them."""
_PYLATE_DENSE = "pylate.models.Dense.Dense"


@dataclass(frozen=True, slots=True)
class SentenceModules:
    """Settings in the files; without any, nothing."""

    pools: bool = False
    """There is a pooling module."""
    include_prompt: bool = True
    """See :attr:`~headrace_core.pooling.PoolingInfo.include_prompt`."""
    pooling_type: str | None = None
    """None: not said, or a mode that the user has replaced."""
    dense: tuple[DenseModule, ...] = ()
    normalize: bool = False
    max_seq_length: int | None = None
    lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    activation: str | None = None
    """A cross-encoder's, as the files name it."""
    score_tokens: tuple[int, ...] = ()
    """A language model's score is the logit of this token; of two, false and true, their difference."""
    pair_chat: PairChat | None = None
    """None: pairs that are scored are two texts."""
    multi_vector: bool = False
    """Dense modules apply to each token, and nothing is pooled (ColBERT)."""
    sparse: bool = False
    """A head that guesses words is pooled (SPLADE)."""
    sparse_sum: bool = False
    sparse_log_twice: bool = False
    markers: Mapping[str, Any] = field(default_factory=dict)
    """Settings of late interaction in the files, which have no one spelling."""

    @property
    def says_pooling(self) -> bool:
        """True if the files make a pooling model of the checkpoint."""
        return self.pools or self.multi_vector or self.sparse or bool(self.score_tokens)


def read_modules(folder: Path, pooling_type: str | None = None) -> SentenceModules:
    """Read a checkpoint's files.

    Args:
        pooling_type: what the user has set; then a mode that is not served does not matter.

    Raises:
        ConfigError: a mode or module that is not served; names it, and ``--pooler-config`` where that
            helps.
        UnsupportedModel: a file is unreadable, or a value wrong.
    """
    own = read_object(folder / "config_sentence_transformers.json", required=False)
    prompts = _prompts(own)
    found = SentenceModules(
        prompts=prompts,
        default_prompt_name=_default_prompt(own, prompts),
        activation=own.get("activation_fn"),
        markers=_markers(folder, own),
        **_settings(folder),
    )
    if own.get("model_type") == "CrossEncoder":
        return _cross_encoder(folder, found)
    for module in _modules(folder):
        found = _follow(folder, module, found, pooling_type)
    return found


def _cross_encoder(folder: Path, found: SentenceModules) -> SentenceModules:
    """A model whose class scores, or one that generates and a ``LogitScore``."""
    modules = _modules(folder)
    for kind, place in modules:
        name = kind.rpartition(".")[2] if kind.startswith("sentence_transformers.") else ""
        if name == "LogitScore" and not found.score_tokens:
            tokens = _score_tokens(folder / place / "config.json")
            found = replace(found, score_tokens=tokens, pair_chat=_pair_chat(folder))
        elif name == "Transformer" and not place:
            continue
        else:
            raise ConfigError(
                f"modules.json: type = {kind!r}, path = {place!r}: a cross-encoder must have a "
                "Transformer at its top, and no more than a LogitScore besides",
                field="model.model",
            )
    return found


def _score_tokens(path: Path) -> tuple[int, ...]:
    """The one token, or the false one and the true one, of a ``LogitScore``."""
    settings = Settings(read_object(path, required=True))
    names: tuple[str, ...] = ("true_token_id",)
    if settings.config.get("false_token_id") is not None:
        names = ("false_token_id", "true_token_id")
    return tuple(settings.integer(name, minimum=0) for name in names)


def _pair_chat(folder: Path) -> PairChat | None:
    """Chat template by which the model is told of pairs; None: it is not."""
    path = folder / _SETTINGS[0]
    config = read_object(path, required=False)
    message = _object(path, config, "modality_config").get("message")
    if message is None:
        return None
    stated = message.get("format", "auto") if isinstance(message, Mapping) else message
    if not isinstance(stated, str) or stated not in _CONTENT_FORMATS:
        accepted = ", ".join(_CONTENT_FORMATS)
        raise UnsupportedModel(
            f"{path}: modality_config.message.format = {stated!r:.100}: must be one of {accepted}"
        )
    given = _object(path, _object(path, config, "processing_kwargs"), "chat_template")
    arguments = {str(name): value for name, value in given.items() if name not in _SIZE_ARGUMENTS}
    return PairChat(_CONTENT_FORMATS[stated], arguments)


def _object(path: Path, config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object in a file; empty if it is absent or null."""
    value = config.get(name) or {}
    if not isinstance(value, Mapping):
        raise UnsupportedModel(f"{path}: {name} = {value!r:.100}: must be an object")
    return value


def _prompts(own: Mapping[str, Any]) -> dict[str, str]:
    named = own.get("prompts")
    texts = named.items() if isinstance(named, Mapping) else ()
    return {str(name): text for name, text in texts if isinstance(text, str)}


def _default_prompt(own: Mapping[str, Any], prompts: Mapping[str, str]) -> str | None:
    name = own.get("default_prompt_name")
    if name is not None and (not isinstance(name, str) or name not in prompts):
        raise UnsupportedModel(
            f"config_sentence_transformers.json: default_prompt_name = {name!r}: must be null or one "
            f"of prompts, {sorted(prompts)}"
        )
    return name


def _settings(folder: Path) -> dict[str, Any]:
    path = next((folder / name for name in _SETTINGS if (folder / name).is_file()), None)
    if path is None:
        return {}
    settings = Settings(read_object(path, required=True))
    return {
        "max_seq_length": settings.optional_integer("max_seq_length"),
        "lower_case": settings.flag("do_lower_case", False),
    }


def _markers(folder: Path, own: Mapping[str, Any]) -> dict[str, Any]:
    """PyLate keeps them among the repository's settings, Sentence Transformers among the first
    module's."""
    return {
        name: source[name]
        for source in (read_object(folder / _SETTINGS[0], required=False), own)
        for name in _MARKERS
        if name in source
    }


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Kind and folder of each module, in order."""
    path = folder / "modules.json"
    listed = read_json(path) if path.is_file() else []
    modules = []
    for entry in listed if isinstance(listed, list) else [listed]:
        kind, place = (entry.get("type"), entry.get("path")) if isinstance(entry, dict) else (0, 0)
        if not isinstance(kind, str) or not isinstance(place, str):
            raise UnsupportedModel(f"{path}: entry {entry!r}: must have a type and a path")
        parts = PurePosixPath(place).parts
        if PurePosixPath(place).is_absolute() or ".." in parts:
            raise UnsupportedModel(f"{path}: path = {place!r}: must be within the checkpoint")
        modules.append((kind, place))
    return modules


def _follow(
    folder: Path, module: tuple[str, str], found: SentenceModules, pooling_type: str | None
) -> SentenceModules:
    kind, place = module
    name = kind.rpartition(".")[2]
    if not kind.startswith("sentence_transformers.") and kind != _PYLATE_DENSE:
        raise ConfigError(
            f"modules.json: type = {kind!r}: is code of the repository's own, which is never run",
            field="model.model",
        )
    if name in ("Transformer", "MLMTransformer"):
        if place:
            raise ConfigError(
                f"modules.json: the model is in the folder {place!r}: give that folder as the model",
                field="model.model",
            )
        return found
    if name == "Dropout":
        return found
    if name == "Pooling":
        return _pooling(folder / place, found, pooling_type)
    if name == "SpladePooling" and not found.says_pooling:
        return _splade(folder / place, found)
    if name == "Dense" and not found.normalize and not found.sparse:
        what = "sentence_embedding" if found.pools else "token_embeddings"
        dense = _dense(folder / place, place, None if kind == _PYLATE_DENSE else what)
        return replace(found, dense=(*found.dense, dense), multi_vector=not found.pools)
    if name == "MultiVectorMask" and not found.pools:
        return _mask(folder / place, found)
    if name == "Normalize" and (found.pools or found.multi_vector):
        return replace(found, normalize=True)
    raise ConfigError(
        f"modules.json: type = {kind!r}: must be one of Transformer, Pooling, Dense, Normalize, in "
        "this order; or Transformer, Dense, MultiVectorMask, Normalize; or Transformer, SpladePooling",
        field="model.model",
    )


def _splade(path: Path, found: SentenceModules) -> SentenceModules:
    """Sentence Transformers' ``SpladePooling``."""
    config = read_object(path / "config.json", required=True)
    known = {"pooling_strategy": ("max", "sum"), "activation_function": ("relu", "log1p_relu")}
    for name, accepted in known.items():
        if config.get(name, accepted[0]) not in accepted:
            raise UnsupportedModel(
                f"{path / 'config.json'}: {name} = {config[name]!r}: must be one of "
                f"{', '.join(accepted)}"
            )
    return replace(
        found,
        sparse=True,
        sparse_sum=config.get("pooling_strategy") == "sum",
        sparse_log_twice=config.get("activation_function") == "log1p_relu",
    )


def _mask(path: Path, found: SentenceModules) -> SentenceModules:
    """Choice of the tokens that have vectors: Sentence Transformers' ``MultiVectorMask``."""
    config = read_object(path / "config.json", required=False)
    if config.get("keep_only_token_ids") or config.get("skiplist_tasks") not in (
        None,
        ["document"],
    ):
        raise UnsupportedModel(
            f"{path / 'config.json'}: only words of documents can be skipped (skiplist_words)"
        )
    words = {"skiplist_words": config.get("skiplist_words") or []}
    return replace(found, multi_vector=True, markers={**found.markers, **words})


def _pooling(path: Path, found: SentenceModules, wanted: str | None) -> SentenceModules:
    config = read_object(path / "config.json", required=True)
    found = replace(found, include_prompt=Settings(config).flag("include_prompt", True))
    if wanted is not None:
        return replace(found, pools=True)
    modes = _modes(config)
    mode = modes[0] if len(modes) == 1 else "+".join(modes)
    if mode not in POOLING_MODES:
        raise ConfigError(
            f"{path / 'config.json'}: pooling mode {mode!r} is not supported, only "
            f'{", ".join(POOLING_MODES)}; --pooler-config \'{{"pooling_type": "MEAN"}}\' would take '
            "another, for which the model was not trained",
            field="pooler_config.pooling_type",
        )
    return replace(found, pools=True, pooling_type=POOLING_MODES[mode])


def _modes(config: Mapping[str, Any]) -> list[str]:
    stated = config.get("pooling_mode")
    if stated is not None:
        return [str(mode) for mode in (stated if isinstance(stated, list) else [stated])]
    # Theirs is the mean where no flag is set.
    return [mode for flag, mode in _FLAGS.items() if config.get(flag)] or ["mean"]


def _dense(path: Path, place: str, what: str | None) -> DenseModule:
    """``what``: it applies to; None: its config does not say."""
    config = read_object(path / "config.json", required=True)
    settings = Settings(config)
    where = path / "config.json"
    if settings.flag("use_residual", False):
        raise UnsupportedModel(f"{where}: use_residual = True: must be false")
    for name in ("module_input_name", "module_output_name"):
        stated = config.get(name) or ("sentence_embedding" if name.endswith("input_name") else what)
        if what is not None and stated != what:
            raise UnsupportedModel(f"{where}: {name} = {stated!r}: must be {what}")
    return DenseModule(
        path=place,
        in_features=settings.integer("in_features"),
        out_features=settings.integer("out_features"),
        bias=settings.flag("bias", True),
        activation=torch_activation(
            f"{where}: activation_function",
            config.get("activation_function") or "torch.nn.modules.activation.Tanh",
        ),
    )
