"""A model in this process, for the terminal: streams text as it comes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, TypeVar

from headrace.assembly import connect
from headrace.cli.conversation import AnswerReport
from headrace.engine_args import EngineArgs
from headrace_core.output import RequestOutput
from headrace_core.request import ChatPrompt, Prompt
from headrace_core.sampling.params import RequestOutputKind, SamplingParams

Result = TypeVar("Result")


class LocalModel:
    """An engine with an event loop of its own, driven from a thread without one."""

    def __init__(self, args: EngineArgs) -> None:
        self._engine = connect(args.create_engine_config())
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._count = 0

    @property
    def name(self) -> str:
        """The model's served name."""
        return self._engine.model.name

    @property
    def context(self) -> int:
        """Tokens that the model's context holds."""
        return self._engine.model.max_model_len

    @property
    def place(self) -> str:
        """The place where the model runs, for the user."""
        device = self._engine.settings["device"]["device"]
        return f"{self._engine.model.dtype} on {device}, in this process"

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        report: AnswerReport | None = None,
        **options: Any,
    ) -> Iterator[str]:
        """Stream the answer's text; options are fields of SamplingParams or template keywords.

        Raises:
            PromptTooLong: the messages do not fit into the context.
            RequestError: the options cannot be honoured.
        """
        template = options.pop("chat_template_kwargs", {})
        prompt = ChatPrompt(messages=messages, chat_template_kwargs=template)
        return self._stream(prompt, {"max_tokens": None, **options}, report or AnswerReport())

    def complete(self, prompt: str, **options: Any) -> Iterator[str]:
        """Stream the completion's text; options are fields of SamplingParams."""
        return self._stream(prompt, options, AnswerReport())

    def close(self) -> None:
        """Stop the engine and free everything."""
        self._run(self._engine.shutdown())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _stream(
        self, prompt: Prompt, options: Mapping[str, Any], report: AnswerReport
    ) -> Iterator[str]:
        values = {**self._engine.model.default_sampling_params, **options}
        params = SamplingParams(**values, output_kind=RequestOutputKind.DELTA)
        self._count += 1
        outputs = self._engine.generate(prompt, params, f"terminal-{self._count}")
        pieces: SimpleQueue[str | BaseException | None] = SimpleQueue()
        task = asyncio.run_coroutine_threadsafe(_pump(outputs, pieces, report), self._loop)
        try:
            while (piece := pieces.get()) is not None:
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
        finally:
            task.cancel()

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def _pump(
    outputs: AsyncIterator[RequestOutput],
    pieces: SimpleQueue[str | BaseException | None],
    report: AnswerReport,
) -> None:
    num_generated = 0
    try:
        async for output in outputs:
            num_generated += len(output.outputs[0].token_ids)
            report.num_tokens = len(output.prompt_token_ids) + num_generated
            report.finish_reason = output.outputs[0].finish_reason
            pieces.put(output.outputs[0].text)
        pieces.put(None)
    except asyncio.CancelledError:
        pieces.put(None)
        raise
    except BaseException as error:
        pieces.put(error)
