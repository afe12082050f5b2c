"""The environment variables that headrace reads, those of its CPU settings, and a warning of others.

A variable with headrace's prefix that nobody reads is a setting that the user believes in: it is named at
start, with the nearest one that is read.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import math
import os
from collections.abc import Iterator, Mapping

from headrace_core.errors import ConfigError
from headrace_core.platform import BringsWorker, Platform
from headrace_engine.config import CacheConfig, DeviceConfig, EngineConfig

logger = logging.getLogger(__name__)

PREFIX, VLLM_PREFIX = "HEADRACE_", "VLLM_"
KV_SPACE = "HEADRACE_CPU_KVCACHE_SPACE"
THREADS_BIND = "HEADRACE_CPU_OMP_THREADS_BIND"
FETCH_TIMEOUTS: Mapping[str, str] = {
    "image": "HEADRACE_IMAGE_FETCH_TIMEOUT",
    "video": "HEADRACE_VIDEO_FETCH_TIMEOUT",
    "audio": "HEADRACE_AUDIO_FETCH_TIMEOUT",
}
"""Modality -> variable that says seconds of a transfer."""
REDIRECTS = "HEADRACE_MEDIA_URL_ALLOW_REDIRECTS"

VARIABLES: Mapping[str, str] = {
    "HEADRACE_ADMIN_API_KEY": "key of the control routes",
    "HEADRACE_ALLOW_LONG_MAX_MODEL_LEN": "1: a max_model_len above the model's own is a warning",
    "HEADRACE_ALLOW_RUNTIME_LORA_UPDATING": "1: adapters may be loaded and unloaded while the server runs",
    "HEADRACE_API_KEY": "key that clients must send",
    "HEADRACE_BATCH_INVARIANT": "1: results must not depend on the batch; on a CPU they never do with "
    "headrace's kernels, on a GPU other kernels are used",
    "HEADRACE_CACHE_ROOT": "folder of what headrace keeps between starts; empty: nothing is kept",
    "HEADRACE_CONFIGURE_LOGGING": "0: headrace does not configure logging",
    "HEADRACE_CPU_ISA": "instruction set of the CPU kernels",
    KV_SPACE: "GiB of the KV cache on a CPU, if no flag sets its size",
    THREADS_BIND: "cores of the CPU threads, if --cpu-bind is not set",
    "HEADRACE_CUDART_SO_PATH": "path of CUDA's run time, for custom all-reduce; unset: torch's",
    "HEADRACE_DEBUG_LOG_API_SERVER_RESPONSE": "1: log the bodies of all answers",
    "HEADRACE_ENABLE_RESPONSES_API_STORE": "1: keep responses, for GET",
    "HEADRACE_FAILPOINTS": "faults to raise, for tests",
    "HEADRACE_HARDENED": "1: the hardened profile",
    "HEADRACE_HTTP_TIMEOUT_KEEP_ALIVE": "seconds until an idle connection is closed",
    "HEADRACE_KEEP_ALIVE_ON_ENGINE_DEATH": "1: a server whose engine died keeps running and answers 503",
    "HEADRACE_LOGGING_COLOR": "auto, 1 or 0",
    "HEADRACE_LOGGING_CONFIG_PATH": "JSON file for logging.config.dictConfig",
    "HEADRACE_LOGGING_FORMAT": "text or json",
    "HEADRACE_LOGGING_LEVEL": "DEBUG, INFO, WARNING, ERROR or CRITICAL",
    "HEADRACE_LOGGING_STREAM": "stderr or stdout",
    **{name: f"seconds to fetch a file of {what}" for what, name in FETCH_TIMEOUTS.items()},
    REDIRECTS: "0: URLs of media may not redirect",
    "HEADRACE_LORA_RESOLVER_CACHE_DIR": "folder in which unknown adapters are looked for",
    "HEADRACE_LORA_RESOLVER_HF_REPO_LIST": "hub repositories in which unknown adapters are looked for",
    "HEADRACE_MAX_AUDIO_CLIP_FILESIZE_MB": "longest audio file, in MiB",
    "HEADRACE_NCCL_SO_PATH": "path of libnccl.so.2 for communicator 'pynccl'; unset: torch's",
    "HEADRACE_NODE_SECRET": "secret that the hosts of one engine prove to each other to know (--nnodes)",
    "HEADRACE_PP_LAYER_PARTITION": "numbers of layers by stage of --pipeline-parallel-size, as 10,14; "
    "without it they follow the layers' memory",
    "HEADRACE_OBJECT_STORAGE_SHM_BUFFER_NAME": "name of the memory of --mm-processor-cache-type shm in "
    "/proc/PID/maps; unset: headrace-objects",
    "HEADRACE_PLUGINS": "names of the general plug-ins to run, separated by commas; unset: all",
    "HEADRACE_SERVER_API_KEY": "key that `headrace route` sends to its servers",
    "HEADRACE_SERVER_DEV_MODE": "1: the routes of --dev-mode",
    "HEADRACE_USE_MODELSCOPE": "1 is refused: downloads from ModelScope are not supported",
}
"""Every variable with headrace's prefix that is read -> what it does."""
_OF_TESTS = frozenset(
    PREFIX + name
    for name in (
        "DISCARD", "DISCONNECTS", "ENDURANCE", "FUZZ", "KILLS", "MUTANTS", "TESTS", "TEST_SEED",
        "TEST_SPLITS", "TORCH", "TORCH_INDEX", "TRITON",
    )
)  # fmt: skip
"""Variables of the project's own builds and tests, which start headrace."""

_warned: set[str] = set()


def unread(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Variables that look like headrace's and are not read, each with what would help."""
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in VARIABLES and name not in _OF_TESTS:
            near = difflib.get_close_matches(name, VARIABLES, n=1, cutoff=0.8)
            yield name, f"; did you mean {near[0]}?" if near else ""
        elif name.startswith(VLLM_PREFIX):
            own = PREFIX + name.removeprefix(VLLM_PREFIX)
            if own in VARIABLES and own not in environ:
                yield name, f"; headrace's own is {own}"


def warn_of_unread(environ: Mapping[str, str] = os.environ) -> None:
    """Log a warning for each variable of :func:`unread`, once in a process."""
    for name, hint in unread(environ):
        if name not in _warned:
            _warned.add(name)
            logger.warning("environment variable %s is not read%s", name, hint)


def leave_warnings_to_another() -> None:
    """Log no warnings here: another process of the server has the same environment and warns of it."""
    logger.setLevel(logging.ERROR)


def with_cpu_variables(
    config: EngineConfig, platform: Platform, environ: Mapping[str, str] = os.environ
) -> EngineConfig:
    """The configuration with :data:`KV_SPACE` and :data:`THREADS_BIND`, where the engine runs on a CPU and
    no setting of the user's says the same.

    Raises:
        ConfigError: a variable's value cannot be used.
    """
    space, bind = environ.get(KV_SPACE, ""), environ.get(THREADS_BIND, "")
    if platform.device != "cpu" or isinstance(platform, BringsWorker):
        return config
    cache, device = config.cache, config.device
    sized = (cache.kv_cache_memory_bytes, cache.num_gpu_blocks_override)
    if space and sized == (None, None):
        cache = _with_space(cache, space, platform.available_memory())
    if bind and device.cpu_bind == "none":
        device = _with_cores(device, bind)
    return dataclasses.replace(config, cache=cache, device=device)


def _with_space(cache: CacheConfig, text: str, free: int) -> CacheConfig:
    """The settings with a cache of so many GiB, of which ``free`` bytes are there.

    What the model leaves of them is checked with it, by the name of the flag; a variable that asks for more
    than there is at all is named here.
    """
    try:
        gib = float(text)
    except ValueError:
        gib = math.nan
    if not (0 <= gib < math.inf):
        raise ConfigError(
            f"{KV_SPACE} = {text!r}: must be GiB, a number of at least 0", field=KV_SPACE
        )
    if gib == 0:  # as if it were not set
        return cache
    size = max(1, int(gib * (1 << 30)))
    if size > free:
        raise ConfigError(
            f"{KV_SPACE} = {text!r}: must be GiB, at most the {free / (1 << 30):.2f} that are free",
            field=KV_SPACE,
        )
    return dataclasses.replace(cache, kv_cache_memory_bytes=size)


def _with_cores(device: DeviceConfig, text: str) -> DeviceConfig:
    bind = {"nobind": "none", "all": "none"}.get(text, text)
    accepted = "auto, nobind, all (the same), or a list of cores such as '0-3,8'"
    if "|" in text:
        raise ConfigError(
            f"{THREADS_BIND} = {text!r}: a list for each rank; write one list of all cores, which the ranks "
            f"divide in order: must be {accepted}",
            field=THREADS_BIND,
        )
    try:
        return dataclasses.replace(device, cpu_bind=bind)
    except ConfigError as error:
        raise ConfigError(
            f"{THREADS_BIND} = {text!r}: must be {accepted}", field=THREADS_BIND
        ) from error
