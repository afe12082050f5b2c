"""IO processors: requests' data of any kind -> prompts; pooled results -> answers of any kind.

A plug-in of ``headrace.io_processors`` is a subclass of :class:`IOProcessor`, or a function without
arguments that returns the qualified name of one (``package.module.Class``). An engine has one at most,
by ``--io-processor-plugin`` or by the field ``io_processor_plugin`` of ``config.json``. It is entered
with the task ``plugin``; headrace checks nothing between it and the caller.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace_core.output import PoolingOutput, PoolingRequestOutput
from headrace_core.pooling import PoolingParams
from headrace_core.served_model import ServedModel

if TYPE_CHECKING:
    from headrace_core.config import PluginSettings

GROUP = "headrace.io_processors"
"""Entry-point group; one is in use at most."""

ModelOutput = PoolingRequestOutput[PoolingOutput]
"""``outputs.data`` is a :class:`~headrace_core.arrays.PackedArray`, offline too."""


@dataclass(frozen=True, slots=True)
class IOProcessorResponse:
    """An answer over HTTP."""

    data: Any
    """Any value that JSON can hold."""
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

    def __init__(self, config: PluginSettings, model: ServedModel) -> None:
        self.config = config
        self.model = model

    @abstractmethod
    def parse_request(self, request: Any) -> Any:
        """Input of :meth:`pre_process`, made from the caller's input: offline the prompt, over HTTP the
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
        """Pooling parameters of the prompts; raises if the caller's parameters are not supported.

        The task that it names is what the prompts run for; with none, or ``plugin``, it is the first
        of the model's own. Who overrides it may read ``extra_kwargs``; here they are refused unless
        the model's pooler may.
        """
        if params is None:
            return PoolingParams()
        self.model.check_extra_kwargs(params)
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
