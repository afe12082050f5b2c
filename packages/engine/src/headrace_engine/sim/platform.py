"""``--device sim``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace_core.errors import ConfigError, UnsupportedFeature
from headrace_core.model import ModelInfo
from headrace_core.platform import CpuPlatform
from headrace_core.sampling.params import SamplingParams
from headrace_engine.config import EngineConfig
from headrace_engine.sim.worker import SimWorker

WITHOUT_EFFECT: Mapping[str, Any] = {
    "model.quantization": None,
    "attention.backend": None,
    "device.num_threads": 0,
    "device.cpu_bind": "none",
    "device.kernels": {},
    "cache.kv_cache_dtype": "auto",
    "cache.calculate_kv_scales": False,
    "graph.enforce_eager": False,
    "graph.cudagraph_capture_sizes": (),
    "graph.max_cudagraph_capture_size": None,
    "load.load_format": "auto",
    "model.logits_processors": (),
    "model.enable_prompt_embeds": False,
    "lora.enable_lora": False,
}
"""Settings about computing -> their defaults: they must be left alone."""


@dataclass(frozen=True, slots=True)
class SimPlatform:
    """A device that computes nothing. Limits and memory are a CPU's.

    A :class:`headrace_core.platform.Platform` and a :class:`headrace_core.platform.BringsWorker`.
    """

    device: str = "cpu"
    """The dtype that its one, tiny cache is planned as."""
    attention_order: Sequence[str] = ()
    default_block_size: int = 16
    default_max_num_seqs: int = 256
    default_max_num_batched_tokens: int = 8192
    default_max_num_shared_tokens: int = 8192

    def dtype_for(self, checkpoint_dtype: str) -> str:
        """The dtype as stored; nothing is computed in it."""
        return checkpoint_dtype

    def available_memory(self) -> int:
        """The host's."""
        return CpuPlatform().available_memory()

    def check_params(self, params: SamplingParams) -> None:
        """See :class:`headrace_core.platform.BringsWorker`."""
        for name, reason in (
            ("structured_outputs", "has no probabilities to mask"),
            ("thinking_token_budget", "does not reason"),
        ):
            if getattr(params, name) is not None:
                raise UnsupportedFeature(f"{name}: device 'sim' {reason}", param=name)

    def make_worker(self, config: EngineConfig, info: ModelInfo) -> SimWorker:
        """See :class:`headrace_core.platform.BringsWorker`."""
        for name, default in WITHOUT_EFFECT.items():
            section, _, field = name.partition(".")
            value = getattr(getattr(config, section), field)
            if value != default:
                raise ConfigError(
                    f"{name} = {value!r}: must be left at {default!r} on device 'sim', which "
                    "computes nothing",
                    field=name,
                )
        if info.runner != "generate":
            raise ConfigError(
                f"device.device = 'sim': must be another device for {info.architecture}, which pools "
                f"(runner {info.runner}); the simulated one writes tokens only",
                field="device.device",
            )
        assert config.cache.block_size is not None
        assert config.scheduler.max_num_batched_tokens is not None
        return SimWorker(
            vocab_size=info.vocab_size,
            eos_token_ids=info.eos_token_ids,
            block_size=config.cache.block_size,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            available_memory=self.available_memory(),
            seed=config.model.seed,
            step_seconds=config.sim.step_ms / 1e3,
            token_seconds=config.sim.token_us / 1e6,
        )
