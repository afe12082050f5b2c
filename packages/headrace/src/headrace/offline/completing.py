"""Texts that a model completes: ``LLM.generate``, ``chat``, ``enqueue``, ``beam_search``."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.offline.arguments import (
    as_adapters,
    as_conversations,
    as_priorities,
    as_prompts,
    as_sampling_params,
    check_chat_options,
    need,
)
from headrace.offline.engine import EngineMixin
from headrace.progress import counting_bar, prompt_bar
from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_core.lora import LoRARequest
from headrace_core.output import BeamSearchOutput, RequestOutput
from headrace_core.request import ChatPrompt, Prompt, TokensPrompt, brings_media
from headrace_core.sampling.params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from headrace.llm_engine import LLMEngine
    from headrace_engine.offline import OfflineBatch

Message = Mapping[str, Any]


class CheckedArguments(NamedTuple):
    """The checked arguments of a call."""

    prompts: Sequence[Prompt]
    params: list[SamplingParams]
    """One for each prompt."""
    priority: list[int] | None
    lora_requests: list[LoRARequest | None] | None
    """One for each prompt; None: all with the base model."""


class GenerationMixin(EngineMixin):
    """Completes prompts and answers chats."""

    def __init__(self, llm_engine: LLMEngine) -> None:
        super().__init__(llm_engine)
        self._queue_lock = threading.Lock()
        # Guarded by the lock:
        self._enqueued: list[OfflineBatch] = []

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or many; batches as memory allows.

        Args:
            prompts: text, token ids (lists, or arrays of numpy or torch), or the dictionaries of
                :mod:`headrace.inputs`; one or a list.
            sampling_params: None: the model's defaults; one for all; or one per prompt.
            use_tqdm: show a progress bar; or a callable that makes one (tqdm's signature).
            lora_request: the low-rank adapter that prompts are computed with; one, or one for each prompt
                (None: the base model alone). Needs ``enable_lora=True``.
            priority: one per prompt, only under ``scheduling_policy="priority"``.

        Returns:
            One output per prompt, in order.

        Raises:
            RequestError: a prompt or parameter is wrong; nothing is left running.
        """
        given = self._given("LLM.generate", prompts, sampling_params, lora_request, priority)
        return self._run(given, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, through the model's chat template.

        Args:
            lora_request: as :meth:`generate`; one for each conversation.
            mm_processor_kwargs: options of the model's processor of media, for this call; they win over
                the engine's.

        Raises:
            RequestError: as :meth:`generate`; or the template is missing or fails.
        """
        self._check_generates("LLM.chat")
        chats = self._chats(
            messages,
            chat_template=chat_template,
            content_format=_content_format(chat_template_content_format),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs={} if chat_template_kwargs is None else chat_template_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        return self._run(
            CheckedArguments(
                chats,
                self._params(sampling_params, len(chats)),
                None,
                as_adapters(lora_request, len(chats)),
            ),
            use_tqdm,
        )

    def preprocess_chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[TokensPrompt]:
        """The first half of :meth:`chat`: conversations as token prompts.

        Args:
            messages, chat_template, chat_template_content_format, add_generation_prompt,
                continue_final_message, tools, chat_template_kwargs: as :meth:`chat`.
            documents: JSON objects that the template shows.

        Raises:
            RequestError: as :meth:`chat`.
            UnsupportedFeature: a conversation brings media, which tokens cannot hold.
        """
        chats = self._chats(
            messages,
            chat_template=chat_template,
            content_format=_content_format(chat_template_content_format),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs={} if chat_template_kwargs is None else chat_template_kwargs,
            documents=documents,
        )
        prompts: list[TokensPrompt] = []
        for chat in chats:
            if brings_media(chat):
                raise UnsupportedFeature(
                    "messages: must be text only, because the prompt is made of tokens; use chat() for media",
                    param="messages",
                )
            tokens = self.llm_engine.front.input_processor.tokenize(chat, None, False)
            prompts.append(TokensPrompt(prompt_token_ids=tokens.token_ids))
        return prompts

    def _check_generates(self, call: str) -> None:
        from headrace_engine.input_processing.pooling import check_generates

        check_generates(self.engine.model, call)

    def _chats(self, messages: Any, **options: Any) -> list[ChatPrompt]:
        check_chat_options(**options)
        return [ChatPrompt(messages=each, **options) for each in as_conversations(messages)]

    def _given(
        self,
        call: str,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        lora_request: object,
        priority: Sequence[int] | None,
    ) -> CheckedArguments:
        """The arguments of a call that completes prompts, checked."""
        self._check_generates(call)
        every = as_prompts(prompts)
        params = self._params(sampling_params, len(every))
        return CheckedArguments(
            every,
            params,
            as_priorities(priority, len(every)),
            as_adapters(lora_request, len(every)),
        )

    def _run(
        self, given: CheckedArguments, use_tqdm: bool | Callable[..., Any]
    ) -> list[RequestOutput]:
        with prompt_bar(len(given.prompts), use_tqdm) as on_output:
            outputs: list[RequestOutput] = self.engine.run(
                given.prompts,
                given.params,
                priority=given.priority,
                lora_requests=given.lora_requests,
                on_output=on_output,
            )
        return outputs

    def _params(
        self, given: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> list[SamplingParams]:
        if given is None:
            given = self.get_default_sampling_params()
        return as_sampling_params(given, num_prompts)

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[str]:
        """Start prompts and return at once; :meth:`wait_for_completion` returns their outputs.

        The engine computes them meanwhile. A stop string is found only while some call of this object
        waits for outputs; until then such a request runs on, and what is too much is dropped.

        Args:
            prompts, sampling_params, lora_request, priority: as :meth:`generate`.
            use_tqdm: show how many were added; or a callable that makes the bar.

        Returns:
            The request ids, in order.

        Raises:
            RequestError: a prompt or parameter is wrong; none of this call's prompts is left running.
        """
        given = self._given("LLM.enqueue", prompts, sampling_params, lora_request, priority)
        with counting_bar(len(given.prompts), use_tqdm, "Adding requests") as on_added:
            batch = self.engine.start(
                given.prompts,
                given.params,
                priority=given.priority,
                lora_requests=given.lora_requests,
                on_added=on_added,
            )
        with self._queue_lock:
            self._enqueued.append(batch)
        return batch.request_ids

    def wait_for_completion(
        self, *, use_tqdm: bool | Callable[..., Any] = True
    ) -> list[RequestOutput]:
        """Wait for all prompts that were enqueued before, by any thread, and that no other call of
        this method waits for.

        Returns:
            One output per prompt, in the order of the calls of :meth:`enqueue` and of their prompts;
            ``request_id`` is what :meth:`enqueue` returned. [] if there are none.

        Raises:
            EngineDead: the engine stopped, or the object was closed meanwhile.
            RuntimeError: the object was closed before.
            RequestError: ``use_tqdm`` is wrong; the prompts can still be waited for.
            KeyboardInterrupt: everything that was waited for has been aborted.
        """
        self.engine.check_caller()
        with self._queue_lock:
            batches, self._enqueued = self._enqueued, []
        outputs: list[RequestOutput] = []
        total = sum(len(batch.request_ids) for batch in batches)
        with contextlib.ExitStack() as left:
            try:
                on_output = left.enter_context(prompt_bar(total, use_tqdm))
            except BaseException:  # a caller's bar that fails; the next call waits for them
                with self._queue_lock:
                    self._enqueued = [*batches, *self._enqueued]
                raise
            for batch in batches:
                left.callback(batch.close)
            for batch in batches:
                outputs += batch.wait(on_output)
        return outputs

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool | Callable[..., Any] = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Find the likeliest continuations of one prompt or many; see
        :mod:`headrace_engine.beam_search`.

        Args:
            prompts: as :meth:`generate`, embeddings excepted.
            params: width, length and how sequences are scored.
            lora_request: as :meth:`generate`.
            use_tqdm: show a progress bar over the prompts; or a callable that makes one.
            concurrency_limit: search for so many prompts at once; None: for all.

        Returns:
            One output per prompt, in order; its sequences are ranked, the best first.

        Raises:
            RequestError: a prompt or parameter is wrong; nothing is left running.
        """
        self._check_generates("LLM.beam_search")
        from headrace.offline.beams import search_beams

        every = as_prompts(prompts)
        return search_beams(
            self.engine,
            every,
            need("params", params, BeamSearchParams),
            use_tqdm=use_tqdm,
            at_once=concurrency_limit,
            lora_requests=as_adapters(lora_request, len(every)),
        )


def _content_format(given: str) -> str:
    """The argument ``chat_template_content_format``.

    Raises:
        RequestError: there is no such format.
    """
    from headrace_engine.input_processing.chat.content import CONTENT_FORMATS

    if given not in CONTENT_FORMATS:
        raise RequestError(
            f"chat_template_content_format = {given!r:.100}: must be one of "
            f"{', '.join(CONTENT_FORMATS)}",
            param="chat_template_content_format",
        )
    return given
