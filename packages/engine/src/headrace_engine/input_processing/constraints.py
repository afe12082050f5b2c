"""Constraints on outputs: compiled, and where in the output they begin and end."""

from __future__ import annotations

from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_core.grammar import Constraint, Vocabulary
from headrace_core.request import ChatPrompt, Prompt
from headrace_core.sampling.params import SamplingParams
from headrace_core.served_model import ServedModel
from headrace_core.text import ReasoningParser, Tokenizer
from headrace_engine.config import StructuredOutputsConfig
from headrace_engine.input_processing.prompts import PromptTokens
from headrace_engine.input_processing.tokens import need_tokenizer
from headrace_engine.structured.admission import Admission, Admitted
from headrace_engine.structured.reasoning import PROMPT_TAIL, start_of
from headrace_engine.structured.vocabulary import vocabulary_of


class Constraints:
    """Makes requests' constraints for one model. Thread-safe.

    Args:
        tokenizer: None: every constraint is refused.
        model: names the end tokens.
        config: backend and limits.
        reasoning_parser: knows where the model's reasoning ends, where constraints begin; None: the
            model does not reason.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        model: ServedModel,
        config: StructuredOutputsConfig,
        reasoning_parser: type[ReasoningParser] | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._reasoning_parser = reasoning_parser
        self._in_reasoning = config.enable_in_reasoning
        self._vocabulary: Vocabulary | None = None
        self._admission = Admission(config, self.vocabulary)

    def close(self) -> None:
        """End the processes in which constraints compile; they would be started anew."""
        self._admission.close()

    def admit(self, params: SamplingParams) -> Admitted | None:
        """Let the parameters' constraint compile, in a process that is killed if it takes long.

        May take seconds, the first constraint longer: to be called where nobody waits but the
        request itself. None: there is no constraint.

        Raises:
            RequestError: no backend can serve it; names keyword and JSON pointer.
        """
        wanted = params.structured_outputs
        if wanted is None:
            return None
        need_tokenizer(self._tokenizer, "structured_outputs")
        self._end_token_ids(params)
        self._check_length(params)
        return self._admission.admit(wanted)

    def known(self, params: SamplingParams) -> Admitted | None:
        """The verdict as :meth:`admit` gives it; None if the constraint must be compiled first."""
        wanted = params.structured_outputs
        if wanted is None:
            return None
        need_tokenizer(self._tokenizer, "structured_outputs")
        self._end_token_ids(params)
        self._check_length(params)
        return self._admission.known(wanted)

    def of(
        self,
        prompt: Prompt,
        tokens: PromptTokens,
        params: SamplingParams,
        admitted: Admitted | None,
    ) -> Constraint | None:
        """A request's constraint; None if it has none.

        Args:
            tokens: the prompt's.
            admitted: what :meth:`admit` said; None: it is asked now.
        """
        admitted = admitted or self.admit(params)
        if admitted is None:
            return None
        begins_answer = isinstance(prompt, ChatPrompt) and not prompt.continue_final_message
        parser = self._gate(params)
        tail = ""
        if parser is not None and tokens.embeds is None:  # ids mean nothing beside embeddings
            tokenizer = need_tokenizer(self._tokenizer, "structured_outputs")
            tail = tokenizer.decode(tokens.ids[-PROMPT_TAIL:])
        variables = prompt.chat_template_kwargs if isinstance(prompt, ChatPrompt) else {}
        start = start_of(parser, tail, begins_answer=begins_answer, chat_template_kwargs=variables)
        ends = self._end_token_ids(params)
        return Constraint(admitted.grammar, ends, *start, size_bytes=admitted.size_bytes)

    def vocabulary(self) -> Vocabulary:
        """The tokens' bytes; made at the first call.

        Raises:
            RequestError: there is no tokenizer, or its tokens are no byte strings.
        """
        if self._vocabulary is None:
            tokenizer, model = need_tokenizer(self._tokenizer, "structured_outputs"), self._model
            self._vocabulary = vocabulary_of(tokenizer, model.vocab_size, model.eos_token_ids)
        return self._vocabulary

    def _gate(self, params: SamplingParams) -> type[ReasoningParser] | None:
        """The format of the reasoning behind which the constraint begins; None: it begins at once."""
        wanted = params.structured_outputs
        at_once = self._in_reasoning or (wanted is not None and wanted.enable_in_reasoning)
        return None if at_once else self._reasoning_parser

    def _check_length(self, params: SamplingParams) -> None:
        """Refuse more tokens than the texts of a choice have."""
        wanted = params.structured_outputs
        reasons_first = self._gate(params) is not None
        if wanted is None or wanted.choice is None or not params.min_tokens or reasons_first:
            return
        most = max(len(text.encode(errors="replace")) for text in wanted.choice)
        if params.min_tokens > most:
            raise RequestError(
                f"min_tokens = {params.min_tokens}: must be at most {most} with this "
                "structured_outputs.choice, whose longest text has so many bytes",
                param="min_tokens",
                value=params.min_tokens,
            )

    def _end_token_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """Tokens that end an output with a constraint: not those that are text."""
        if params.ignore_eos:
            raise RequestError(
                "ignore_eos = True: cannot be combined with structured_outputs, whose texts end with an "
                "end token",
                param="ignore_eos",
            )
        special = need_tokenizer(self._tokenizer, "structured_outputs").special_token_ids
        own = special.intersection(params.stop_token_ids or ())
        ends = own | frozenset(self._model.eos_token_ids)
        if not ends:
            raise UnsupportedFeature(
                "structured_outputs: not with this model, which names no end token; a request may "
                "name a special token in stop_token_ids",
                param="structured_outputs",
            )
        return tuple(sorted(ends))
