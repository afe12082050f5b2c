"""Facts about a model that front ends report and check requests against."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headrace.assembly.plugged import io_processor_class
from headrace.assembly.speech.transcription import serving_plugin, unmet_tasks
from headrace_core.errors import ConfigError, ModelError
from headrace_core.model import ModelInfo
from headrace_core.served_model import ServedModel

if TYPE_CHECKING:
    from headrace.assembly.resolved import ResolvedConfig
    from headrace_core.text import Tokenizer

SAMPLING_DEFAULTS: Mapping[str, str] = {
    "repetition_penalty": "repetition_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}
"""Key of a generation config -> field of ``SamplingParams``."""
HIDDEN_SIZES = ("hidden_size", "n_embd", "d_model")
"""Where a config says how long an embedding is."""


def served_model(
    resolved: ResolvedConfig,
    tokenizer: Tokenizer | None,
    chat_template: str | None,
    modalities: tuple[str, ...] = (),
) -> ServedModel:
    """The facts that front ends show and check against.

    Args:
        modalities: of media that prompts may bring.
    """
    config, info = resolved.config, resolved.info
    template = chat_template or (tokenizer.chat_template if tokenizer is not None else None)
    return ServedModel(
        name=config.model.served_model_name[0],
        names=config.model.served_model_name,
        root=info.name,
        architecture=info.architecture,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        max_logprobs=config.model.max_logprobs,
        eos_token_ids=info.eos_token_ids,
        tasks=served_tasks(resolved),
        has_tokenizer=tokenizer is not None,
        has_chat_template=template is not None,
        default_sampling_params=default_sampling_params(info.generation_config),
        priority_scheduling=config.scheduler.policy == "priority",
        prompt_embeds=config.model.enable_prompt_embeds,
        hidden_size=hidden_size(info) if config.model.enable_prompt_embeds else 0,
        dtype=info.dtype,
        logprobs_mode=config.model.logprobs_mode,
        tokenizer_info=tokenizer_info(info),
        special_tokens=special_tokens(tokenizer) if tokenizer is not None else (),
        modalities=modalities,
        unmet=unmet_tasks(info),
        runner=info.runner,
        convert=info.convert,
        pooling=info.pooling,
        class_path=class_path(info),
        source=info.source,
        is_encoder_decoder=info.is_encoder_decoder,
        max_loras=config.lora.max_loras if config.lora.enable_lora else 0,
    )


def served_tasks(resolved: ResolvedConfig) -> tuple[str, ...]:
    """The checkpoint's tasks, and ``plugin`` if there is an IO processor.

    Raises:
        ConfigError, PluginError: as :func:`~headrace.assembly.plugged.io_processor_class`.
    """
    if resolved.config.multimodal.only_encodes:
        return ("generate",)  # of which requests end early; nothing is transcribed
    tasks = resolved.info.tasks
    if "plugin" in tasks or io_processor_class(resolved) is None:
        return tasks
    return (*tasks, "plugin")


def class_path(info: ModelInfo) -> str:
    """``module:Class`` of the implementation; "" where no package has one."""
    if info.source == "transformers":
        return f"headrace_models.transformers_backend.{_of_transformers(info)}"
    found = serving_plugin(info)
    return found.target if found is not None else ""


def _of_transformers(info: ModelInfo) -> str:
    """Module and class of the backend; a class of images may be one derived from it."""
    if info.pooling is not None:
        return "model:TransformersForPooling"
    return (
        "image_model:TransformersForImages" if info.processor else "model:TransformersForCausalLM"
    )


def special_tokens(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Texts of the tokens that ``skip_special_tokens`` drops."""
    return tuple(sorted({tokenizer.decode([i]) for i in tokenizer.special_token_ids} - {""}))


def hidden_size(info: ModelInfo, setting: str = "model.enable_prompt_embeds") -> int:
    """Numbers of one input embedding.

    Args:
        setting: needs it, for messages.

    Raises:
        ConfigError: the checkpoint's config does not say.
    """
    for name in HIDDEN_SIZES:
        size = info.config.get(name)
        if isinstance(size, int) and size > 0:
            return size
    raise ConfigError(
        f"{setting} = True: must be False for {info.architecture}, whose config.json has none of "
        f"{list(HIDDEN_SIZES)}",
        field=setting,
    )


def tokenizer_info(info: ModelInfo) -> dict[str, Any]:
    """The checkpoint's tokenizer_config.json; the class is there even if the file is not.

    Raises:
        ModelError: the file cannot be read as JSON.
    """
    found = {"tokenizer_class": "PreTrainedTokenizerFast"}
    path = info.path / "tokenizer_config.json"
    if not path.is_file():
        return found
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from error
    return {**found, **content} if isinstance(content, dict) else found


def default_sampling_params(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling defaults of a checkpoint's generation config, in our fields' names."""
    if generation_config.get("do_sample") is False:
        kept = {
            k: v
            for k, v in generation_config.items()
            if k in ("max_new_tokens", "repetition_penalty")
        }
        return {"temperature": 0.0} | _renamed(kept)
    return _renamed(generation_config)


def _renamed(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        field: generation_config[key]
        for key, field in SAMPLING_DEFAULTS.items()
        if generation_config.get(key) is not None
    }
