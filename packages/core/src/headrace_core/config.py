"""Settings that several packages read: the model's and the loading's; and how any setting is declared.

A group of settings is a frozen dataclass, validated when made. Every field carries its help text (also
the ``--help`` text of its command-line flag) and, where it has one, its cost. ``None`` or ``"auto"`` means
that headrace chooses. A component receives its own part, not the tree. The tree, and the parts that only
the engine reads, are in ``headrace_engine.config``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from headrace_core.errors import ConfigError
from headrace_core.multimodal import MEDIA_LIMIT, MEDIA_SIZES, MODALITIES
from headrace_core.pooling import PoolerConfig, as_pooler_fields

logger = logging.getLogger(__name__)

LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
DTYPES = ("float32", "float16", "bfloat16")
DTYPE_ALIASES: Mapping[str, str] = {
    "half": "float16", "float": "float32", "fp16": "float16", "fp32": "float32", "bf16": "bfloat16",
}  # fmt: skip


def option(
    default: Any,
    help: str,
    *,
    cost: str = "",
    flag: str = "",
    human_int: bool = False,
    json_list: bool = False,
    other_flag: str = "",
) -> Any:
    """A config field.

    Args:
        default: value, or a list/dict to be copied.
        help: one or two sentences; shown by ``--help``.
        cost: what it costs in memory, time or accuracy, if anything.
        flag: command-line name if it differs from the field's (without dashes).
        human_int: the flag takes sizes such as ``1k`` (1000) and ``1K`` (1024).
        json_list: the flag of a list of texts takes words, or one JSON list.
        other_flag: a further one, with its dashes: a shorter one, or an old name.
    """
    metadata: dict[str, Any] = {
        "help": help, "cost": cost, "flag": flag, "human_int": human_int, "json_list": json_list,
        "other_flag": other_flag,
    }  # fmt: skip
    if isinstance(default, (list, dict)):
        copied = default
        return field(default_factory=lambda: type(copied)(copied), metadata=metadata)
    return field(default=default, metadata=metadata)


def require(condition: bool, name: str, value: object, accepted: str) -> None:
    """Refuse a setting unless a condition holds.

    Args:
        name: the setting, as ``group.field``.
        accepted: what would be, in words that follow "must be".

    Raises:
        ConfigError: the condition does not hold.
    """
    if not condition:
        raise ConfigError(f"{name} = {value!r}: must be {accepted}", field=name)


def require_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Refuse a setting that is none of some choices. Raises: as :func:`require`."""
    require(value in choices, name, value, "one of " + ", ".join(map(repr, choices)))


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Choice of the model, and how its outputs are computed."""

    model: str | None = option(
        None, "Folder, GGUF file or hub name of the checkpoint. Default: the bundled demo model.",
    )  # fmt: skip
    tokenizer: str | None = option(
        None, "Folder or hub name of the tokenizer. Default: the model's."
    )
    tokenizer_mode: str = option("auto", "Tokenizer implementation: auto, hf, or a plug-in's name.")
    skip_tokenizer_init: bool = option(
        False, "Load no tokenizer: prompts must be token ids, outputs have no text."
    )
    hf_config_path: str | None = option(
        None, "Folder whose config.json replaces the checkpoint's config.json, or the metadata of a "
        "GGUF file.",
    )  # fmt: skip
    revision: str | None = option(None, "Branch, tag or commit on the hub.")
    model_impl: Literal["auto", "headrace", "transformers"] = option(
        "auto", "Implementation of the model: headrace (its own class; alias vllm), transformers (that "
        "library's class, with headrace's cache and kernels), or auto: headrace if it has a class.",
        cost="steps of some models of transformers are not captured, so more Python runs between kernels",
    )  # fmt: skip
    trust_remote_code: bool = option(
        False, "Run Python code from the checkpoint if no installed package supports the model.",
        cost="the code has all rights of this process",
    )  # fmt: skip
    hf_token: str | None = option(None, "Hub token; default: the stored login.")
    hf_overrides: Mapping[str, Any] | Any = option(  # noqa: RUF009 - it makes a field
        {}, "JSON merged into config.json before the architecture is resolved; from Python also a "
        "function that gets config.json's content and returns what replaces it (None: it changed "
        "its argument).",
    )  # fmt: skip
    dtype: str = option(
        "auto", "Activations and weights: auto (the checkpoint's), float32, float16, bfloat16.",
        cost="float32 doubles memory and bandwidth against bfloat16",
    )  # fmt: skip
    quantization: str | None = option(
        None, "Quantization method. Default: the checkpoint's, if any.", flag="quantization", other_flag="-q"
    )  # fmt: skip
    quantization_overrides: Mapping[str, str] = option(
        {}, "JSON object: a layer's name, the beginning of one up to a dot, or a pattern after re: -> the "
        "method for it ('none': floats), in place of quantization. Of methods that round while loading.",
    )  # fmt: skip
    quantization_activations: Literal["auto", "float", "int8", "fp8"] = option(
        "auto", "Rows that packed weights multiply: float (as they are), int8 or fp8 (rounded, a scale a "
        "token; fp8: of FP8 weights, on GPUs with FP8 units), or auto: by format and device.",
        cost="int8 and fp8 are faster with many rows, and round once more",
    )  # fmt: skip
    max_model_len: int | None = option(
        None, "Longest context (prompt and output). Default: the model's own limit; -1: the same, "
        "or the largest that fits into the KV cache.", human_int=True,
        cost="a longer context lets one request take more cache",
    )  # fmt: skip
    seed: int = option(0, "Seed of requests without one.")
    served_model_name: tuple[str, ...] = option(
        (),
        "Names under which the model is served; the first is shown. Default: the model as typed.",
    )
    max_logprobs: int = option(
        20, "Most log-probabilities a request may ask for; -1: no limit.",
        cost="-1 lets one request hold the whole vocabulary per token",
    )  # fmt: skip
    logprobs_mode: Literal[
        "raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"
    ] = option(
        "raw_logprobs",
        "Log-probabilities or logits, before (raw) or after (processed) sampling parameters.",
    )
    logits_processors: tuple[Any, ...] = option(
        (), "Logits processors, as package.module:Class; installed plug-ins are always loaded. Cannot "
        "change after the start.",
        cost="float32 logits of the whole batch, and the work of the processors, in every step",
    )  # fmt: skip
    enable_prompt_embeds: bool = option(
        False, "Accept prompts that are embeddings instead of tokens.",
        cost="steps with such a prompt run eagerly; clients must be trusted: prompt embeddings bypass "
        "text filters",
    )  # fmt: skip
    allow_control_tokens_in_messages: bool = option(
        False, "Turn the text of special tokens into these tokens, also in messages of users and tools, "
        "in documents and in tools. By default it stays text.",
        cost="the author of such a message can write turns of other roles",
    )  # fmt: skip
    limit_mm_per_prompt: Mapping[str, Any] = option(
        {}, "JSON: most items of a modality in one prompt, as {\"audio\": 2} or {\"video\": {\"count\": 1, "
        "\"num_frames\": 32, \"width\": 512, \"height\": 512}}, whose sizes memory is measured with; "
        "0: refuse them. Default: 999 each.",
    )  # fmt: skip
    enable_mm_embeds: bool = option(
        False, "Accept images and recordings as vectors, as the model's towers make them. A modality whose "
        "limit is 0 comes as such only.", cost="clients must be trusted: vectors bypass filters of media",
    )  # fmt: skip
    generation_config: str = option(
        "auto", "Defaults for sampling: auto (the checkpoint's generation_config.json), headrace "
        "(neutral ones), or a folder.",
    )  # fmt: skip
    override_generation_config: Mapping[str, Any] = option(
        {}, "JSON merged over the generation config."
    )
    runner: Literal["auto", "generate", "pooling"] = option(
        "auto", "Task of the model: generate (text), pooling (embeddings, scores, ...), or auto: from "
        "its files and architecture.",
    )  # fmt: skip
    convert: Literal["auto", "none", "embed", "classify", "reward"] = option(
        "auto", "Convert a generating model to a pooling model: embed, classify, or auto: from its "
        "architecture. reward is an old name of embed.",
    )  # fmt: skip
    pooler_config: Mapping[str, Any] = option(
        {}, "JSON: pooling of hidden states: pooling_type (LAST, MEAN, CLS, ALL, STEP), "
        "normalize, dimensions, enable_chunked_processing, max_embed_len, use_activation, "
        "logit_bias, step_tag_id, returned_token_ids; from Python also a PoolerConfig. Default: the "
        "checkpoint's. --override-pooler-config is the old name.", other_flag="--override-pooler-config",
    )  # fmt: skip
    io_processor_plugin: str | None = option(
        None, "Plug-in that turns the data of requests into prompts, and pooled results into answers. "
        "Default: io_processor_plugin of config.json, if set.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", DTYPE_ALIASES.get(self.dtype, self.dtype))
        processors: object = self.logits_processors
        if isinstance(processors, (str, type)):
            object.__setattr__(self, "logits_processors", (processors,))
        for processor in self.logits_processors:
            require(isinstance(processor, (str, type)), "model.logits_processors", processor,
                   "a class, or its name as package.module:Class")  # fmt: skip
        overrides = self.hf_overrides
        require(isinstance(overrides, Mapping) or callable(overrides), "model.hf_overrides", overrides,
               "a mapping, or a function of config.json's content")  # fmt: skip
        for layer, method in self.quantization_overrides.items():
            require(
                isinstance(method, str), f"model.quantization_overrides.{layer}", method, "a name"
            )
        names: object = self.served_model_name
        if isinstance(names, str):
            object.__setattr__(self, "served_model_name", (names,))
        names = self.served_model_name
        require(all(names) and len(set(names)) == len(names), "model.served_model_name", names,
               "different names, none of them empty")  # fmt: skip
        require(-(1 << 63) <= self.seed < 1 << 63, "model.seed", self.seed, "a number of 64 bits")
        require_choice("model.dtype", self.dtype, ("auto", *DTYPES))
        length = self.max_model_len
        require(length is None or length == -1 or length >= 1, "model.max_model_len", length,
               "at least 1, or -1")  # fmt: skip
        require(self.max_logprobs >= -1, "model.max_logprobs", self.max_logprobs, "at least -1")
        require_choice("model.logprobs_mode", self.logprobs_mode,
                      LOGPROBS_MODES)  # fmt: skip
        if str(self.model_impl) == "vllm":
            object.__setattr__(self, "model_impl", "headrace")
        require_choice("model.model_impl", self.model_impl, ("auto", "headrace", "transformers"))
        require_choice("model.runner", self.runner, ("auto", "generate", "pooling"))
        require_choice("model.convert", self.convert,
                      ("auto", "none", "embed", "classify", "reward"))  # fmt: skip
        if self.convert == "reward":
            logger.warning("model.convert: reward is an old name of embed")
            object.__setattr__(self, "convert", "embed")
        object.__setattr__(self, "pooler_config", as_pooler_fields(self.pooler_config))
        _ = self.pooler  # checked before anything is loaded
        for modality, limit in self.limit_mm_per_prompt.items():
            _check_media_limit(modality, limit)

    @property
    def pooler(self) -> PoolerConfig:
        """:attr:`pooler_config`, checked.

        Raises:
            ConfigError: a field is unknown or its value wrong.
        """
        return PoolerConfig.from_mapping(self.pooler_config)


def _check_media_limit(modality: str, limit: object) -> None:
    name = f"model.limit_mm_per_prompt.{modality}"
    require(modality in MODALITIES, name, limit,
           f"left out: modalities are {', '.join(MODALITIES)}")  # fmt: skip
    if isinstance(limit, Mapping):
        known = MEDIA_SIZES.get(modality, ())
        for key, size in limit.items():
            require(key in ("count", *known), f"{name}.{key}", size,
                   f"left out: options are {', '.join(('count', *known))}")  # fmt: skip
            require(key == "count" or size is None or (type(size) is int and size > 0),
                   f"{name}.{key}", size, "above 0")  # fmt: skip
        limit = limit.get("count", MEDIA_LIMIT)
    require(type(limit) is int and limit >= 0, name, limit, "a whole number of at least 0")


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """Loading of weights."""

    load_format: str = option(
        "auto", "auto (safetensors, else PyTorch's files, else GGUF, else Mistral's), safetensors, pt, "
        "gguf, mistral, dummy (random weights, seeded), sharded_state, tensorizer, runai_streamer, "
        "runai_streamer_sharded, fastsafetensors, or a plug-in's name.",
    )  # fmt: skip
    model_loader_extra_config: Mapping[str, Any] = option(
        {}, 'JSON: settings of the load format, such as {"concurrency": 16} for runai_streamer.'
    )
    download_dir: str | None = option(None, "Folder of hub downloads. Default: the hub's cache.")
    safetensors_load_strategy: Literal["lazy", "eager"] = option(
        "lazy", "lazy: memory map; eager: read whole files, by several threads (network file "
        "systems).",
    )  # fmt: skip
    use_tqdm_on_load: bool = option(True, "Show a progress bar.")
    offline: bool = option(
        False, "Download nothing: models and tokenizers must be in folders or in the hub's cache. "
        "HF_HUB_OFFLINE=1 does the same for the whole process.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        require_choice(
            "load.safetensors_load_strategy", self.safetensors_load_strategy, ("lazy", "eager")
        )


class PluginSettings(Protocol):
    """The settings that a plug-in of a model may read, resolved. The engine's configuration has more."""

    @property
    def model(self) -> ModelConfig: ...

    @property
    def load(self) -> LoadConfig: ...
