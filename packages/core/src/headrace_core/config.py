"""Settings: one frozen dataclass per owner, validated when made.

Every field carries its help text (also the ``--help`` text of its command-line flag) and, where it
has one, its cost. ``None`` or ``"auto"`` means that headrace chooses
(:mod:`headrace_core.resolution`). A component receives its own part, not the tree.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace_core import plugins
from headrace_core.attention import BLOCK_SIZES
from headrace_core.cores import parse_cores
from headrace_core.errors import ConfigError
from headrace_core.grammar import BACKEND_ALIASES, BACKENDS
from headrace_core.kv import CACHE_DTYPES
from headrace_core.modality import MEDIA_LIMIT, MODALITIES
from headrace_core.pooling import PoolerConfig, as_pooler_fields

logger = logging.getLogger(__name__)

LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
DETAILED_TRACES = ("model", "worker", "all")
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


def _check(condition: bool, name: str, value: object, accepted: str) -> None:
    if not condition:
        raise ConfigError(f"{name} = {value!r}: must be {accepted}", field=name)


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    _check(value in choices, name, value, "one of " + ", ".join(map(repr, choices)))


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model, and how its outputs are computed."""

    model: str | None = option(
        None, "Folder, GGUF file or hub name of the checkpoint. Default: the demo model that ships "
        "along.",
    )  # fmt: skip
    tokenizer: str | None = option(
        None, "Folder or hub name of the tokenizer. Default: the model's."
    )
    tokenizer_mode: str = option("auto", "Tokenizer implementation: auto, hf, or a plug-in's name.")
    skip_tokenizer_init: bool = option(
        False, "Load no tokenizer: prompts must be token ids, outputs have no text."
    )
    hf_config_path: str | None = option(
        None, "Folder whose config.json is read in place of the checkpoint's, or of what a GGUF "
        "file's metadata says.",
    )  # fmt: skip
    revision: str | None = option(None, "Branch, tag or commit on the hub.")
    model_impl: Literal["auto", "headrace", "transformers"] = option(
        "auto", "Whose code runs the model: headrace (its own class; vllm is another name of it), "
        "transformers (that library's class, over headrace's cache and kernels); auto: headrace's if it "
        "has one.",
        cost="steps of some of transformers' models are not captured: more Python between kernels",
    )  # fmt: skip
    trust_remote_code: bool = option(
        False, "Run Python code that the checkpoint brings, where nothing else knows the model.",
        cost="the code may do whatever this process may",
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
        None,
        "Quantization method; default: what the checkpoint says, else none.",
        flag="quantization",
        other_flag="-q",
    )
    max_model_len: int | None = option(
        None, "Longest context (prompt and output). Default: the model's own limit; -1: the same, "
        "or the largest that fits into the KV cache.", human_int=True,
        cost="sets how much cache one request may take",
    )  # fmt: skip
    seed: int = option(0, "Seed of requests that bring none.")
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
        (), "Logits processors, as package.module:Class; those that are installed as plug-ins are "
        "always loaded. Fixed from the start on.",
        cost="logits of the whole batch in float32, and what the processors do, in every step",
    )  # fmt: skip
    enable_prompt_embeds: bool = option(
        False, "Take prompts that are embeddings instead of tokens.",
        cost="steps with such a prompt run eagerly; trust in clients: what an embedding makes a "
        "model say cannot be filtered as text can",
    )  # fmt: skip
    allow_control_tokens_in_messages: bool = option(
        False, "Let text of special tokens in messages of users and tools, in documents and in tools "
        "become these tokens. By default it stays text.",
        cost="whoever writes such a message can write turns of other roles",
    )  # fmt: skip
    limit_mm_per_prompt: Mapping[str, Any] = option(
        {}, "JSON: most items of a modality in one prompt, as {\"audio\": 2} or "
        "{\"audio\": {\"count\": 2}}; 0: none are taken. Default: 999 each.",
    )  # fmt: skip
    generation_config: str = option(
        "auto", "Defaults for sampling: auto (the checkpoint's generation_config.json), headrace "
        "(neutral ones), or a folder.",
    )  # fmt: skip
    override_generation_config: Mapping[str, Any] = option(
        {}, "JSON merged over the generation config."
    )
    runner: Literal["auto", "generate", "pooling"] = option(
        "auto", "What the model is run for: generate (text), pooling (embeddings, scores, ...); "
        "auto: by its files and its architecture.",
    )  # fmt: skip
    convert: Literal["auto", "none", "embed", "classify", "reward"] = option(
        "auto", "What a generating model is made into to pool: embed, classify; auto: by its "
        "architecture. reward is an old name of embed.",
    )  # fmt: skip
    pooler_config: Mapping[str, Any] = option(
        {}, "JSON: how hidden states are pooled; pooling_type (LAST, MEAN, CLS, ALL, STEP), "
        "normalize, dimensions, enable_chunked_processing, max_embed_len, use_activation, "
        "logit_bias, step_tag_id, returned_token_ids; from Python a PoolerConfig too. Default: the "
        "checkpoint's own. The second flag is its old name.", other_flag="--override-pooler-config",
    )  # fmt: skip
    io_processor_plugin: str | None = option(
        None, "Plug-in that makes prompts of requests' data and answers of pooled results. "
        "Default: the one that config.json names (io_processor_plugin), if any.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", DTYPE_ALIASES.get(self.dtype, self.dtype))
        processors: object = self.logits_processors
        if isinstance(processors, (str, type)):
            object.__setattr__(self, "logits_processors", (processors,))
        for processor in self.logits_processors:
            _check(isinstance(processor, (str, type)), "model.logits_processors", processor,
                   "a class, or its name as package.module:Class")  # fmt: skip
        overrides = self.hf_overrides
        _check(isinstance(overrides, Mapping) or callable(overrides), "model.hf_overrides", overrides,
               "a mapping, or a function of config.json's content")  # fmt: skip
        names: object = self.served_model_name
        if isinstance(names, str):
            object.__setattr__(self, "served_model_name", (names,))
        names = self.served_model_name
        _check(all(names) and len(set(names)) == len(names), "model.served_model_name", names,
               "different names, none of them empty")  # fmt: skip
        _check(-(1 << 63) <= self.seed < 1 << 63, "model.seed", self.seed, "a number of 64 bits")
        _check_choice("model.dtype", self.dtype, ("auto", *DTYPES))
        length = self.max_model_len
        _check(length is None or length == -1 or length >= 1, "model.max_model_len", length,
               "at least 1, or -1")  # fmt: skip
        _check(self.max_logprobs >= -1, "model.max_logprobs", self.max_logprobs, "at least -1")
        _check_choice("model.logprobs_mode", self.logprobs_mode,
                      LOGPROBS_MODES)  # fmt: skip
        if str(self.model_impl) == "vllm":
            object.__setattr__(self, "model_impl", "headrace")
        _check_choice("model.model_impl", self.model_impl, ("auto", "headrace", "transformers"))
        _check_choice("model.runner", self.runner, ("auto", "generate", "pooling"))
        _check_choice("model.convert", self.convert,
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
    _check(modality in MODALITIES, name, limit,
           f"left out: modalities are {', '.join(MODALITIES)}")  # fmt: skip
    if isinstance(limit, Mapping):
        for key in limit:
            _check(
                key == "count", f"{name}.{key}", limit[key], "left out: the only option is count"
            )
        limit = limit.get("count", MEDIA_LIMIT)
    _check(type(limit) is int and limit >= 0, name, limit, "a whole number of at least 0")


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int | None = option(None, "Tokens per block. Default: the platform's (16).")
    kv_cache_dtype: str = option(
        "auto", "Storage of keys and values: auto (the model's dtype), or half of bf16's memory: "
        "fp8 (= fp8_e4m3), fp8_e5m2, or int8, which needs calculate_kv_scales.",
        cost="fp8 rounds keys and values to 4 (e5m2: 3) significant bits, int8 to a "
        "ninetieth of the largest that was measured in their layer",
    )  # fmt: skip
    calculate_kv_scales: bool = option(
        False, "Measure at start what one number of an fp8 or int8 cache stands for in each layer; "
        "otherwise 1. Fixed from then on.",
        cost="a prompt of 256 tokens at start; keys and values that are larger than its own by more "
        "than a headroom are cut off",
    )  # fmt: skip
    enable_prefix_caching: bool | None = option(
        None, "Reuse the cache of earlier requests with the same beginning. Default: on, where the "
        "model allows it.",
        cost="hashing prompts: well under 1 % of prefill",
    )  # fmt: skip
    gpu_memory_utilization: float = option(
        0.9, "Share of the device's memory (on a CPU: of the memory free at start) that weights, "
        "activations and KV cache may take together.",
    )  # fmt: skip
    max_memory_bytes: int | None = option(
        None, "Most bytes that weights, activations and KV cache may take together; replaces the "
        "share above.", human_int=True,
    )  # fmt: skip
    kv_cache_memory_bytes: int | None = option(
        None, "Size of the KV cache, whatever is left of the share; more than max_memory_bytes "
        "leaves is refused.", human_int=True,
    )  # fmt: skip
    kv_cache_ahead_bytes: int = option(
        512 << 20, "CPU: how much of the KV cache is made resident ahead of its use, by a thread of "
        "low priority; 0: memory comes at its first use; -1: all of it, before the first request.",
        human_int=True, cost="so much memory beyond what is in use, and with -1 up to a second of "
        "start-up a gigabyte; without it a prompt waits for the system to give memory",
    )  # fmt: skip
    num_gpu_blocks_override: int | None = option(
        None, "Number of blocks; replaces both of the above. For tests of preemption."
    )
    prefix_caching_hash_algo: Literal["sha256"] = option("sha256", "Hash of block contents.")

    def __post_init__(self) -> None:
        if self.block_size is not None:
            _check_choice("cache.block_size", self.block_size, BLOCK_SIZES)
        _check_choice("cache.kv_cache_dtype", self.kv_cache_dtype, tuple(CACHE_DTYPES))
        self._check_scales()
        share = self.gpu_memory_utilization
        _check(0 < share <= 1, "cache.gpu_memory_utilization", share, "in (0, 1]")
        for name in ("max_memory_bytes", "kv_cache_memory_bytes", "num_gpu_blocks_override"):
            value = getattr(self, name)
            _check(value is None or value >= 1, f"cache.{name}", value, "at least 1")
        _check(self.kv_cache_ahead_bytes >= -1, "cache.kv_cache_ahead_bytes",
               self.kv_cache_ahead_bytes, "at least 0, or -1")  # fmt: skip
        _check_choice("cache.prefix_caching_hash_algo", self.prefix_caching_hash_algo, ("sha256",))

    def _check_scales(self) -> None:
        dtype, measured = self.kv_cache_dtype, self.calculate_kv_scales
        _check(dtype != "int8" or measured, "cache.kv_cache_dtype", dtype,
               "used with cache.calculate_kv_scales = True (--calculate-kv-scales), as int8 needs "
               "scales that suit the model; 'fp8' works without")  # fmt: skip
        _check(not measured or CACHE_DTYPES[dtype] != "", "cache.calculate_kv_scales", measured,
               f"False with cache.kv_cache_dtype = {dtype!r}, which stores keys and values as they "
               "are; 'fp8', 'fp8_e5m2' and 'int8' have scales")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """How steps are filled."""

    max_num_batched_tokens: int | None = option(
        None, "Most tokens in one step. Default: 2048 on a CPU, 8192 on a GPU.", human_int=True,
        cost="activations grow with it; small values lengthen prefill, large ones delay decode",
    )  # fmt: skip
    max_num_shared_tokens: int | None = option(
        None, "Most tokens in one step while several requests compete for it (max_num_seqs if "
        "that is more). Default: 512 on a CPU, where a step's time grows with its tokens; as "
        "max_num_batched_tokens on a GPU. Where it is less than that, a step that holds half of "
        "it in prompts begins no further prompt.", human_int=True,
        cost="small values bring first tokens earlier, one request after the other",
    )  # fmt: skip
    max_num_seqs: int | None = option(
        None, "Most requests in one step. Default: 128 on a CPU, 256 on a GPU."
    )
    enable_chunked_prefill: bool = option(
        True, "Cut long prompts to the step's remaining tokens, so that decoding goes on."
    )
    max_num_partial_prefills: int = option(1, "Prompts that may be partly computed at once.")
    max_long_partial_prefills: int = option(
        1, "Of those, long ones; fewer lets short prompts overtake long ones."
    )
    long_prefill_token_threshold: int = option(
        0, "Prompts longer than this are long; 0: 4 % of the context if several partial prefills "
        "are allowed.", human_int=True,
    )  # fmt: skip
    policy: Literal["fcfs", "priority", "fair"] = option(
        "fcfs", "fcfs: by arrival; priority: by the request's priority, lower first, then by "
        "arrival; fair: API keys share by tokens, each key's requests by arrival.",
        flag="scheduling_policy",
    )  # fmt: skip
    fair_weights: Mapping[str, float] = option(
        {}, 'JSON, name of a key -> its share under the fair policy, relative to others: '
        '{"batch": 0.5}. Others have 1.',
    )  # fmt: skip
    scheduler_cls: str = option("default", "Scheduler: default, or the name of a plug-in.")
    async_scheduling: bool | None = option(
        None, "Schedule and detokenize while the model runs. Default: on."
    )
    stream_interval: int = option(
        1, "Tokens per streamed chunk; the first and the last are sent at once."
    )
    max_queued_requests: int = option(
        16384, "Most requests that may wait; more are refused with HTTP 429.", human_int=True
    )
    max_queued_tokens: int | None = option(
        None, "Most prompt tokens that may wait, over all requests; more are refused with HTTP 429. "
        "A request that finds nobody waiting is always taken. Default: no limit.", human_int=True,
    )  # fmt: skip

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_shared_tokens", "max_num_seqs"):
            value = getattr(self, name)
            _check(value is None or value >= 1, f"scheduler.{name}", value, "at least 1")
        for name in ("max_num_partial_prefills", "stream_interval", "max_queued_requests"):
            _check(getattr(self, name) >= 1, f"scheduler.{name}", getattr(self, name), "at least 1")
        _check_choice("scheduler.policy", self.policy, ("fcfs", "priority", "fair"))
        _check(all(isinstance(w, (int, float)) and 0 < w < float("inf")
                   for w in self.fair_weights.values()),
               "scheduler.fair_weights", self.fair_weights, "numbers above 0")  # fmt: skip
        _check(not self.fair_weights or self.policy == "fair", "scheduler.fair_weights",
               self.fair_weights, "used with scheduler.policy = 'fair'")  # fmt: skip
        _check(self.max_queued_tokens is None or self.max_queued_tokens >= 1,
               "scheduler.max_queued_tokens", self.max_queued_tokens, "at least 1")  # fmt: skip
        partial, long = self.max_num_partial_prefills, self.max_long_partial_prefills
        _check(1 <= long <= partial, "scheduler.max_long_partial_prefills", long,
               f"between 1 and max_num_partial_prefills = {partial}")  # fmt: skip
        _check(partial == 1 or self.enable_chunked_prefill, "scheduler.max_num_partial_prefills",
               partial, "1 while enable_chunked_prefill is off")  # fmt: skip
        _check(self.long_prefill_token_threshold >= 0, "scheduler.long_prefill_token_threshold",
               self.long_prefill_token_threshold, "at least 0")  # fmt: skip
        if self.max_num_batched_tokens is not None and self.max_num_seqs is not None:
            _check(self.max_num_batched_tokens >= self.max_num_seqs,
                   "scheduler.max_num_batched_tokens", self.max_num_batched_tokens,
                   f"at least max_num_seqs = {self.max_num_seqs}")  # fmt: skip
        shared, most = self.max_num_shared_tokens, self.max_num_batched_tokens
        _check(shared is None or most is None or shared <= most, "scheduler.max_num_shared_tokens",
               shared, f"at most max_num_batched_tokens = {most}")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Over how many processes the model is spread."""

    tensor_parallel_size: int = option(
        1, "Ranks over which each layer is cut. Only 1 for now.", other_flag="-tp"
    )
    pipeline_parallel_size: int = option(
        1, "Stages over which the layers are spread. Only 1 for now.", other_flag="-pp"
    )
    data_parallel_size: int = option(1, "Copies of the engine. Only 1 for now.", other_flag="-dp")
    distributed_executor_backend: str = option("uni", "How workers run: uni, or a plug-in's name.")

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
            _check(getattr(self, name) == 1, f"parallel.{name}", getattr(self, name),
                   "1: running on several devices is not built yet")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """Where it runs."""

    device: str = option(
        "auto", "auto, cpu, cuda, sim (no model: predictable tokens, for tests of everything "
        "around it), or a platform plug-in's name.",
    )  # fmt: skip
    num_threads: int = option(
        0, "CPU threads for the model; 0: one for each core that the process may use."
    )
    cpu_bind: str = option(
        "none", "Cores to which those threads are bound, one each: none, auto (physical cores "
        "first), or a list such as 0-3,8. Linux only.",
        cost="a bound thread waits for its core while others are idle: give it to nothing else",
    )  # fmt: skip
    kernels: Mapping[str, str] = option(
        {}, 'JSON, op name (or "*") -> kernel provider, to insist on one: {"*": "reference"}.'
    )

    def __post_init__(self) -> None:
        _check(self.num_threads >= 0, "device.num_threads", self.num_threads, "at least 0")
        if self.cpu_bind not in ("none", "auto"):
            try:
                parse_cores(self.cpu_bind)
            except ValueError as error:
                _check(False, "device.cpu_bind", self.cpu_bind,
                       f"none, auto or a list of cores such as '0-3,8': {error}")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """How weights are read."""

    load_format: str = option(
        "auto", "auto (safetensors, else PyTorch's files, else GGUF, else Mistral's), safetensors, pt, "
        "gguf, mistral, dummy (random weights, seeded), sharded_state, tensorizer, runai_streamer, "
        "runai_streamer_sharded, fastsafetensors, or a plug-in's name.",
    )  # fmt: skip
    model_loader_extra_config: Mapping[str, Any] = option(
        {}, 'JSON: settings of the load format, such as {"concurrency": 16} for runai_streamer.'
    )
    download_dir: str | None = option(None, "Where hub downloads go. Default: the hub's cache.")
    safetensors_load_strategy: Literal["lazy", "eager"] = option(
        "lazy", "lazy: memory map; eager: read whole files, by several threads (network file "
        "systems).",
    )  # fmt: skip
    use_tqdm_on_load: bool = option(True, "Show a progress bar.")
    offline: bool = option(
        False, "Fetch nothing: models and tokenizers come from folders and from the hub's cache, and "
        "what is in neither is refused. HF_HUB_OFFLINE=1 does the same for a whole process.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        _check_choice(
            "load.safetensors_load_strategy", self.safetensors_load_strategy, ("lazy", "eager")
        )


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Attention."""

    backend: str | None = option(
        None,
        "Attention backend; default: the first that can serve the model.",
        flag="attention_backend",
    )


@dataclass(frozen=True, kw_only=True)
class GraphConfig:
    """Captured steps: recorded at start, replayed without Python (CUDA graphs are the same idea)."""

    enforce_eager: bool | None = option(
        None, "Capture nothing: run every step from Python. Outputs are the same bit for bit. "
        "Default: by the optimization level."
    )  # fmt: skip
    optimization_level: int = option(
        2, "How much a start prepares: 0: nothing, steps run from Python (enforce_eager); 1, 2 and 3, "
        "which are the same: steps are captured. A setting of its own wins.", other_flag="-O",
    )  # fmt: skip
    cudagraph_capture_sizes: tuple[int, ...] = option(
        (), "Largest numbers of tokens of captured steps; larger steps run eagerly. Default: 16, "
        "64, 256, 512 and 2048, as far as max_num_batched_tokens.",
        cost="memory for the intermediate results of the largest",
    )  # fmt: skip
    max_cudagraph_capture_size: int | None = option(
        None, "Limit of the sizes above. Default: none but max_num_batched_tokens."
    )

    def __post_init__(self) -> None:
        _check_choice("graph.optimization_level", self.optimization_level, (0, 1, 2, 3))
        if self.enforce_eager is None:
            object.__setattr__(self, "enforce_eager", self.optimization_level == 0)
        sizes, largest = self.cudagraph_capture_sizes, self.max_cudagraph_capture_size
        _check(all(size >= 1 for size in sizes), "graph.cudagraph_capture_sizes", sizes,
               "numbers of at least 1")  # fmt: skip
        _check(largest is None or largest >= 1, "graph.max_cudagraph_capture_size", largest,
               "at least 1")  # fmt: skip
        _check(not sizes or largest in (None, max(sizes, default=0)),
               "graph.max_cudagraph_capture_size", largest,
               f"the largest of cudagraph_capture_sizes = {sizes}")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsConfig:
    """Structured output: who matches it, and what a constraint may cost."""

    backend: str = option(
        "auto", "auto (the first of the others that is installed and can serve the constraint), "
        "guidance (= llguidance), xgrammar, outlines, lm-format-enforcer, or a plug-in's name.",
    )  # fmt: skip
    disable_fallback: bool = option(
        False, "Refuse what the backend cannot serve, instead of trying the others."
    )
    disable_any_whitespace: bool = option(
        False, "Compact JSON. Only with backend guidance or xgrammar."
    )
    disable_additional_properties: bool = option(
        False, "Objects hold the properties that their schema names, and no others. Only with "
        "backend guidance.",
    )  # fmt: skip
    reasoning_parser: str = option(
        "", "How the model marks its reasoning; constraints hold from its end on."
    )
    reasoning_parser_plugin: str = option("", "Python file that registers reasoning parsers.")
    enable_in_reasoning: bool = option(False, "Constraints hold for the reasoning too.")
    prepare_at_start: bool = option(
        False, "Make the backend's tables of the vocabulary at start, instead of with the first "
        "constraint, when all requests wait for it.",
        cost="some 10 to 20 us of start-up for each token of the vocabulary",
    )  # fmt: skip
    compile_seconds: float = option(10.0, "Longest compilation of one constraint.")
    compile_memory_bytes: int = option(
        256 << 20, "Most memory that one compilation may take.", human_int=True
    )
    compile_processes: int = option(
        2, "Processes that compile constraints, started when they are needed.",
        cost="some 30 MB each while in use",
    )  # fmt: skip
    matching_seconds: float = option(
        0.25, "Processor time that matching one request's constraint may take, beyond 1 ms for "
        "each of its tokens. The request ends with finish_reason error then.",
    )  # fmt: skip
    max_source_bytes: int = option(1 << 20, "Longest constraint, as JSON or text.", human_int=True)
    max_depth: int = option(64, "Deepest nesting of a JSON schema or structural tag.")
    max_regex_length: int = option(8192, "Longest regex, also within a JSON schema.")
    cache_bytes: int = option(
        256 << 20, "Most memory for compiled grammars that are kept for later requests.",
        human_int=True,
    )  # fmt: skip

    def __post_init__(self) -> None:
        backend = BACKEND_ALIASES.get(self.backend, self.backend)
        object.__setattr__(self, "backend", backend)
        known = {"auto", *BACKENDS, *plugins.installed("headrace.grammar_backends")}
        _check_choice("structured_outputs.backend", backend, tuple(sorted(known)))
        _check(not self.disable_any_whitespace or backend in ("guidance", "xgrammar"),
               "structured_outputs.disable_any_whitespace", True,
               f"False with backend {backend!r}; 'guidance' and 'xgrammar' can do it")  # fmt: skip
        _check(not self.disable_additional_properties or backend == "guidance",
               "structured_outputs.disable_additional_properties", True,
               f"False with backend {backend!r}; 'guidance' can do it")  # fmt: skip
        _check(self.compile_seconds > 0, "structured_outputs.compile_seconds",
               self.compile_seconds, "above 0")  # fmt: skip
        _check(self.matching_seconds > 0, "structured_outputs.matching_seconds",
               self.matching_seconds, "above 0")  # fmt: skip
        for name in ("compile_memory_bytes", "compile_processes", "max_source_bytes", "max_depth",
                     "max_regex_length", "cache_bytes"):  # fmt: skip
            value = getattr(self, name)
            _check(value >= 1, f"structured_outputs.{name}", value, "at least 1")


@dataclass(frozen=True, kw_only=True)
class ObservabilityConfig:
    """What is counted and logged."""

    log_stats: bool = option(True, "Count and log throughput, cache use and hit rate.")
    log_stats_interval: float = option(10.0, "Seconds between the engine's log lines.")
    heartbeat_limit: float = option(
        5.0, "Seconds that one step may take, at least, before the engine counts as stuck and "
        "/health answers 503; four times what the largest step took at start, if that is more.",
    )  # fmt: skip
    collect_detailed_traces: tuple[str, ...] = option(
        (), "Which times of its steps a request's span (--otlp-traces-endpoint) and metrics tell "
        "besides the scheduler's: model (forward passes), worker (whole steps), all; words, or "
        "one text with commas.",
        cost="a small message to the front end in every step",
    )  # fmt: skip

    def __post_init__(self) -> None:
        given: object = self.collect_detailed_traces
        texts = (given,) if isinstance(given, str) else self.collect_detailed_traces
        words = tuple(word.strip() for text in texts for word in str(text).split(","))
        for word in words:
            _check_choice("observability.collect_detailed_traces", word, DETAILED_TRACES)
        object.__setattr__(self, "collect_detailed_traces", words)
        for name in ("log_stats_interval", "heartbeat_limit"):
            _check(getattr(self, name) > 0, f"observability.{name}", getattr(self, name), "above 0")

    @property
    def collect_forward_time(self) -> bool:
        """Whether requests' metrics tell the time of the model's forward passes."""
        return not {"model", "all"}.isdisjoint(self.collect_detailed_traces)

    @property
    def collect_execute_time(self) -> bool:
        """Whether requests' metrics tell the time of the worker's whole steps."""
        return not {"worker", "all"}.isdisjoint(self.collect_detailed_traces)


_KINDS: Mapping[type, str] = {bool: "true or false", int: "a whole number", str: "text"}


@dataclass(frozen=True, kw_only=True)
class ProfilerConfig:
    """What is recorded between ``start_profile`` and ``stop_profile``: the workers' steps.

    The names are those of ``--profiler-config``'s JSON.
    """

    profiler: Literal["torch", "cuda"] | None = None
    """``torch`` writes trace files; ``cuda`` switches an attached profiler (Nsight) on and off."""
    torch_profiler_dir: str = ""
    """Absolute path of the folder for trace files; made if it is not there."""
    torch_profiler_with_stack: bool = True
    torch_profiler_use_gzip: bool = True
    torch_profiler_dump_cuda_time_total: bool = True
    """Also write a table of the operations that took longest."""
    torch_profiler_record_shapes: bool = False
    torch_profiler_with_memory: bool = False
    torch_profiler_with_flops: bool = False
    ignore_frontend: bool = True
    """Only True: tokenising and HTTP are not recorded."""
    delay_iterations: int = 0
    """Steps after the start that are not recorded."""
    max_iterations: int = 0
    """Steps after which recording ends by itself; 0: only ``stop_profile`` ends it."""

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):  # JSON of the user's: nobody has looked at the types
            if item.name != "profiler":
                value, kind = getattr(self, item.name), type(item.default)
                _check(type(value) is kind, f"profiler_config.{item.name}", value, _KINDS[kind])
        _check_choice("profiler_config.profiler", self.profiler, (None, "torch", "cuda"))
        folder = self.torch_profiler_dir
        _check(self.profiler != "torch" or folder.startswith("/"),
               "profiler_config.torch_profiler_dir", folder,
               "an absolute path with profiler = 'torch'")  # fmt: skip
        _check(self.ignore_frontend, "profiler_config.ignore_frontend", self.ignore_frontend,
               "true: the front end is not recorded")  # fmt: skip
        for name in ("delay_iterations", "max_iterations"):
            _check(getattr(self, name) >= 0, f"profiler_config.{name}", getattr(self, name),
                   "at least 0")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SimConfig:
    """The simulated device (--device sim), which runs no model: how long its steps take."""

    step_ms: float = option(5.0, "Milliseconds of a step.", flag="sim_step_ms")
    token_us: float = option(
        10.0, "Microseconds of each token in a step, prompts' included.", flag="sim_token_us"
    )

    def __post_init__(self) -> None:
        for name in ("step_ms", "token_us"):
            _check(0 <= getattr(self, name) <= 60_000, f"sim.{name}", getattr(self, name),
                   "in 0..60000")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SpeechConfig:
    """Speech to text: what uploaded audio may cost before a model hears it."""

    audio_decoders: int = option(
        1, "Processes that decode uploaded audio, if the model transcribes.",
        cost="some 100 MB each, and the decoded audio",
    )  # fmt: skip
    max_audio_file_bytes: int | None = option(
        None, "Longest audio file. Default: HEADRACE_MAX_AUDIO_CLIP_FILESIZE_MB, else 25 MiB.",
        human_int=True,
    )  # fmt: skip
    max_audio_seconds: float | None = option(
        None, "Longest audio, whatever its file's size. Default: 7200; hardened: 3600.",
        cost="64 KB a second while it is transcribed",
    )  # fmt: skip
    audio_decode_seconds: float = option(
        60.0, "Seconds that decoding one file may take; then its process is killed."
    )

    def __post_init__(self) -> None:
        _check(1 <= self.audio_decoders <= 64, "speech.audio_decoders", self.audio_decoders,
               "in 1..64")  # fmt: skip
        for name in ("max_audio_file_bytes", "max_audio_seconds", "audio_decode_seconds"):
            value = getattr(self, name)
            _check(value is None or value > 0, f"speech.{name}", value, "above 0")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All settings of one engine."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    load: LoadConfig = field(default_factory=LoadConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    graph: GraphConfig = field(default_factory=GraphConfig)
    structured_outputs: StructuredOutputsConfig = field(default_factory=StructuredOutputsConfig)
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)
    sim: SimConfig = field(default_factory=SimConfig)
    speech: SpeechConfig = field(default_factory=SpeechConfig)
    engine_process: bool = option(
        False, "Run the engine in a process of its own, behind ZeroMQ.",
        cost="one copy and a wake-up per step; isolates the server from the model",
    )  # fmt: skip
    profiler_config: Mapping[str, Any] = option(
        {}, "JSON: what POST /start_profile records; profiler (torch, cuda), torch_profiler_dir, "
        "delay_iterations, max_iterations and others.",
        cost="while it records, steps are slower and the trace grows",
    )  # fmt: skip

    def __post_init__(self) -> None:
        _ = self.profiler  # checked before anything is loaded

    @property
    def profiler(self) -> ProfilerConfig:
        """:attr:`profiler_config`, checked.

        Raises:
            ConfigError: a field is unknown or its value wrong.
        """
        known = {field.name for field in dataclasses.fields(ProfilerConfig)}
        for name, value in self.profiler_config.items():
            _check(name in known, f"profiler_config.{name}", value,
                   f"left out: no such field; fields are {', '.join(sorted(known))}")  # fmt: skip
        return ProfilerConfig(**self.profiler_config)
