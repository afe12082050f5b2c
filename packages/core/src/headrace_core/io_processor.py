"""IO processors: requests' data of any kind -> prompts; pooled results -> answers of any kind.

A plug-in of ``headrace.io_processors`` is a subclass of :class:`IOProcessor`, or a function without
arguments that returns the qualified name of one (``package.module.Class``). An engine has one at most,
by ``--io-processor-plugin`` or by the field ``io_processor_plugin`` of ``config.json``. It is entered
with the task ``plugin``; headrace checks nothing between it and the caller.
"""

from __future__ import annotations

import asyncio
import importlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace_core import plugins
from headrace_core.call_entry import CallEntry
from headrace_core.errors import PluginLoadError, RequestError, UnsupportedFeature
from headrace_core.output import PoolingOutput, PoolingRequestOutput
from headrace_core.pooling import PoolingParams, check_extra_kwargs
from headrace_core.request import ChatPrompt, Prompt

if TYPE_CHECKING:
    from headrace_core.config import EngineConfig
    from headrace_core.engine import EngineClient, ServedModel

GROUP = "headrace.io_processors"
AT_ONCE = 64
"""Prompts of one request that run side by side."""

ModelOutput = PoolingRequestOutput[PoolingOutput]
"""``outputs.data`` is a :class:`~headrace_core.packed.PackedArray`, offline too."""


@dataclass(frozen=True, slots=True)
class IOProcessorResponse:
    """An answer over HTTP."""

    data: Any
    """What JSON can hold."""
    request_id: str | None = None
    """None: the request's own."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the answer."""


class IOProcessor(ABC):
    """Stands between a pooling model and its callers. One object per engine; called from one event
    loop or thread, for many requests at once.

    Args:
        config: resolved.
        model: what is served.
    """

    def __init__(self, config: EngineConfig, model: ServedModel) -> None:
        self.config = config
        self.model = model

    @abstractmethod
    def parse_request(self, request: Any) -> Any:
        """What :meth:`pre_process` takes, from what a caller gave: offline the prompt, over HTTP the
        field ``data``. What it raises is the caller's fault (HTTP 400, with its text)."""

    @abstractmethod
    def pre_process(self, prompt: Any, request_id: str | None = None, **kwargs: Any) -> Any:
        """One :data:`~headrace_core.request.Prompt`, or a list of them."""

    async def pre_process_async(
        self, prompt: Any, request_id: str | None = None, **kwargs: Any
    ) -> Any:
        """The same on an event loop; to be overridden where it takes long."""
        return self.pre_process(prompt, request_id, **kwargs)

    def validate_or_generate_params(self, params: PoolingParams | None = None) -> PoolingParams:
        """How the prompts are pooled; raises if the caller's parameters will not do.

        The task that it names is what the prompts run for; with none, or ``plugin``, it is the first
        of the model's own. Who overrides it may read ``extra_kwargs``; here they are refused unless
        the model's pooler may.
        """
        if params is None:
            return PoolingParams()
        check_extra_kwargs(params, self.model)
        return params

    @abstractmethod
    def post_process(
        self, model_output: Sequence[ModelOutput], request_id: str | None = None, **kwargs: Any
    ) -> Any:
        """The plug-in's output, from one result for each prompt, in order."""

    async def post_process_async(
        self,
        model_output: AsyncIterator[tuple[int, ModelOutput]],
        request_id: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """The same from (index, result) pairs in the order in which they are ready."""
        pairs = [pair async for pair in model_output]
        pairs.sort(key=lambda pair: pair[0])
        return self.post_process([output for _, output in pairs], request_id, **kwargs)

    @abstractmethod
    def output_to_response(self, output: Any) -> IOProcessorResponse:
        """The plug-in's output as an answer over HTTP."""


def load_io_processor(name: str) -> type[IOProcessor]:
    """The class of an installed IO processor.

    Raises:
        PluginNotFound: lists those that are installed.
        PluginLoadError: it cannot be imported, or is no IO processor.
    """
    found = plugins.load(GROUP, name)
    if not isinstance(found, type) and callable(found):
        found = _by_name(name, found())
    if not (isinstance(found, type) and issubclass(found, IOProcessor)):
        raise PluginLoadError(
            f"plug-in {name!r} of group {GROUP!r} is {found!r:.100}: must be a subclass of "
            "headrace_core.io_processor.IOProcessor, or a function returning the name of one"
        )
    return found


def _by_name(name: str, target: object) -> Any:
    module, _, attribute = str(target).replace(":", ".").rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise PluginLoadError(
            f"plug-in {name!r} of group {GROUP!r} names {target!r}, which cannot be imported: "
            f"{error}"
        ) from error


def plugin_params(
    processor: IOProcessor, model: ServedModel, params: PoolingParams | None
) -> tuple[PoolingParams, str]:
    """What the prompts of one request are run with, and for which task.

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
    """What :meth:`IOProcessor.pre_process` returned, as a list.

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
    engine: EngineClient,
    prompt: Any,
    params: PoolingParams | None,
    request_id: str,
    *,
    priority: int = 0,
    add_special_tokens: bool | None = None,
) -> Any:
    """One request of the task ``plugin``, once it is parsed: the plug-in's output.

    Args:
        engine: with an IO processor.
        prompt: from :meth:`IOProcessor.parse_request`.
        params: the caller's; None: the plug-in's own.
        add_special_tokens: see :meth:`~headrace_core.engine.EngineClient.encode`.

    Raises:
        UnsupportedFeature: the engine has no IO processor.
        HeadraceError: as :meth:`~headrace_core.engine.EngineClient.encode`; else whatever the plug-in
            raises.
    """
    processor = engine.io_processor
    if processor is None:
        raise UnsupportedFeature(
            "task plugin: the engine has no IO processor; it must be started with "
            "--io-processor-plugin",
            param="task",
        )
    prompts = as_prompts(await processor.pre_process_async(prompt, request_id))
    chosen, task = plugin_params(processor, engine.model, params)
    gate, entry = asyncio.Semaphore(AT_ONCE), CallEntry()

    async def run(index: int) -> tuple[int, ModelOutput]:
        async with gate:
            own_id = f"{request_id}-{index}"
            return index, await engine.encode(
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
