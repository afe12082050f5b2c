"""Options of features that are not built: each is refused by its feature's name, wherever it is given."""

from __future__ import annotations

from collections.abc import Mapping

UNBUILT: Mapping[str, tuple[str, ...]] = {
    "some settings of LoRA adapters (--enable-lora needs none of them)": (
        "lora_extra_vocab_size", "lora_config", "lora_target_modules",
    ),
    "speculative decoding by flags of its own (write --speculative-config)": (
        "speculative_model", "num_speculative_tokens",
    ),
    "engines of one server on several hosts (start a server on each, and headrace route in front)": (
        "data_parallel_address", "data_parallel_rpc_port", "data_parallel_backend",
    ),
    "choosing how ranks add up by a flag of its own (write --communicator)": (
        "disable_custom_all_reduce",
    ),
    "workers of another class (write --worker-extension-cls for methods of your own)": ("worker_cls",),
    "settings of how ranks are started": (
        "max_parallel_loading_workers", "ray_workers_use_nsight",
    ),
    "offloading of the KV cache by flags of its own (write --kv-transfer-config)": (
        "kv_offloading_size", "kv_offloading_backend",
    ),
    "leaving out all towers by one flag": ("language_model_only",),
    "offloading weights to the CPU": ("cpu_offload_gb", "swap_space"),
    "compilation by torch": ("compilation_config",),
}  # fmt: skip
"""Feature -> options of vLLM's that only it would read, as they are spelled in Python."""

SHORT: Mapping[str, str] = {
    "-dpa": "data_parallel_address", "-dpp": "data_parallel_rpc_port",
    "-dpb": "data_parallel_backend",
    "-cc": "compilation_config",
}  # fmt: skip
"""Short forms of some of them, as they are typed."""

_FEATURES = {option: feature for feature, options in UNBUILT.items() for option in options}


def unbuilt(option: str) -> str | None:
    """The text that refuses an option, however it is spelled; None: it is none of these."""
    name = option.partition("=")[0].partition(".")[0]
    name = SHORT.get(name, name.lstrip("-").replace("-", "_"))
    feature = _FEATURES.get(name) or _FEATURES.get(name.removeprefix("no_"))
    if feature is None:
        return None
    return f"{name}: not built yet: {feature}; leave it out"
