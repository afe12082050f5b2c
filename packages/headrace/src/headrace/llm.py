"""The offline API: :class:`LLM`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.assembly import default_sampling_params
from headrace.engine_args import EngineArgs
from headrace.given import (
    as_conversations,
    as_priorities,
    as_prompts,
    as_sampling_params,
    check_chat_options,
    need,
    need_one_each,
    refuse_adapters,
)
from headrace.llm_engine import LLMEngine
from headrace.pooling import (
    OfflinePooling,
    chosen_task,
    completed,
    for_all,
    score_inputs,
    tokenizing,
)
from headrace.progress import counting_bar, prompt_bar
from headrace_core.errors import UnsupportedFeature
from headrace_core.output import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from headrace_core.pooling import PoolingParams
from headrace_core.request import ChatPrompt, Prompt, TokensPrompt, brings_media
from headrace_core.sampling import BeamSearchParams, SamplingParams
from headrace_core.scoring import ScoreInput

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.metrics import Metric
    from headrace.model_facts import ModelFacts
    from headrace.recordings import Recording
    from headrace.tokenizer import ModelTokenizer
    from headrace.transcripts import WordTime
    from headrace_core.beam import BeamSearchOutput
    from headrace_core.listening.transcript import Transcript
    from headrace_core.speech import SpeechTask
    from headrace_engine.offline import Batch, OfflineEngine
    from headrace_multimodal.audio.decoding import AudioDecoder

Message = Mapping[str, Any]


class LLM:
    """A model for offline batches.

    Args:
        model: folder or hub name of a checkpoint; None: the demo model that ships with headrace.
        engine_args: every engine setting by its flag's name (``max_model_len=2048``,
            ``enable_prefix_caching=False``, ...); see :class:`headrace.EngineArgs`. And
            ``disable_log_stats``: False collects what :meth:`get_metrics` returns.

    Raises:
        TypeError: an unknown setting.
        HeadraceError: the model cannot be resolved, loaded or fitted into memory.

    Leaving a ``with`` block, :meth:`close` or dropping the object frees model and cache.

    Any thread may call any method at any time, a callback of another call included. Calls of several
    threads run together, in the same steps of one engine, and each gets its own outputs. :meth:`close`
    makes calls that still run raise :class:`~headrace_core.errors.EngineDead`.

        >>> llm = LLM()
        >>> llm.generate("Hello", SamplingParams(temperature=0))[0].outputs[0].text
    """

    def __init__(self, model: str | None = None, **engine_args: Any) -> None:
        engine_args["log_stats"] = _collects_statistics(engine_args)
        if model is not None:
            engine_args["model"] = model
        self._llm_engine: LLMEngine | None = LLMEngine(EngineArgs(**engine_args))
        front = self._llm_engine.front
        self.model_info = front.info
        self.engine_config = front.config
        self._default_params = default_sampling_params(front.info.generation_config)
        self._intake = front.intake
        self._io_processor = front.io_processor
        self._speech = front.speech
        self._decoder: AudioDecoder | None = None
        self._lock = threading.Lock()
        # Guarded by the lock, as the decoder is:
        self._enqueued: list[Batch] = []

    @property
    def llm_engine(self) -> LLMEngine:
        """The engine underneath, to be driven step by step. It lives until this object is closed, or
        until both objects were dropped.

        Raises:
            RuntimeError: the object was closed.
        """
        if self._llm_engine is None:
            raise RuntimeError("this LLM was closed")
        return self._llm_engine

    @property
    def engine(self) -> OfflineEngine:
        """The synchronous engine under :attr:`llm_engine`, of the package headrace-engine.

        Raises:
            RuntimeError: the object was closed.
        """
        return self.llm_engine.engine

    @property
    def model_config(self) -> ModelFacts:
        """Facts about the model: ``model``, ``max_model_len``, ``dtype``, ``hf_config``, ..."""
        return self.llm_engine.model_config

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or many; batches as memory allows.

        Args:
            prompts: text, token ids (lists, or arrays of numpy or torch), or the dictionaries of
                :mod:`headrace.inputs`; one or a list.
            sampling_params: None: the model's defaults; one for all; or one per prompt.
            use_tqdm: show a progress bar; or a callable that makes one (tqdm's signature).
            lora_request: refused unless None; adapters are not served by this version.
            priority: one per prompt, only under ``scheduling_policy="priority"``.

        Returns:
            One output per prompt, in order.

        Raises:
            RequestError: a prompt or parameter is wrong; nothing is left running.
        """
        self._check_generates("LLM.generate")
        refuse_adapters(lora_request)
        every = as_prompts(prompts)
        return self._run(every, sampling_params, use_tqdm=use_tqdm, priority=priority)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, through the model's chat template.

        Raises:
            RequestError: as :meth:`generate`; or the template is missing or fails.
        """
        self._check_generates("LLM.chat")
        refuse_adapters(lora_request)
        chats = self._chats(
            messages,
            chat_template=chat_template,
            content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs={} if chat_template_kwargs is None else chat_template_kwargs,
        )
        return self._run(chats, sampling_params, use_tqdm=use_tqdm)

    def preprocess_chat(self, messages: Any, **options: Any) -> list[TokensPrompt]:
        """The first half of :meth:`chat`: conversations as token prompts.

        Args:
            messages: as :meth:`chat`.
            options: fields of :class:`headrace.inputs.ChatPrompt`.

        Raises:
            UnsupportedFeature: a conversation brings media, which tokens cannot hold.
        """
        prompts: list[TokensPrompt] = []
        for chat in self._chats(messages, **options):
            if brings_media(chat):
                raise UnsupportedFeature(
                    "messages: what they bring besides text cannot be part of a prompt of tokens; use "
                    "chat()",
                    param="messages",
                )
            tokens = self._intake.tokenize(chat, None, False)
            prompts.append(TokensPrompt(prompt_token_ids=tokens.token_ids))
        return prompts

    def _check_generates(self, call: str) -> None:
        from headrace_engine.intake.pooling import check_generates

        check_generates(self.engine.model, call)

    def _chats(self, messages: Any, **options: Any) -> list[ChatPrompt]:
        check_chat_options(**options)
        return [ChatPrompt(messages=each, **options) for each in as_conversations(messages)]

    def _run(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        use_tqdm: bool | Callable[..., Any],
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        every = self._params(sampling_params, len(prompts))
        priorities = as_priorities(priority, len(prompts))
        with prompt_bar(len(prompts), use_tqdm) as on_output:
            outputs: list[RequestOutput] = self.engine.run(
                prompts, every, priority=priorities, on_output=on_output
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
        lora_request: None = None,
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
        self._check_generates("LLM.enqueue")
        refuse_adapters(lora_request)
        every = as_prompts(prompts)
        params = self._params(sampling_params, len(every))
        priorities = as_priorities(priority, len(every))
        with counting_bar(len(every), use_tqdm, "Adding requests") as on_added:
            batch = self.engine.start(every, params, priority=priorities, on_added=on_added)
        with self._lock:
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
            EngineDead: the engine stopped, or the object was closed.
            KeyboardInterrupt: everything that was waited for has been aborted.
        """
        with self._lock:
            batches, self._enqueued = self._enqueued, []
        outputs: list[RequestOutput] = []
        total = sum(len(batch.request_ids) for batch in batches)
        with contextlib.ExitStack() as left, prompt_bar(total, use_tqdm) as on_output:
            for batch in batches:
                left.callback(batch.close)
            for batch in batches:
                outputs += batch.wait(on_output)
        return outputs

    def get_tokenizer(self) -> ModelTokenizer:
        """The model's tokenizer, with the interface of transformers' tokenizers; one object for all
        calls.

        Raises:
            RuntimeError: none was loaded (``skip_tokenizer_init``).
        """
        return self.llm_engine.get_tokenizer()

    def get_supported_tasks(self) -> tuple[str, ...]:
        """The tasks that the model has, such as ``generate`` or ``embed``."""
        return self.llm_engine.get_supported_tasks()

    def get_metrics(self) -> list[Metric]:
        """A snapshot of all metrics; see :meth:`LLMEngine.get_metrics`."""
        return self.llm_engine.get_metrics()

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation config says, else the neutral values."""
        return SamplingParams(**self._default_params)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget cached blocks; False if some are in use."""
        return bool(self.engine.reset_prefix_cache(reset_running_requests))

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: None = None,
        use_tqdm: bool | Callable[..., Any] = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Find the likeliest continuations of one prompt or many; see :mod:`headrace_core.beam`.

        Args:
            prompts: as :meth:`generate`, embeddings excepted.
            params: width, length and how sequences are scored.
            lora_request: refused unless None.
            use_tqdm: show a progress bar over the prompts; or a callable that makes one.
            concurrency_limit: search for so many prompts at once; None: for all.

        Returns:
            One output per prompt, in order; its sequences are ranked, the best first.

        Raises:
            RequestError: a prompt or parameter is wrong; nothing is left running.
        """
        self._check_generates("LLM.beam_search")
        refuse_adapters(lora_request)
        from headrace.beams import OfflineBeams

        beams = OfflineBeams(self.engine, self._intake, need("params", params, BeamSearchParams))
        return beams.run(as_prompts(prompts), use_tqdm=use_tqdm, at_once=concurrency_limit)

    def start_profile(self) -> None:
        """Record the coming steps (``profiler_config``)."""
        self.collective_rpc("start_profile")

    def stop_profile(self) -> None:
        """Write what was recorded."""
        self.collective_rpc("stop_profile")

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker: results by rank; see :meth:`LLMEngine.collective_rpc`."""
        return self.llm_engine.collective_rpc(method, timeout, args, kwargs)

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Run a function on the model of every worker: results by rank.

        >>> llm.apply_model(type)  # whose code runs the model

        Raises:
            RequestError: it is not a function.
            UnsupportedFeature: the engine is in another process.
        """
        return self.llm_engine.apply_model(func)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: None = None,
        truncate_prompt_tokens: int | None = None,
        prompt_name: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """One vector for each prompt.

        Args:
            prompts: as :meth:`generate`.
            pooling_params: None: the model's defaults; one for all; or one per prompt.
            use_tqdm, lora_request: as :meth:`generate`.
            truncate_prompt_tokens: keep so many tokens of each prompt, its end; -1: as many as the
                model takes.
            prompt_name: put this prompt of the checkpoint's before each text (Sentence Transformers'
                ``prompts``, listed by ``model_info.pooling``); None: its default one, if it has any.
            tokenization_kwargs: ``add_special_tokens`` and ``truncate_prompt_tokens``, which win.

        Returns:
            One output per prompt, in order; ``outputs.embedding`` is a list of numbers.

        Raises:
            UnsupportedFeature: the model does not embed; says what would help.
            RequestError: a prompt or parameter is wrong; nothing is left running.
            GenerateError: a prompt failed.
        """
        refuse_adapters(lora_request)
        keep, special = tokenizing(tokenization_kwargs, truncate_prompt_tokens)
        params = completed(pooling_params, truncate_prompt_tokens=keep, prompt_name=prompt_name)
        pooling = self._pooling("LLM.embed", "embed")
        return pooling.embed(as_prompts(prompts), params, use_tqdm, special)

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Probabilities of the model's labels for each prompt; arguments and errors as
        :meth:`embed`.

        Returns:
            One output per prompt, in order; ``outputs.probs`` is a list of numbers.
        """
        refuse_adapters(lora_request)
        keep, special = tokenizing(tokenization_kwargs, None)
        params = completed(pooling_params, truncate_prompt_tokens=keep)
        pooling = self._pooling("LLM.classify", "classify")
        return pooling.classify(as_prompts(prompts), params, use_tqdm, special)

    def reward(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: None = None,
        truncate_prompt_tokens: int | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Rewards of each prompt's tokens (task ``token_classify``); arguments and errors as
        :meth:`embed`.

        Returns:
            One output per prompt, in order; ``outputs.data`` is a tensor [tokens, labels].
        """
        refuse_adapters(lora_request)
        keep, special = tokenizing(tokenization_kwargs, truncate_prompt_tokens)
        params = completed(pooling_params, truncate_prompt_tokens=keep)
        pooling = self._pooling("LLM.reward", "token_classify")
        return pooling.encode(as_prompts(prompts), params, "token_classify", use_tqdm, special)

    def score(
        self,
        data_1: ScoreInput | Sequence[ScoreInput],
        data_2: ScoreInput | Sequence[ScoreInput],
        /,
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: None = None,
        truncate_prompt_tokens: int | None = None,
        chat_template: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well the texts of each pair fit.

        Args:
            data_1, data_2: one text each, one and many, or equally many.
            chat_template: makes the prompt of a pair, for models that read both texts in one; gets
                two ``messages``, of the roles ``query`` and ``document``. Models that embed each text
                by itself refuse it.
            tokenization_kwargs: as :meth:`embed`; special tokens can be left out only where each text
                is embedded, or a template makes the prompt.
            pooling_params, use_tqdm, lora_request, truncate_prompt_tokens: as :meth:`embed`.

        Returns:
            One output per pair, in order; ``outputs.score`` is a number.

        Raises: as :meth:`embed`.
        """
        refuse_adapters(lora_request)
        keep, special = tokenizing(tokenization_kwargs, truncate_prompt_tokens)
        params = completed(pooling_params, truncate_prompt_tokens=keep)
        check_chat_options(chat_template=chat_template)
        pooling = self._pooling("LLM.score", None)
        return pooling.score(
            score_inputs(data_1, "data_1"),
            score_inputs(data_2, "data_2"),
            for_all(params),
            chat_template,
            use_tqdm,
            special,
        )

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt] | Any,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: None = None,
        truncate_prompt_tokens: int | None = None,
        pooling_task: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        prompt_name: str | None = None,
    ) -> list[PoolingRequestOutput[Any]]:
        """Pool prompts for any task of the model.

        Args:
            prompts: as :meth:`generate`; for the task ``plugin`` whatever the IO processor reads.
            pooling_task: one of :data:`headrace_core.pooling.POOLING_TASKS`.
            pooling_params, use_tqdm, lora_request, truncate_prompt_tokens, prompt_name,
                tokenization_kwargs: as :meth:`embed`.

        Returns:
            One output per prompt, in order; ``outputs.data`` is a float32 tensor, [size] or, for tasks
            on tokens, [tokens, size]. Of the task ``plugin`` one output, whose ``outputs`` are the IO
            processor's.

        Raises: as :meth:`embed`.
        """
        refuse_adapters(lora_request)
        keep, special = tokenizing(tokenization_kwargs, truncate_prompt_tokens)
        self._pooling("LLM.encode", None)
        params = completed(pooling_params, truncate_prompt_tokens=keep, prompt_name=prompt_name)
        task = chosen_task(params, pooling_task)
        if task == "plugin":
            pooling = self._pooling("LLM.encode", None)
            return pooling.plugin(prompts, for_all(params), use_tqdm, special)
        pooling = self._pooling("LLM.encode", task)
        return pooling.encode(as_prompts(prompts), params, task, use_tqdm, special)

    def transcribe(
        self,
        audio: Recording | Sequence[Recording],
        *,
        language: str | None = None,
        to_language: str | None = None,
        prompt: str = "",
        timestamp_granularities: Sequence[str] | None = None,
        temperature: float | Sequence[float] = 0.0,
        use_tqdm: bool | Callable[..., Any] = True,
        **sampling: Any,
    ) -> list[Transcript]:
        """Write down what is said in recordings, however long they are.

        They are decoded one ahead of another and cut where they are quietest; the clips of all run side
        by side. What is computed is what ``/v1/audio/transcriptions`` computes.

        Args:
            audio: a file's path, a file's bytes, or (samples, samples a second), [n] or [channels, n]
                floats from -1 to 1; one or a list.
            language: what is spoken, such as ``en``; None: found out, if the model can.
            to_language: what it is to become, for models that can choose.
            prompt: text that came before, or that shows names and style.
            timestamp_granularities: of ``segment`` and ``word``; None: segments, if the model tells
                times.
            temperature: 0: greedy, and again with up to 1 where a clip's text looks wrong; several:
                tried one after the other.
            use_tqdm: show seconds of sound on a progress bar; or a callable that makes one.
            sampling: further fields of :class:`SamplingParams`: ``top_p``, ``seed``, ``max_tokens`` (of
                each clip), ...; see :data:`headrace.transcribing.SAMPLING`.

        Returns:
            One transcript per recording, in order: ``text``, ``language``, ``duration``, ``segments``,
            ``words``, and :meth:`~headrace_core.listening.transcript.Transcript.srt` of it.

        Raises:
            UnsupportedFeature: the model does not transcribe, or gives no such times.
            OSError: a file cannot be read.
            RequestError: a recording is no audio, or a value is wrong; nothing is left running.
            GenerateError: a clip failed.
            MissingDependency: the libraries that decode audio are not installed.
        """
        return self._listen(
            "transcribe", audio, use_tqdm, language=language, to_language=to_language, prompt=prompt,
            timestamps=timestamp_granularities, temperature=temperature, sampling=sampling,
        )  # fmt: skip

    def translate(
        self,
        audio: Recording | Sequence[Recording],
        *,
        language: str | None = None,
        to_language: str | None = None,
        prompt: str = "",
        timestamp_granularities: Sequence[str] | None = None,
        temperature: float | Sequence[float] = 0.0,
        use_tqdm: bool | Callable[..., Any] = True,
        **sampling: Any,
    ) -> list[Transcript]:
        """Write down in another language, which is English for Whisper, what is said in recordings;
        arguments, results and errors as :meth:`transcribe`."""
        return self._listen(
            "translate", audio, use_tqdm, language=language, to_language=to_language, prompt=prompt,
            timestamps=timestamp_granularities, temperature=temperature, sampling=sampling,
        )  # fmt: skip

    def _listen(
        self, task: SpeechTask, audio: Any, use_tqdm: bool | Callable[..., Any], **wanted: Any
    ) -> list[Transcript]:
        from headrace.assembly.speech import offline_decoder
        from headrace.recordings import as_recordings
        from headrace.transcribing import OfflineListening, Wanted
        from headrace.transcripts import need_speech

        speech = need_speech(self.engine, self._speech)
        with self._lock:
            if self._decoder is None:
                self._decoder = offline_decoder(self.engine_config.speech)
        listening = OfflineListening(self.engine, speech, self._decoder)
        return listening.run(as_recordings(audio), Wanted(task=task, **wanted), use_tqdm)

    def align(self, prompts: Prompt | Sequence[Prompt]) -> list[Tensor]:
        """Which part of its media each token of a sequence comes from: for the times of words.

        Args:
            prompts: whole sequences with their media, output included, one or a list; for Whisper
                ``{"encoder_prompt": ..., "decoder_prompt": token ids}``.

        Returns:
            One float32 tensor [tokens, encoder states] for each, in order
            (:meth:`headrace_core.model.SupportsAlignment.align`).

        Raises:
            UnsupportedFeature: the checkpoint names no heads that align.
            RequestError: a sequence is wrong; nothing is left running.
        """
        from headrace.pooling import as_tensor

        return [as_tensor(weights) for weights in self.engine.align(as_prompts(prompts))]

    def word_times(
        self,
        prompts: Prompt | Sequence[Prompt],
        outputs: Sequence[RequestOutput],
        *,
        language: str | None = None,
    ) -> list[list[WordTime]]:
        """When the words of transcripts were said.

        Args:
            prompts: those of :meth:`generate`, each with one clip as ``(samples, rate)`` and its text
                as token ids.
            outputs: what came of them.
            language: of the transcripts, an ISO 639-1 code; matters where words stand without spaces.

        Returns:
            The words of each transcript, with their times in seconds.

        Raises: as :meth:`align`.
        """
        from headrace.transcripts import word_times

        every = as_prompts(prompts)
        need_one_each("outputs", outputs, len(every))
        return word_times(self.engine, self._speech, every, outputs, language)

    def _pooling(self, call: str, task: str | None) -> OfflinePooling:
        """The pooling half of the engine.

        Raises:
            UnsupportedFeature: the model generates, or does not have the task.
        """
        from headrace_engine.intake.pooling import check_pools, check_task

        model = self.engine.model
        if task is None:
            check_pools(model, call=call)
        else:
            check_task(model, task, call=call)
        return OfflinePooling(self.engine, self._io_processor)

    def close(self) -> None:
        """Stop the engine and free model and cache. Idempotent."""
        engine, self._llm_engine = self._llm_engine, None
        if engine is not None:
            engine.shutdown()
        self._close_decoder()

    def _close_decoder(self) -> None:
        if self._decoder is not None:
            self._decoder.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Interpreter shutdown may have taken away what closing needs.
        with contextlib.suppress(Exception):
            self._close_decoder()


def _collects_statistics(engine_args: dict[str, Any]) -> bool:
    """Take the choice out of the keywords of :class:`LLM`, whose default is not to collect any.

    Raises:
        TypeError: ``disable_log_stats`` is not a boolean, or contradicts ``log_stats``.
    """
    collects = engine_args.pop("log_stats", None)
    disabled = engine_args.pop("disable_log_stats", None)
    if disabled is None:
        return False if collects is None else collects
    if not isinstance(disabled, bool):
        raise TypeError(f"disable_log_stats = {disabled!r:.100}: must be True or False")
    if collects is not None and collects is disabled:
        raise TypeError(
            f"disable_log_stats = {disabled} contradicts log_stats = {collects}; give one of them"
        )
    return not disabled
