"""From what a user typed to the facts of a checkpoint. Reads no weight and imports no torch."""

from __future__ import annotations

import difflib
import json
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
from headrace_models.formats.header import TensorEntry
from headrace_models.formats.index import checkpoint_headers
from headrace_models.rope import scaled_context
from headrace_models.settings import Settings
from headrace_models.source import fetch

logger = logging.getLogger(__name__)

LENGTH_KEYS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length",
    "max_seq_length", "max_target_positions",
)  # fmt: skip
"""Names that configs give to the trained context."""

_STORED_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_DEFAULT_LENGTH = 2048


def resolve(config: ModelConfig, load: LoadConfig, platform: Platform) -> ModelInfo:
    """Find the checkpoint, its architecture and what follows from its files.

    Raises:
        ConfigError: the model cannot be found, or a setting does not fit it.
        UnsupportedModel: no installed family serves it, or its config.json is unusable.
        WeightsError: a weight file's header is damaged.
    """
    if not config.model:
        raise ConfigError(
            "model.model is not set: give a folder or a hub name", field="model.model"
        )
    path = checkpoint_folder(config, load)
    whole = merged(_read_object(path / "config.json", required=True), config.hf_overrides)
    text = text_part(whole)
    architecture = choose_architecture(whole.get("architectures"), config.model)
    entries = [entry for entries in checkpoint_headers(path).values() for entry in entries]
    stored_generation = _read_object(path / "generation_config.json", required=False)
    generation = generation_config(config, path)
    return ModelInfo(
        name=config.model,
        path=path,
        architecture=architecture,
        config=text,
        whole_config=whole,
        generation_config=generation,
        dtype=_dtype(config, text, entries, platform),
        max_model_len=_max_model_len(config, text),
        vocab_size=Settings(text).integer("vocab_size"),
        eos_token_ids=_eos_token_ids(generation, stored_generation, text),
        weight_bytes=sum(entry.num_bytes for entry in entries),
        source=_source(architecture),
    )


def checkpoint_folder(config: ModelConfig, load: LoadConfig) -> Path:
    """The local folder of what the user typed. Raises: ConfigError."""
    return fetch(
        config.model,
        revision=config.revision,
        token=config.hf_token,
        download_dir=load.download_dir,
    )


def choose_architecture(architectures: object, name: str) -> str:
    """The first entry that an installed family serves.

    Raises:
        UnsupportedModel: none; lists what was found and the nearest registered names.
    """
    known = plugins.installed("headrace.models")
    found = architectures if isinstance(architectures, list) else []
    for architecture in found:
        if isinstance(architecture, str) and architecture in known:
            return architecture
    near: list[str] = []
    for architecture in found:
        near += difflib.get_close_matches(str(architecture), known, n=5, cutoff=0.5)
    nearest = ", ".join(dict.fromkeys(near[:5])) or ", ".join(known) or "none is installed"
    raise UnsupportedModel(
        f"model {name!r}: config.json's architectures {architectures!r} are not supported. If the "
        "model has the shape of a supported one, say so with hf_overrides (--hf-overrides "
        f'\'{{"architectures": ["..."]}}\'). Nearest supported: {nearest}'
    )


def merged(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with ``overrides``; nested objects are merged, everything else replaced."""
    result = dict(config)
    for key, value in overrides.items():
        inner = result.get(key)
        both = isinstance(value, Mapping) and isinstance(inner, Mapping)
        result[key] = merged(inner, value) if both else value  # type: ignore[arg-type]
    return result


def text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's settings: ``text_config`` over what the whole says, if nested."""
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        return dict(config)
    outer = {key: value for key, value in config.items() if not isinstance(value, Mapping)}
    quantization = config.get("quantization_config")
    if isinstance(quantization, Mapping):
        outer["quantization_config"] = quantization
    return {**outer, **inner}


def _read_object(path: Path, *, required: bool) -> dict[str, Any]:
    if not required and not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UnsupportedModel(f"{path}: not found; is {path.parent} a checkpoint?") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedModel(f"{path}: unreadable: {type(error).__name__}: {error}") from error
    if not isinstance(value, dict):
        raise UnsupportedModel(f"{path}: must hold a JSON object, holds {type(value).__name__}")
    return value


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


def _max_model_len(config: ModelConfig, text: Mapping[str, Any]) -> int:
    settings = Settings(text)
    stated = [settings.integer(key) for key in LENGTH_KEYS if text.get(key) is not None]
    if not stated:
        logger.warning("config.json names no context length; assuming %d", _DEFAULT_LENGTH)
    derived = scaled_context(text, min(stated, default=_DEFAULT_LENGTH))
    wanted = config.max_model_len
    if wanted is None or wanted == -1:
        return derived
    if wanted > derived:
        if os.environ.get("HEADRACE_ALLOW_LONG_MAX_MODEL_LEN") != "1":
            raise ConfigError(
                f"model.max_model_len = {wanted}: must be at most {derived}, which follows from "
                "config.json. HEADRACE_ALLOW_LONG_MAX_MODEL_LEN=1 allows more; outputs beyond the "
                "trained context may be nonsense",
                field="model.max_model_len",
            )
        logger.warning("max_model_len %d is above the model's own limit %d", wanted, derived)
    return wanted


def generation_config(config: ModelConfig, path: Path) -> dict[str, Any]:
    """The checkpoint's, none, or a folder's; the user's overrides merged over it.

    Args:
        path: the checkpoint's folder.
    """
    if config.generation_config == "auto":
        base = _read_object(path / "generation_config.json", required=False)
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
        base = _read_object(folder / "generation_config.json", required=True)
    return merged(base, config.override_generation_config)


def _eos_token_ids(*sources: Mapping[str, Any]) -> tuple[int, ...]:
    """From the first source that names any; one number or a list."""
    for source in sources:
        value = source.get("eos_token_id")
        if value is None or value == []:
            continue
        ids = value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            raise UnsupportedModel(f"eos_token_id = {value!r}: must be token ids (integers from 0)")
        return tuple(dict.fromkeys(ids))
    return ()


def _source(architecture: str) -> str:
    distribution = plugins.installed("headrace.models")[architecture].distribution
    own = distribution.split(" ")[0] == "headrace-models"
    return "native" if own else f"plugin:{distribution}"
