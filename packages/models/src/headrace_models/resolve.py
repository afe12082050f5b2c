"""Resolves what a user typed to the facts of a checkpoint. Reads no weight, and imports no torch for what
headrace has a class of its own for."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace_core import plugins
from headrace_core.config import DTYPE_ALIASES, DTYPES, LoadConfig, ModelConfig
from headrace_core.errors import ConfigError, UnsupportedModel
from headrace_core.model import ModelInfo
from headrace_core.platform import Platform
from headrace_core.pooling import PoolingTraits
from headrace_models.architectures import without_head
from headrace_models.catalogue import ARCHITECTURES
from headrace_models.catalogue.key_names import by_first_names
from headrace_models.catalogue.multimodal import (
    fixed_settings,
    joined_settings,
    nested_settings,
    of_inner_model,
    own_quantization,
    settings_of_towers,
    text_architecture,
    ties_by_tensors,
)
from headrace_models.checkpoint.lfs import refuse_pointers
from headrace_models.checkpoint.quantization_files import with_quantization
from headrace_models.checkpoint.regular_file import refuse_special_files
from headrace_models.checkpoint.source import fetch
from headrace_models.companions import companion_entries, with_companions
from headrace_models.config.json_object import read_object
from headrace_models.config.overrides import merged, overridden
from headrace_models.config.positions import first_position
from headrace_models.config.rope import announce_both, scaled_context
from headrace_models.config.settings import Settings, Spelling
from headrace_models.formats.contents import (
    stated_config,
    stated_generation_config,
    stored_tensors,
)
from headrace_models.formats.header import TensorEntry
from headrace_models.generating import (
    GeneratingTraits,
    auto_processor_of,
    processor_of,
    reads_towers,
    served_traits,
    with_used_towers,
)
from headrace_models.implementation import (
    TRANSFORMERS,
    choose_implementation,
    transformers_facts,
    transformers_traits,
)
from headrace_models.pooling.conversations import PAGE_FORMS, conversation_template
from headrace_models.pooling.converted import converted_traits
from headrace_models.pooling.info import pooling_info
from headrace_models.pooling.late_interaction import late_interaction, projected
from headrace_models.pooling.pair_forms import PAIR_FORMS
from headrace_models.pooling.sentence_transformers import SentenceModules, read_modules
from headrace_models.pooling.traits import SIZE_KEYS, configured, pooling_traits, said_by_files
from headrace_models.reranker import scored_by
from headrace_models.runner import Run, choose_run
from headrace_models.transformers_backend.checkpoint_code import refuse_foreign_code

logger = logging.getLogger(__name__)

LENGTH_KEYS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length",
    "max_seq_length", "max_trained_positions", "max_target_positions",
    "model_max_length",
)  # fmt: skip
"""Names that configs give to the trained context."""
LAST_LENGTH_KEY = "model_max_length"
"""Name that counts only in a config without the others (Baichuan 13B); else it is the tokenizer's."""
VOCABULARY_KEYS: Spelling = {"vocab_size": ("padded_vocab_size",)}

_STORED_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_DEFAULT_LENGTH = 2048


def resolve(config: ModelConfig, load: LoadConfig, platform: Platform) -> ModelInfo:
    """Find the checkpoint, its architecture and what follows from its files.

    Raises:
        ConfigError: the model cannot be found, or a setting does not fit it.
        UnsupportedModel: no installed family serves it, or its config.json is unusable.
        WeightsError: a weight file's header is damaged, or it is no file.
        ModelError: files are pointers of Git LFS.
        PluginError: a general plug-in failed.
    """
    plugins.run_general()
    path = checkpoint_folder(config, load)
    assert config.model is not None
    reads_weights = load.load_format.lower() != "dummy"
    refuse_special_files(path, weights=reads_weights)
    refuse_pointers(path, weights=reads_weights)
    stated = stated_config(path, config_folder=config.hf_config_path, load_format=load.load_format)
    entries = list(stored_tensors(path, load))
    stated = with_companions(with_quantization(stated, path), config, load, entries)
    whole = of_inner_model(overridden(stated, config.hf_overrides))
    entries += companion_entries(whole, load)
    if load.offline:
        refuse_foreign_code(whole)
    architecture, source = choose_implementation(config, whole, config.model, path)
    by_transformers = source == TRANSFORMERS
    text = (
        transformers_facts(config, whole, path)
        if by_transformers
        else _own_facts(architecture, whole)
    )
    text = ties_by_tensors(architecture, text, (entry.name for entry in entries))
    sentence = _sentence_modules(config, path, architecture, entries)
    text = scored_by(text, sentence.score_tokens)
    if by_transformers:
        own = transformers_traits(config, architecture, whole, path)
    else:
        architecture = _read_as(architecture, sentence)
        own = pooling_traits(architecture)
    run, traits = _run(config, architecture, text, sentence, own)
    stored_generation = stated_generation_config(path)
    generation = generation_config(config, path)
    dtype = _dtype(config, text, entries, platform)
    length = _max_model_len(config, architecture, text, traits, sentence)
    pooling = None
    if traits is not None:
        template = conversation_template(architecture, path)
        marked = sentence.multi_vector and template is None
        late = late_interaction(path, sentence, length) if marked else None
        pooling = pooling_info(
            text, config.pooler, sentence, traits, dtype=dtype, max_model_len=length, late=late,
            pair=PAIR_FORMS.get(architecture), template=template,
            size_key=SIZE_KEYS.get(architecture, ""),
        )  # fmt: skip
    limits, pools = config.limit_mm_per_prompt, pooling is not None
    processor = (
        auto_processor_of(architecture, path, limits, pools=pools)
        if by_transformers
        else processor_of(architecture, whole, limits, embeds=config.enable_mm_embeds)
    )
    generating = (
        GeneratingTraits() if by_transformers else served_traits(architecture, processor, limits)
    )
    return ModelInfo(
        name=config.model,
        path=path,
        architecture=architecture,
        config=text,
        whole_config=with_used_towers(architecture, whole, limits),
        generation_config=generation,
        dtype=dtype,
        max_model_len=length,
        vocab_size=Settings(text, VOCABULARY_KEYS).integer("vocab_size"),
        eos_token_ids=_eos_token_ids(generation, stored_generation, text),
        tasks=generating.tasks(generation, text) if pooling is None else pooling.tasks,
        weight_bytes=sum(entry.num_bytes for entry in entries),
        source=source,
        runner=run.runner,
        convert=run.convert,
        pooling=pooling,
        is_encoder_decoder=generating.is_encoder_decoder,
        processor=processor,
        has_towers=by_transformers or reads_towers(architecture, whole, limits),
        trust_remote_code=config.trust_remote_code,
    )


def checkpoint_folder(config: ModelConfig, load: LoadConfig) -> Path:
    """The local folder of what the user typed, or a GGUF file.

    Raises:
        ConfigError: nothing was typed, or it cannot be found.
    """
    if not config.model:
        raise ConfigError(
            "model.model is not set: give a folder, a GGUF file or a hub name", field="model.model"
        )
    return fetch(
        config.model,
        revision=config.revision,
        token=config.hf_token,
        download_dir=load.download_dir,
        load_format=load.load_format,
        code=config.trust_remote_code,
        offline=load.offline,
    )


def _sentence_modules(
    config: ModelConfig, path: Path, architecture: str, entries: list[TensorEntry]
) -> SentenceModules:
    """Sentence Transformers' settings of a checkpoint; none if it generates."""
    if config.runner == "generate":
        return SentenceModules()
    found = read_modules(path, config.pooler.pooling_type)
    if architecture == "HF_ColBERT":
        return projected(found, entries)
    if architecture in PAGE_FORMS:
        return projected(found, entries, "embedding_proj_layer", bias=True)
    return found


_SPARSE: Mapping[str, str] = {"RobertaForMaskedLM": "RobertaSpladeSparseEmbeddingModel"}
"""Classes of masked language models with ``SpladePooling`` that embed as their encoder without it."""


def _read_as(architecture: str, sentence: SentenceModules) -> str:
    """The class that the files make of an encoder with the head of its pre-training: that head is
    pooled, or passed over."""
    if sentence.sparse:
        return _SPARSE.get(architecture, architecture)
    registered = architecture in plugins.installed("headrace.models")
    passed_over = sentence.pools or sentence.multi_vector or not registered
    encoder = without_head(architecture)
    if not passed_over or encoder == architecture:
        return architecture
    logger.info("%s: read as %s, without the head of its pre-training", architecture, encoder)
    return encoder


def _run(
    config: ModelConfig,
    architecture: str,
    text: Mapping[str, Any],
    sentence: SentenceModules,
    own: PoolingTraits | None,
) -> tuple[Run, PoolingTraits | None]:
    """Purpose that the checkpoint is run for, and its way of pooling if it is for that.

    Args:
        own: of a class that pools by itself.
    """
    run = choose_run(
        config, architecture, own,
        sentence_transformer=sentence.says_pooling, scores=bool(sentence.score_tokens),
    )  # fmt: skip
    if run.runner != "pooling":
        return run, None
    traits = own or converted_traits(architecture, text, run.convert, config.pooler)
    return run, said_by_files(architecture, configured(traits, text), sentence)


def _own_facts(architecture: str, whole: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's settings as its class reads them."""
    of_towers = settings_of_towers(architecture)
    outer = {key: value for key, value in whole.items() if key not in of_towers}
    text = by_first_names(text_architecture(architecture, whole), text_part(outer))
    text = joined_settings(architecture, whole, text)
    text |= fixed_settings(architecture)
    if "quantization_config" in text:
        text["quantization_config"] = own_quantization(architecture, text["quantization_config"])
    announce_both(text)
    return text


def text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's settings: its own part over what the whole says, if nested."""
    inner = nested_settings(config)
    if inner is None:
        return dict(config)
    outer = {key: value for key, value in config.items() if not isinstance(value, Mapping)}
    for key in ("quantization_config", "id2label"):
        if isinstance(config.get(key), Mapping):
            outer[key] = config[key]
    return {**outer, **inner}


def _dtype(
    config: ModelConfig, text: Mapping[str, Any], entries: list[TensorEntry], platform: Platform
) -> str:
    if config.dtype != "auto":
        return config.dtype
    stated = text.get("dtype") or text.get("torch_dtype")
    if stated is None:  # old checkpoints do not say: the bulk of the weights decides
        weights: Counter[str] = Counter()
        for entry in entries:
            if entry.dtype in _STORED_DTYPES:
                weights[_STORED_DTYPES[entry.dtype]] += entry.num_bytes
        stated = weights.most_common(1)[0][0] if weights else "float32"
    stated = str(stated).removeprefix("torch.")
    stated = DTYPE_ALIASES.get(stated, stated)
    if stated not in DTYPES:
        raise UnsupportedModel(
            f"config.json: dtype = {stated!r}: must be one of {', '.join(DTYPES)}; or set model.dtype"
        )
    chosen = platform.dtype_for(stated)
    logger.info("dtype: auto -> %s (checkpoint: %s)", chosen, stated)
    return chosen


def _max_model_len(
    config: ModelConfig,
    architecture: str,
    text: Mapping[str, Any],
    traits: PoolingTraits | None,
    sentence: SentenceModules,
) -> int:
    """The user's choice within the model's positions; by itself no more than Sentence Transformers
    says that the model is for."""
    derived = _positions(text, traits)
    wanted = config.max_model_len
    if wanted is None or wanted == -1:
        return min(derived, sentence.max_seq_length or derived)
    if wanted > derived and not _has_no_positions(architecture, text):
        if os.environ.get("HEADRACE_ALLOW_LONG_MAX_MODEL_LEN") != "1":
            raise ConfigError(
                f"model.max_model_len = {wanted}: must be at most {derived}, which follows from "
                "config.json. HEADRACE_ALLOW_LONG_MAX_MODEL_LEN=1 allows more; outputs beyond the "
                "trained context may be nonsense",
                field="model.max_model_len",
            )
        logger.warning("max_model_len %d is above the model's own limit %d", wanted, derived)
    return wanted


def _has_no_positions(architecture: str, text: Mapping[str, Any]) -> bool:
    """True if nothing ends the context: the model is all recurrences, and its config states no length."""
    row = ARCHITECTURES.get(architecture)
    stated = any(text.get(key) is not None for key in LENGTH_KEYS)
    return row is not None and row.caches == ("recurrent",) and not stated


def _positions(text: Mapping[str, Any], traits: PoolingTraits | None) -> int:
    """Longest context that the model has positions for."""
    settings = Settings(text)
    keys = [key for key in LENGTH_KEYS if text.get(key) is not None] or [LAST_LENGTH_KEY]
    stated = [settings.integer(key) for key in keys if text.get(key) is not None]
    if not stated:
        logger.warning("config.json names no context length; assuming %d", _DEFAULT_LENGTH)
    rows = _served_length(settings) or min(stated, default=_DEFAULT_LENGTH)
    if traits is None or not traits.positions_follow_padding:
        return scaled_context(text, rows)
    first = first_position(text)
    if rows <= first:
        raise UnsupportedModel(
            f"config.json: max_position_embeddings = {rows}: must be above pad_token_id + 1 = {first}"
        )
    return rows - first


def _served_length(settings: Settings) -> int | None:
    """Command R's, whose ``max_position_embeddings`` is that of the first stage of its training."""
    if not str(settings.config.get("model_type", "")).startswith("cohere"):
        return None
    return settings.optional_integer("model_max_length")


def generation_config(config: ModelConfig, path: Path) -> dict[str, Any]:
    """The checkpoint's, none, or a folder's; the user's overrides merged over it.

    Args:
        path: the checkpoint's folder, or its GGUF file.
    """
    if config.generation_config == "auto":
        base = stated_generation_config(path)
    elif config.generation_config in ("headrace", "vllm"):
        base = {}
    else:
        folder = Path(config.generation_config).expanduser()
        if not (folder / "generation_config.json").is_file():
            raise ConfigError(
                f"model.generation_config = {config.generation_config!r}: must be 'auto', "
                "'headrace', or a folder with a generation_config.json",
                field="model.generation_config",
            )
        base = read_object(folder / "generation_config.json", required=True)
    return merged(base, config.override_generation_config)


def _eos_token_ids(*sources: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids of the first source that names any; one number or a list."""
    for source in sources:
        value = source.get("eos_token_id")
        if value is None or value == []:
            continue
        ids = value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            raise UnsupportedModel(f"eos_token_id = {value!r}: must be token ids (integers from 0)")
        return tuple(dict.fromkeys(ids))
    return ()
