"""Prefill context parallelism: what it asks of settings and of a model, and a model that is set up for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace_core.errors import ConfigError
from headrace_core.model import SupportsRecurrence
from headrace_engine.speculation.config import BY_MODEL

if TYPE_CHECKING:
    from headrace.assembly.parallel.ranks import Ranks
    from headrace_attention.prefill_context import DividedPass
    from headrace_core.attention import AttentionBackend, AttentionNeed
    from headrace_core.model import CausalLM, ModelInfo
    from headrace_core.ops import OpTable
    from headrace_engine.config import EngineConfig

FIELD = "parallel.prefill_context_parallel_size"


def check_prefill_context(config: EngineConfig, info: ModelInfo) -> None:
    """Refuse settings and models that do not go with prefill context parallelism.

    Raises:
        ConfigError: naming the setting.
    """
    parts = config.parallel.prefill_context_parallel_size
    if parts == 1:
        return
    speculative = config.speculative
    guesses = speculative.method in BY_MODEL or speculative.model is not None
    for refused, why in (
        (info.runner != "generate", "a model that pools: only models that generate divide prompts"),
        (info.source != "native", "code of transformers (--model-impl transformers)"),
        (config.lora.enable_lora, "lora.enable_lora = True"),
        (guesses, "a speculative_config with a model or heads (ngram and suffix work)"),
    ):
        if refused:
            raise ConfigError(f"{FIELD} = {parts}: must be 1 with {why}", field=FIELD)


def dividing(
    ops: OpTable, ranks: Ranks | None
) -> Callable[[AttentionNeed, AttentionBackend], AttentionBackend]:
    """Gives a layer the backend that completes its cache in divided steps, in place of the one that was
    chosen for it; that one itself, where no prompts are divided."""
    if ranks is None or not ranks.divide_prompts:
        return lambda need, backend: backend
    from headrace_attention.prefill_context import DividingChooser

    return DividingChooser(ops, ranks.num_parts)


def divided_pass(ranks: Ranks, block_size: int | None) -> DividedPass | None:
    """Divides the passes of this rank's model, always the same one; None: no prompts are divided."""
    if not ranks.divide_prompts:
        return None
    if ranks.divided is None:
        from headrace_attention.prefill_context import DividedPass

        assert block_size is not None
        ranks.divided = DividedPass(ranks.prompt_group, ranks.num_parts, block_size)
    return ranks.divided


def check_tokens_only(model: CausalLM) -> None:
    """Refuse a model whose tokens see each other elsewhere than in attention: before weights are read.

    Raises:
        ConfigError: a layer keeps a state, which a piece of a prompt would have to get from the one before.
    """
    if isinstance(model, SupportsRecurrence) and model.state_layers():
        name = next(iter(model.state_layers()))
        raise ConfigError(
            f"{FIELD}: must be 1 for this model: layer {name!r} keeps a state, which a rank's part of a "
            "prompt would have to wait for",
            field=FIELD,
        )


def divide_passes(model: CausalLM, divided: DividedPass) -> None:
    """Have each rank compute its tokens of the model's passes from now on; all ranks are loading."""
    divided.join()  # later there is no place where they could
    changed: Any = model
    changed.forward = partial(divided.run, model.forward)
