"""One request of the task ``plugin``: from a caller's data through an IO processor to its output."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from headrace_core.engine import AdmissionTicket, Encode
from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_core.pooling import PoolingParams
from headrace_core.pooling.io_processor import IOProcessor, ModelOutput
from headrace_core.request import ChatPrompt, Prompt
from headrace_core.served_model import ServedModel

AT_ONCE = 64
"""Prompts of one request that run side by side."""


def plugin_params(
    processor: IOProcessor, model: ServedModel, params: PoolingParams | None
) -> tuple[PoolingParams, str]:
    """Pooling parameters and task with which the prompts of one request run.

    Raises:
        RequestError: from the processor, or the model has no task of its own.
    """
    given = params.clone() if params is not None else None
    if given is not None and given.task == "plugin":
        given.task = None
    chosen = processor.validate_or_generate_params(given).clone()
    if not model.reads_extra_kwargs:  # the processor has read them
        chosen.extra_kwargs = None
    if chosen.skip_reading_prefix_cache is None:
        chosen.skip_reading_prefix_cache = True
    task = chosen.task
    if task in (None, "plugin"):
        task = next((t for t in model.tasks if t not in ("plugin", "score")), None)
        chosen.task = None
    if task is None:
        raise UnsupportedFeature(f"task plugin: {model.architecture} pools nothing", param="task")
    return chosen, task


def as_prompts(made: Any) -> list[Prompt]:
    """Result of :meth:`IOProcessor.pre_process` as a list.

    Raises:
        RequestError: there is no prompt.
    """
    single = isinstance(made, (str, Mapping, ChatPrompt)) or (
        isinstance(made, Sequence) and bool(made) and isinstance(made[0], int)
    )
    prompts = [made] if single else list(made)
    if not prompts:
        raise RequestError("data: the IO processor made no prompt of it", param="data")
    return prompts


async def answer(
    processor: IOProcessor | None,
    encode: Encode,
    model: ServedModel,
    prompt: Any,
    params: PoolingParams | None,
    request_id: str,
    *,
    priority: int = 0,
    add_special_tokens: bool | None = None,
) -> Any:
    """One request of the task ``plugin``, once it is parsed: the plug-in's output.

    Args:
        processor: the engine's; None: it has none.
        encode: runs prompts.
        model: says what it pools.
        prompt: from :meth:`IOProcessor.parse_request`.
        params: the caller's; None: the plug-in's own.
        add_special_tokens: see :meth:`~headrace_core.engine.EngineClient.encode`.

    Raises:
        UnsupportedFeature: the engine has no IO processor.
        HeadraceError: as :meth:`~headrace_core.engine.EngineClient.encode`; else whatever the plug-in
            raises.
    """
    if processor is None:
        raise UnsupportedFeature(
            "task plugin: the engine has no IO processor; it must be started with "
            "--io-processor-plugin",
            param="task",
        )
    prompts = as_prompts(await processor.pre_process_async(prompt, request_id))
    chosen, task = plugin_params(processor, model, params)
    gate, entry = asyncio.Semaphore(AT_ONCE), AdmissionTicket()

    async def run(index: int) -> tuple[int, ModelOutput]:
        async with gate:
            own_id = f"{request_id}-{index}"
            return index, await encode(
                prompts[index],
                chosen,
                own_id,
                task=task,
                priority=priority,
                add_special_tokens=add_special_tokens,
                entry=entry,
            )

    runs = [asyncio.create_task(run(index)) for index in range(len(prompts))]

    async def ready() -> AsyncIterator[tuple[int, ModelOutput]]:
        for done in asyncio.as_completed(runs):
            yield await done

    try:
        return await processor.post_process_async(ready(), request_id)
    finally:
        for running in runs:
            running.cancel()
        await asyncio.gather(*runs, return_exceptions=True)
