"""All settings of an engine: :class:`EngineConfig`, with one frozen dataclass per owner.

Those of the model and of its loading, which other packages read too, are in
:mod:`headrace_core.config`, which also says how a field is declared. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace_core import plugins
from headrace_core.attention import BLOCK_SIZES
from headrace_core.config import LoadConfig, ModelConfig, option, require, require_choice
from headrace_core.grammar import BACKEND_ALIASES, BACKENDS
from headrace_core.kv import CACHE_DTYPES, ROW_SCALED_BITS
from headrace_engine.cores import parse_cores
from headrace_engine.encoder.settings import PRODUCER, check_ec_transfer
from headrace_engine.kv_transfer.settings import check_kv_transfer
from headrace_engine.lora.config import LoRAConfig
from headrace_engine.media_io import check_media_io
from headrace_engine.multiproc.config import ParallelConfig
from headrace_engine.speculation.config import SpeculativeConfig

DEFAULT_CAPTURE_SIZES = (16, 64, 256, 512, 2048)
"""Tokens. Calls are saved in small steps; what large ones gain is that their intermediate results
lie in memory that stays, where an allocator would take megabytes from the system for each."""
DETAILED_TRACES = ("model", "worker", "all")


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int | None = option(None, "Tokens per block. Default: the platform's (16).")
    kv_cache_dtype: str = option(
        "auto", "Storage of keys and values: auto (the model's dtype); with half of bf16's memory: "
        "fp8 (= fp8_e4m3), fp8_e5m2, int8, which needs calculate_kv_scales, or int8_per_token_head; "
        "with a quarter: int4_per_token_head.",
        cost="fp8 rounds keys and values to 4 (e5m2: 3) significant bits, int8 to a "
        "ninetieth of the largest value measured in their layer; int8_per_token_head (int4_...) to "
        "a 127th (a seventh) of the largest value of their token and head, 4 bytes more for each",
    )  # fmt: skip
    calculate_kv_scales: bool = option(
        False, "Measure the scale of an fp8 or int8 cache for each layer at start; otherwise the scale "
        "is 1. Fixed after the start.",
        cost="a prompt of 256 tokens at start; keys and values that exceed its largest by more than a "
        "headroom are clipped",
    )  # fmt: skip
    enable_prefix_caching: bool | None = option(
        None, "Reuse cached blocks of earlier requests with the same prefix. Default: on if the model "
        "supports it.",
        cost="hashing prompts: well under 1 % of prefill",
    )  # fmt: skip
    gpu_memory_utilization: float = option(
        0.9, "Share of the device's memory (on a CPU: of the memory free at start) for weights, "
        "activations and KV cache together.",
    )  # fmt: skip
    max_memory_bytes: int | None = option(
        None, "Most bytes for weights, activations and KV cache together; replaces the share above.",
        human_int=True,
    )  # fmt: skip
    kv_cache_memory_bytes: int | None = option(
        None, "Size of the KV cache, independent of the share; must fit into what the model leaves of "
        "max_memory_bytes and of the free memory.", human_int=True,
    )  # fmt: skip
    kv_cache_ahead_bytes: int = option(
        512 << 20, "CPU: bytes of the KV cache that a low-priority thread makes resident before they "
        "are used; 0: none, memory is allocated on first use; -1: all, before the first request.",
        human_int=True, cost="that much memory beyond the blocks in use; with -1 up to one second of "
        "start-up per gigabyte; with 0 prompts wait for memory from the system",
    )  # fmt: skip
    num_gpu_blocks_override: int | None = option(
        None,
        "Number of blocks; replaces the two settings above, and must fit into the memory, too. For tests of "
        "preemption.",
    )
    prefix_caching_hash_algo: Literal["sha256"] = option("sha256", "Hash of block contents.")
    kv_transfer_config: Mapping[str, Any] = option(
        {}, "JSON: a store of blocks outside the cache: {\"kv_connector\": \"offload\", \"kv_role\": "
        "\"kv_both\", \"kv_connector_extra_config\": {\"cpu_bytes_to_use\": 8000000000}} keeps blocks that "
        "the cache gives up in memory; the connector file: in a folder that engines share; p2p: engines "
        "give them to each other. Default: none.",
        cost="memory, or a folder, of that size; blocks are copied between steps",
    )  # fmt: skip

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_transfer_config", check_kv_transfer(self.kv_transfer_config))
        if self.block_size is not None:
            require_choice("cache.block_size", self.block_size, BLOCK_SIZES)
        require_choice("cache.kv_cache_dtype", self.kv_cache_dtype, tuple(CACHE_DTYPES))
        self._check_scales()
        share = self.gpu_memory_utilization
        require(0 < share <= 1, "cache.gpu_memory_utilization", share, "in (0, 1]")
        for name in ("max_memory_bytes", "kv_cache_memory_bytes", "num_gpu_blocks_override"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"cache.{name}", value, "at least 1")
        require(self.kv_cache_ahead_bytes >= -1, "cache.kv_cache_ahead_bytes",
               self.kv_cache_ahead_bytes, "at least 0, or -1")  # fmt: skip
        require_choice("cache.prefix_caching_hash_algo", self.prefix_caching_hash_algo, ("sha256",))

    def _check_scales(self) -> None:
        dtype, measured = self.kv_cache_dtype, self.calculate_kv_scales
        require(dtype != "int8" or measured, "cache.kv_cache_dtype", dtype,
               "used with cache.calculate_kv_scales = True (--calculate-kv-scales), as int8 needs "
               "scales that suit the model; 'fp8' works without")  # fmt: skip
        require(not measured or dtype not in ROW_SCALED_BITS, "cache.calculate_kv_scales", measured,
               f"False with cache.kv_cache_dtype = {dtype!r}, which finds a scale for each token and head "
               "as it is written")  # fmt: skip
        require(not measured or CACHE_DTYPES[dtype] != "", "cache.calculate_kv_scales", measured,
               f"False with cache.kv_cache_dtype = {dtype!r}, which stores keys and values as they "
               "are; 'fp8', 'fp8_e5m2' and 'int8' have scales")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """The scheduler: how steps are filled."""

    max_num_batched_tokens: int | None = option(
        None, "Most tokens in one step. Default: 2048 on a CPU, 8192 on a GPU.", human_int=True,
        cost="activations grow with it; small values make prefill longer, large values delay decode",
    )  # fmt: skip
    max_num_shared_tokens: int | None = option(
        None, "Most tokens in one step while several requests compete for it (at least max_num_seqs). "
        "Default: 512 on a CPU, where a step's time grows with its tokens; max_num_batched_tokens "
        "on a GPU. If it is below max_num_batched_tokens, a step starts no further prompt once "
        "prompts fill half of it.", human_int=True,
        cost="small values give first tokens earlier, one request after the other",
    )  # fmt: skip
    max_num_seqs: int | None = option(
        None, "Most requests in one step. Default: 128 on a CPU, 256 on a GPU."
    )
    target_itl: float | None = option(
        None, "Seconds that a stream should wait for its next token while prompts are computed beside it: a "
        "step takes as many prompt tokens as let it end in that time, by what earlier steps took; at least "
        "16, at most max_num_shared_tokens. Begin with twice what a step takes without prompts. Default: "
        "steps are filled.",
        cost="prompts take more steps, each of which reads the weights, so first tokens come later while "
        "others decode; less throughput the nearer the target is to a step without prompts",
    )  # fmt: skip
    target_ttft: float | None = option(
        None, "Seconds that a request may wait for its first token while others overtake it: prompts with "
        "the least left to compute go first (cached prefixes do not count), but after requests that have "
        "waited for longer than this, which run in order of arrival. Only with policy fcfs. Default: all run "
        "in order of arrival.",
        cost="long prompts wait for short ones up to that time; prompts that are overtaken keep their "
        "blocks; 16 waiting requests are looked up in the prefix cache for each step",
    )  # fmt: skip
    enable_chunked_prefill: bool = option(
        True, "Split long prompts over several steps, so that decoding continues."
    )
    max_num_partial_prefills: int = option(
        1, "Most prompts that are partly computed at the same time."
    )
    max_long_partial_prefills: int = option(
        1, "Most long prompts among those; a lower number lets short prompts overtake long ones."
    )
    long_prefill_token_threshold: int = option(
        0, "Length above which a prompt is long; 0: 4 % of the context if several partial prefills are "
        "allowed.", human_int=True,
    )  # fmt: skip
    policy: Literal["fcfs", "priority", "fair"] = option(
        "fcfs", "Order of requests: fcfs (arrival), priority (the request's priority, lower first, then "
        "arrival) or fair (API keys share tokens; requests of one key in order of arrival).",
        flag="scheduling_policy",
    )  # fmt: skip
    fair_weights: Mapping[str, float] = option(
        {}, 'JSON, name of a key -> its relative share under the fair policy: {"batch": 0.5}. '
        "Default: 1 for each key.",
    )  # fmt: skip
    max_num_encoder_input_tokens: int | None = option(
        None, "Most vectors that a step makes of images and other media in prompts; one item may always "
        "be encoded. Default: as many as the step may have tokens.", human_int=True,
        cost="a step that encodes takes longer, and all that decode wait for it; small values delay "
        "prompts with several items",
    )  # fmt: skip
    disable_chunked_mm_input: bool = option(
        False, "Compute all tokens of an image or other item in one step.",
        cost="an item of more tokens than max_num_batched_tokens is refused; steps end before one that "
        "does not fit",
    )  # fmt: skip
    encoder_share: float = option(
        0.2, "Seconds that media may be encoded for beside each second of steps, while other requests "
        "decode. 0: an item is encoded whole, in the step that reaches it.",
        cost="tokens of requests that decode come so much later while media are encoded; small values "
        "delay answers about media while others decode",
    )  # fmt: skip
    scheduler_cls: str = option("default", "Scheduler: default, or the name of a plug-in.")
    async_scheduling: bool | None = option(
        None, "Schedule and detokenize while the model runs. Default: on."
    )
    stream_interval: int = option(
        1, "Tokens per streamed chunk; the first and last chunk are sent at once."
    )
    max_queued_requests: int | None = option(
        None, "Most waiting requests; more are refused with HTTP 429. Default: 16384 of a server and of "
        "AsyncLLM; LLM takes a batch of any size.", human_int=True,
    )  # fmt: skip
    max_queued_tokens: int | None = option(
        None, "Most prompt tokens of all waiting requests; more are refused with HTTP 429. A request is "
        "always accepted if no other request waits. Default: no limit.", human_int=True,
    )  # fmt: skip

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_shared_tokens", "max_num_seqs"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"scheduler.{name}", value, "at least 1")
        for name in ("max_num_partial_prefills", "stream_interval"):
            require(
                getattr(self, name) >= 1, f"scheduler.{name}", getattr(self, name), "at least 1"
            )
        for name in ("max_queued_requests", "max_queued_tokens"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"scheduler.{name}", value, "at least 1")
        require_choice("scheduler.policy", self.policy, ("fcfs", "priority", "fair"))
        require(all(isinstance(w, (int, float)) and 0 < w < float("inf")
                   for w in self.fair_weights.values()),
               "scheduler.fair_weights", self.fair_weights, "numbers above 0")  # fmt: skip
        require(not self.fair_weights or self.policy == "fair", "scheduler.fair_weights",
               self.fair_weights, "used with scheduler.policy = 'fair'")  # fmt: skip
        partial, long = self.max_num_partial_prefills, self.max_long_partial_prefills
        require(1 <= long <= partial, "scheduler.max_long_partial_prefills", long,
               f"between 1 and max_num_partial_prefills = {partial}")  # fmt: skip
        require(partial == 1 or self.enable_chunked_prefill, "scheduler.max_num_partial_prefills",
               partial, "1 while enable_chunked_prefill is off")  # fmt: skip
        vectors = self.max_num_encoder_input_tokens
        require(vectors is None or vectors >= 1, "scheduler.max_num_encoder_input_tokens", vectors,
               "at least 1")  # fmt: skip
        require(0 <= self.encoder_share < float("inf"), "scheduler.encoder_share", self.encoder_share,
               "a number from 0 on")  # fmt: skip
        require(self.long_prefill_token_threshold >= 0, "scheduler.long_prefill_token_threshold",
               self.long_prefill_token_threshold, "at least 0")  # fmt: skip
        if self.max_num_batched_tokens is not None and self.max_num_seqs is not None:
            require(self.max_num_batched_tokens >= self.max_num_seqs,
                   "scheduler.max_num_batched_tokens", self.max_num_batched_tokens,
                   f"at least max_num_seqs = {self.max_num_seqs}")  # fmt: skip
        shared, most = self.max_num_shared_tokens, self.max_num_batched_tokens
        require(shared is None or most is None or shared <= most, "scheduler.max_num_shared_tokens",
               shared, f"at most max_num_batched_tokens = {most}")  # fmt: skip
        self._check_targets()

    def _check_targets(self) -> None:
        for name in ("target_itl", "target_ttft"):
            value: object = getattr(self, name)
            is_time = isinstance(value, (int, float)) and 0 < value < math.inf
            require(value is None or is_time, f"scheduler.{name}", value,
                   "a number of seconds above 0")  # fmt: skip
        require(self.target_itl is None or self.enable_chunked_prefill, "scheduler.target_itl",
               self.target_itl, "left out where prompts are computed whole (enable_chunked_prefill is off: "
               "by its setting, or for a model that sees a whole prompt at once)")  # fmt: skip
        require(self.target_ttft is None or self.policy == "fcfs", "scheduler.target_ttft",
               self.target_ttft, f"left out with scheduler.policy = {self.policy!r}, which has an order of "
               "its own; policy = 'fcfs' works with it")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """The device, its threads and processes."""

    device: str = option(
        "auto", "auto, cpu, cuda, sim (predictable tokens without a model, for tests of the rest), or a "
        "platform plug-in's name.",
    )  # fmt: skip
    num_threads: int = option(
        0, "CPU threads of the engine; 0: one per core that the process may use."
    )
    cpu_bind: str = option(
        "none", "CPU cores for the engine's threads, one per thread: none (not bound), auto (physical "
        "cores first), or a list such as 0-3,8. Linux only.",
        cost="a bound thread waits for its core even if other cores are idle; run nothing else on these "
        "cores",
    )  # fmt: skip
    enable_sleep_mode: bool = option(
        False, "Let the engine sleep (sleep, wake_up; POST /sleep, /wake_up): it gives the memory of weights "
        "and KV cache back while it is not needed. On a CPU only.",
        cost="none while it is awake; waking reads the checkpoint again, which takes as long as the start",
    )  # fmt: skip
    keep_start_costs: bool = option(
        True, "CPU: keep what a start measures, bytes and seconds of the largest step, and which tensors it "
        "packed into which layer, in files for the next start of the same model with the same settings "
        "(folder: HEADRACE_CACHE_ROOT).",
        cost="200 bytes for each of the last 256, 150 for each weight of the last 64; without it each start "
        "takes as much longer as a prompt of 272 tokens, and packs weights after torch is imported",
    )  # fmt: skip
    packed_weights_cache_gb: float = option(
        0.0, "CPU: GiB on the disk for packed weights, which the next start of the same model with the same "
        "settings maps instead of packing; models used last stay (folder: HEADRACE_CACHE_ROOT). 0: none are "
        "kept.",
        cost="as much of the disk as the model takes of memory; the first start of a model writes them once "
        "it is over, and the process ends no sooner than that",
    )  # fmt: skip
    kernels: Mapping[str, str] = option(
        {}, 'JSON, op name (or "*") -> kernel provider to use: {"*": "reference"}.'
    )

    def __post_init__(self) -> None:
        require(self.num_threads >= 0, "device.num_threads", self.num_threads, "at least 0")
        gib = self.packed_weights_cache_gb
        require(0 <= gib < math.inf, "device.packed_weights_cache_gb", gib, "GiB, at least 0")
        if self.cpu_bind not in ("none", "auto"):
            try:
                parse_cores(self.cpu_bind)
            except ValueError as error:
                require(False, "device.cpu_bind", self.cpu_bind,
                       f"none, auto or a list of cores such as '0-3,8': {error}")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Attention."""

    backend: str | None = option(
        None,
        "Attention backend. Default: the first that supports the model.",
        flag="attention_backend",
    )


@dataclass(frozen=True, kw_only=True)
class GraphConfig:
    """Captured steps: recorded at start, replayed without Python (CUDA graphs are the same idea)."""

    enforce_eager: bool | None = option(
        None, "Capture no steps; run each from Python. Outputs are the same bit for bit. Default: from "
        "the optimization level."
    )  # fmt: skip
    optimization_level: int = option(
        2, "Preparation at start: 0: none (enforce_eager); 1, 2 and 3, which are the same: capture "
        "steps. The individual settings take precedence.", other_flag="-O",
    )  # fmt: skip
    cudagraph_capture_sizes: tuple[int, ...] = option(
        (), "Token counts for which steps are captured; larger steps run eagerly. Default: 16, 64, 256, "
        "512 and 2048, up to max_num_batched_tokens.",
        cost="memory for the intermediate results of the largest step",
    )  # fmt: skip
    max_cudagraph_capture_size: int | None = option(
        None, "Largest of these sizes. Default: max_num_batched_tokens."
    )

    def __post_init__(self) -> None:
        require_choice("graph.optimization_level", self.optimization_level, (0, 1, 2, 3))
        if self.enforce_eager is None:
            object.__setattr__(self, "enforce_eager", self.optimization_level == 0)
        sizes, largest = self.cudagraph_capture_sizes, self.max_cudagraph_capture_size
        require(all(size >= 1 for size in sizes), "graph.cudagraph_capture_sizes", sizes,
               "numbers of at least 1")  # fmt: skip
        require(largest is None or largest >= 1, "graph.max_cudagraph_capture_size", largest,
               "at least 1")  # fmt: skip
        require(not sizes or largest in (None, max(sizes, default=0)),
               "graph.max_cudagraph_capture_size", largest,
               f"the largest of cudagraph_capture_sizes = {sizes}")  # fmt: skip


def capture_sizes(
    wanted: tuple[int, ...], maximum: int | None, *, max_num_batched_tokens: int
) -> tuple[int, ...]:
    """The buckets: those wanted, else the default ones, that are of use.

    Args:
        wanted: the user's list, empty = default.
        maximum: the user's limit, None = none.
        max_num_batched_tokens: most tokens of any step; larger buckets are cut down to it.
    """
    limit = max_num_batched_tokens if maximum is None else min(maximum, max_num_batched_tokens)
    sizes = sorted({min(size, limit) for size in wanted or DEFAULT_CAPTURE_SIZES})
    return tuple(size for size in sizes if size > 0)


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsConfig:
    """Structured output: who matches it, and what a constraint may cost."""

    backend: str = option(
        "auto", "Grammar backend: auto (the first installed one that supports the constraint), guidance "
        "(= llguidance), xgrammar, outlines, lm-format-enforcer, or a plug-in's name.",
    )  # fmt: skip
    disable_fallback: bool = option(
        False,
        "Refuse constraints that the backend does not support, instead of trying other backends.",
    )
    disable_any_whitespace: bool = option(
        False, "Write compact JSON. Only with backend guidance or xgrammar."
    )
    disable_additional_properties: bool = option(
        False, "Allow only the properties in the schema of an object. Only with backend guidance.",
    )  # fmt: skip
    reasoning_parser: str = option(
        "", "Format of the model's reasoning; constraints apply after the reasoning."
    )
    reasoning_parser_plugin: str = option("", "Python file that registers reasoning parsers.")
    enable_in_reasoning: bool = option(False, "Apply constraints to the reasoning too.")
    prepare_at_start: bool = option(
        False, "Build the backend's vocabulary tables at start. Otherwise the first constraint builds "
        "them, and all requests wait.",
        cost="about 10 to 20 us of start-up per token of the vocabulary",
    )  # fmt: skip
    compile_seconds: float = option(
        10.0, "Most seconds of processor time to compile one constraint."
    )
    compile_memory_bytes: int = option(256 << 20, "Most memory of one compilation.", human_int=True)
    compile_processes: int = option(
        2, "Processes that compile constraints, started on demand.",
        cost="about 30 MB each while in use",
    )  # fmt: skip
    matching_seconds: float = option(
        0.25, "Seconds of processor time to match one request's constraint, beyond 1 ms per token. A "
        "request that exceeds it ends with finish_reason error.",
    )  # fmt: skip
    max_source_bytes: int = option(1 << 20, "Longest constraint, as JSON or text.", human_int=True)
    max_depth: int = option(64, "Deepest nesting of a JSON schema or structural tag.")
    max_regex_length: int = option(8192, "Longest regex, also within a JSON schema.")
    cache_bytes: int = option(
        256 << 20, "Most memory for cached compiled grammars.",
        human_int=True,
    )  # fmt: skip

    def __post_init__(self) -> None:
        backend = BACKEND_ALIASES.get(self.backend, self.backend)
        object.__setattr__(self, "backend", backend)
        known = {"auto", *BACKENDS, *plugins.installed("headrace.grammar_backends")}
        require_choice("structured_outputs.backend", backend, tuple(sorted(known)))
        require(not self.disable_any_whitespace or backend in ("guidance", "xgrammar"),
               "structured_outputs.disable_any_whitespace", True,
               f"False with backend {backend!r}; 'guidance' and 'xgrammar' can do it")  # fmt: skip
        require(not self.disable_additional_properties or backend == "guidance",
               "structured_outputs.disable_additional_properties", True,
               f"False with backend {backend!r}; 'guidance' can do it")  # fmt: skip
        require(self.compile_seconds > 0, "structured_outputs.compile_seconds",
               self.compile_seconds, "above 0")  # fmt: skip
        require(self.matching_seconds > 0, "structured_outputs.matching_seconds",
               self.matching_seconds, "above 0")  # fmt: skip
        for name in ("compile_memory_bytes", "compile_processes", "max_source_bytes", "max_depth",
                     "max_regex_length", "cache_bytes"):  # fmt: skip
            value = getattr(self, name)
            require(value >= 1, f"structured_outputs.{name}", value, "at least 1")


@dataclass(frozen=True, kw_only=True)
class ObservabilityConfig:
    """Statistics, logs and traces."""

    log_stats: bool = option(True, "Count and log throughput, cache use and hit rate.")
    log_stats_interval: float = option(10.0, "Seconds between the engine's log lines.")
    heartbeat_limit: float = option(
        5.0, "Seconds of one step after which the engine counts as stuck and /health answers 503; at "
        "least four times the largest step at start.",
    )  # fmt: skip
    collect_detailed_traces: tuple[str, ...] = option(
        (), "Step times to add to a request's span (--otlp-traces-endpoint) and metrics: model (forward "
        "passes), worker (whole steps) or all; a list, or one text with commas.",
        cost="a small message to the front end in each step",
    )  # fmt: skip

    def __post_init__(self) -> None:
        given: object = self.collect_detailed_traces
        texts = (given,) if isinstance(given, str) else self.collect_detailed_traces
        words = tuple(word.strip() for text in texts for word in str(text).split(","))
        for word in words:
            require_choice("observability.collect_detailed_traces", word, DETAILED_TRACES)
        object.__setattr__(self, "collect_detailed_traces", words)
        for name in ("log_stats_interval", "heartbeat_limit"):
            require(
                getattr(self, name) > 0, f"observability.{name}", getattr(self, name), "above 0"
            )

    @property
    def collect_forward_time(self) -> bool:
        """True if requests' metrics tell the time of the model's forward passes."""
        return not {"model", "all"}.isdisjoint(self.collect_detailed_traces)

    @property
    def collect_execute_time(self) -> bool:
        """True if requests' metrics tell the time of the worker's whole steps."""
        return not {"worker", "all"}.isdisjoint(self.collect_detailed_traces)


_KINDS: Mapping[type, str] = {bool: "true or false", int: "a whole number", str: "text"}


@dataclass(frozen=True, kw_only=True)
class ProfilerConfig:
    """The profiler: what is recorded between ``start_profile`` and ``stop_profile``: the workers' steps.

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
                require(type(value) is kind, f"profiler_config.{item.name}", value, _KINDS[kind])
        require_choice("profiler_config.profiler", self.profiler, (None, "torch", "cuda"))
        folder = self.torch_profiler_dir
        require(self.profiler != "torch" or folder.startswith("/"),
               "profiler_config.torch_profiler_dir", folder,
               "an absolute path with profiler = 'torch'")  # fmt: skip
        require(self.ignore_frontend, "profiler_config.ignore_frontend", self.ignore_frontend,
               "true: the front end is not recorded")  # fmt: skip
        for name in ("delay_iterations", "max_iterations"):
            require(getattr(self, name) >= 0, f"profiler_config.{name}", getattr(self, name),
                   "at least 0")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SimConfig:
    """The simulated device (--device sim), which runs no model: how long its steps take."""

    step_ms: float = option(5.0, "Milliseconds per step.", flag="sim_step_ms")
    token_us: float = option(
        10.0, "Microseconds per token of a step, prompt tokens included.", flag="sim_token_us"
    )

    def __post_init__(self) -> None:
        for name in ("step_ms", "token_us"):
            require(0 <= getattr(self, name) <= 60_000, f"sim.{name}", getattr(self, name),
                   "in 0..60000")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SpeechConfig:
    """Speech to text: what uploaded audio may cost before a model hears it."""

    audio_decoders: int = option(
        1, "Processes that decode uploaded audio of transcriptions, and as many for that of chats.",
        cost="about 100 MB each, plus the decoded audio",
    )  # fmt: skip
    max_audio_file_bytes: int | None = option(
        None, "Longest audio file. Default: HEADRACE_MAX_AUDIO_CLIP_FILESIZE_MB, else 25 MiB.",
        human_int=True,
    )  # fmt: skip
    max_audio_seconds: float | None = option(
        None, "Most seconds of audio in one file. Default: 7200; hardened: 3600.",
        cost="64 KB per second of audio during transcription",
    )  # fmt: skip
    audio_decode_seconds: float = option(
        60.0, "Seconds to decode one file; then its process is killed."
    )

    def __post_init__(self) -> None:
        require(1 <= self.audio_decoders <= 64, "speech.audio_decoders", self.audio_decoders,
               "in 1..64")  # fmt: skip
        for name in ("max_audio_file_bytes", "max_audio_seconds", "audio_decode_seconds"):
            value = getattr(self, name)
            require(value is None or value > 0, f"speech.{name}", value, "above 0")


@dataclass(frozen=True, kw_only=True)
class MultiModalConfig:
    """Images and other media of prompts: where files may come from, and what is kept of them."""

    mm_processor_kwargs: Mapping[str, Any] = option(
        {},
        "JSON: options of the model's media processor ({\"max_pixels\": 1003520}); a request's own win.",
    )
    media_io_kwargs: Mapping[str, Any] = option(
        {}, "JSON: reading of files, by modality: {\"video\": {\"num_frames\": 32}} (-1: all frames) or "
        "{\"video\": {\"fps\": 2}}, frames taken of a video; {\"image\": {\"rgba_background_color\": [255, "
        "255, 255]}}, what is behind transparent pixels.",
    )  # fmt: skip
    mm_processor_cache_gb: float = option(
        4.0, "GiB of processed media that are kept for requests that bring them again; 0: none.",
        cost="so much memory in each process that takes requests, once so many media have come",
    )  # fmt: skip
    mm_processor_cache_type: Literal["lru", "shm"] = option(
        "lru", "Way of processed media to an engine in a process of its own (engine_process, "
        "api_server_count): lru: with each request; shm: through a ring in shared memory of "
        "mm_processor_cache_gb, once as long as they stay there.",
        cost="shm: mm_processor_cache_gb again for each process that takes requests",
    )  # fmt: skip
    mm_shm_cache_max_object_size_mb: int = option(
        128, "MiB of the largest item that goes through shared memory; only for shm."
    )
    mm_encoder_attn_backend: str | None = option(
        None, "Attention backend of towers for media: varlen, sdpa, a plug-in's. Default: attention_backend "
        "if it serves them, else the first that does.",
    )  # fmt: skip
    mm_encoder_tp_mode: Literal["weights", "data"] = option(
        "weights", "Division of towers over the ranks of tensor_parallel_size: their weights, or the items "
        "(data, with whole weights on each). The same with one rank; more are not built yet.",
    )  # fmt: skip
    interleave_mm_strings: bool = option(
        True, "Media stand where a message brings them, too, for chat templates that take a message as one "
        "text; off: in front of its text.",
    )  # fmt: skip
    skip_mm_profiling: bool = option(
        False, "Measure memory without media; what towers take must be left free by other settings.",
        cost="a large image may find no memory",
    )  # fmt: skip
    video_pruning_rate: float | None = option(
        None, "Share of a video's tokens that is dropped, 0 to below 1: those most like the frame before "
        "(Efficient Video Sampling). Qwen2-VL, Qwen2.5-VL and Qwen3-VL.",
        cost="answers may miss what changes little",
    )  # fmt: skip
    encoder_cache_size: int | None = option(
        None, "Vectors of encoded media that the worker keeps; 0: none. Default: max_num_batched_tokens.",
        human_int=True, cost="hidden size x bytes of the dtype each",
    )  # fmt: skip
    ec_transfer_config: Mapping[str, Any] = option(
        {}, "JSON: a disaggregated encoder: {\"ec_connector\": \"files\", \"ec_role\": \"ec_producer\", "
        "\"ec_connector_extra_config\": {\"shared_storage_path\": \"/dev/shm/vectors\"}}: this engine only "
        "encodes media, and offers their vectors; ec_consumer: it takes them. Default: neither.",
    )  # fmt: skip
    allowed_media_domains: tuple[str, ...] = option(
        (), "Hosts that URLs of media may name, and no others. Default: any with a public address."
    )
    allow_private_media: bool = option(
        False, "Let URLs of media lead to addresses that are not public.",
        cost="clients reach what this machine reaches: services of the network, metadata of clouds",
    )  # fmt: skip
    allowed_local_media_path: str | None = option(
        None, "Folder whose files file: URLs may name. Default: file: URLs are refused.",
        cost="clients can read everything below it that is an image or a recording",
    )  # fmt: skip
    image_decoders: int = option(
        2, "Processes that decode images.", cost="about 40 MB each, plus the image"
    )
    max_image_file_bytes: int = option(64 << 20, "Longest image file.", human_int=True)
    max_image_pixels: int = option(
        180_000_000,
        "Most pixels of an image.",
        human_int=True,
        cost="3 bytes each while it is read",
    )
    video_decoders: int = option(
        1, "Processes that decode videos.", cost="about 60 MB each, plus the sampled frames"
    )
    max_video_file_bytes: int = option(256 << 20, "Longest video file.", human_int=True)
    max_video_seconds: float = option(3600.0, "Longest video, whatever is sampled of it.")
    max_video_frames: int = option(768, "Most frames that are taken of a video.", human_int=True)
    max_video_pixels: int = option(
        500_000_000,
        "Most pixels of the frames that are taken of a video, together.",
        human_int=True,
        cost="6 bytes each while they are read",
    )
    video_decode_seconds: float = option(
        60.0, "Seconds to decode one video; then its process is killed."
    )

    @property
    def only_encodes(self) -> bool:
        """True if the engine encodes media for others, and generates nothing."""
        return self.ec_transfer_config.get("ec_role") == PRODUCER

    def __post_init__(self) -> None:
        check_media_io(self.media_io_kwargs)
        object.__setattr__(self, "ec_transfer_config", check_ec_transfer(self.ec_transfer_config))
        self._check_cache()
        require_choice(
            "multimodal.mm_encoder_tp_mode", self.mm_encoder_tp_mode, ("weights", "data")
        )
        rate = self.video_pruning_rate
        require(rate is None or 0 <= rate < 1, "multimodal.video_pruning_rate", rate,
               "from 0 to below 1")  # fmt: skip
        size = self.encoder_cache_size
        require(size is None or size >= 0, "multimodal.encoder_cache_size", size, "at least 0")
        require(1 <= self.image_decoders <= 64, "multimodal.image_decoders", self.image_decoders,
               "in 1..64")  # fmt: skip
        require(1 <= self.video_decoders <= 64, "multimodal.video_decoders", self.video_decoders,
               "in 1..64")  # fmt: skip
        for name in ("max_image_file_bytes", "max_image_pixels", "max_video_file_bytes",
                     "max_video_seconds", "max_video_frames", "max_video_pixels",
                     "video_decode_seconds"):  # fmt: skip
            require(getattr(self, name) > 0, f"multimodal.{name}", getattr(self, name), "above 0")
        hosts: object = self.allowed_media_domains
        if isinstance(hosts, str):
            object.__setattr__(self, "allowed_media_domains", (hosts,))

    def _check_cache(self) -> None:
        size, largest = self.mm_processor_cache_gb, self.mm_shm_cache_max_object_size_mb
        require(
            0 <= size < math.inf, "multimodal.mm_processor_cache_gb", size, "at least 0, and finite"
        )
        require_choice("multimodal.mm_processor_cache_type", self.mm_processor_cache_type,
                       ("lru", "shm"))  # fmt: skip
        require(
            1 <= largest < 4096, "multimodal.mm_shm_cache_max_object_size_mb", largest, "in 1..4095"
        )
        require(
            self.mm_processor_cache_type == "lru" or size * 1024 >= largest,
            "multimodal.mm_processor_cache_gb",
            size,
            f"at least {largest / 1024} for shm (mm_shm_cache_max_object_size_mb = {largest})",
        )


@dataclass(frozen=True, kw_only=True)
class KVEventsConfig:
    """Events of the prefix cache, for routers: the blocks that can be found, as they come and go."""

    enable_kv_cache_events: bool = option(
        False, "Publish the blocks that become findable and those that cease to be.",
        cost="their token ids are readable for whoever reaches the address",
    )  # fmt: skip
    publisher: str | None = option(None, "zmq or null (nobody). Default: zmq, if events are on.")
    endpoint: str = option(
        "tcp://127.0.0.1:5557", "Address at which they are published: bound if it is loopback, holds * or "
        "begins with ipc:// or inproc://, else connected. Port *: any free one.",
    )  # fmt: skip
    replay_endpoint: str | None = option(
        None, "Address at which past ones can be asked for. Default: none."
    )
    buffer_steps: int = option(10000, "Steps whose events can be asked for.")
    hwm: int = option(100000, "Messages that wait for one slow reader; more are dropped.")
    max_queue_size: int = option(100000, "Steps whose events wait to be sent; more are dropped.")
    topic: str = option("", "Topic under which they are published.")

    def __post_init__(self) -> None:
        if self.publisher is not None:
            require_choice("kv_events_config.publisher", self.publisher, ("zmq", "null"))
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            value = getattr(self, name)
            require(value >= 1, f"kv_events_config.{name}", value, "at least 1")
        for name in ("endpoint", "replay_endpoint"):
            value = getattr(self, name)
            known = value is None or value.startswith(("tcp://", "ipc://", "inproc://"))
            require(known, f"kv_events_config.{name}", value,
                   "an address that begins with tcp://, ipc:// or inproc://")  # fmt: skip


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
    multimodal: MultiModalConfig = field(default_factory=MultiModalConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    kv_events: KVEventsConfig = field(default_factory=KVEventsConfig)
    engine_process: bool = option(
        False, "Run the engine in a separate process, connected by ZeroMQ.",
        cost="one copy and a wake-up per step; isolates the server from the model",
    )  # fmt: skip
    profiler_config: Mapping[str, Any] = option(
        {}, "JSON: settings of POST /start_profile: profiler (torch, cuda), torch_profiler_dir, "
        "delay_iterations, max_iterations and others.",
        cost="steps are slower and the trace grows during a recording",
    )  # fmt: skip

    def __post_init__(self) -> None:
        _ = self.profiler  # checked before anything is loaded
        require(
            not self.kv_events.enable_kv_cache_events
            or self.cache.enable_prefix_caching is not False,
            "kv_events_config.enable_kv_cache_events", True,
            "False where prefixes are not cached (enable_prefix_caching = False)",
        )  # fmt: skip
        require(
            not (self.lora.enable_tower_connector_lora and self.multimodal.ec_transfer_config),
            "lora.enable_tower_connector_lora", True,
            "False together with multimodal.ec_transfer_config: the other engine makes vectors of media, "
            "and has no adapters",
        )  # fmt: skip
        require(
            not (self.multimodal.only_encodes and self.cache.kv_transfer_config),
            "cache.kv_transfer_config", dict(self.cache.kv_transfer_config),
            f"left out with multimodal.ec_transfer_config.ec_role = {PRODUCER!r}: such an engine caches "
            "nothing",
        )  # fmt: skip

    @property
    def profiler(self) -> ProfilerConfig:
        """:attr:`profiler_config`, checked.

        Raises:
            ConfigError: a field is unknown or its value wrong.
        """
        known = {field.name for field in dataclasses.fields(ProfilerConfig)}
        for name, value in self.profiler_config.items():
            require(name in known, f"profiler_config.{name}", value,
                   f"left out: unknown field; fields are {', '.join(sorted(known))}")  # fmt: skip
        return ProfilerConfig(**self.profiler_config)
