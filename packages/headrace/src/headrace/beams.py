"""Beam search over the synchronous engine: the beams of all prompts take each step together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from headrace.progress import wants_bar
from headrace_core.beam import (
    BeamSearch,
    BeamSearchOutput,
    BeamSequence,
    check_beam_search,
    check_length,
    continued,
    next_logprobs,
    refuse_embeds,
    shown_tokens,
    step_params,
    step_prompt,
)
from headrace_core.errors import RequestError
from headrace_core.foreign import own_value
from headrace_core.request import ChatPrompt, Prompt
from headrace_core.sampling import BeamSearchParams

if TYPE_CHECKING:
    from headrace_engine.intake.intake import Intake
    from headrace_engine.offline import OfflineEngine


class OfflineBeams:
    """Searches with the same parameters for many prompts.

    Args:
        engine: runs the steps.
        intake: knows the tokenizer.
        params: of every search.

    Raises:
        RequestError: the engine cannot search so.
    """

    def __init__(self, engine: OfflineEngine, intake: Intake, params: BeamSearchParams) -> None:
        check_beam_search(params, engine.model)
        self._engine = engine
        self._intake = intake
        self._params = params
        self._ends = engine.model.eos_token_ids

    def run(
        self,
        prompts: Sequence[Prompt],
        *,
        use_tqdm: bool | Callable[..., Any] = False,
        at_once: int | None = None,
    ) -> list[BeamSearchOutput]:
        """One output per prompt, in order.

        Args:
            prompts: text, tokens or chats.
            use_tqdm: show how many are done; or a callable that makes a bar.
            at_once: prompts that are searched at the same time; None: all.
        """
        at_once = own_value(at_once)
        if at_once is not None and (type(at_once) is not int or at_once < 1):
            raise RequestError(
                f"concurrency_limit = {at_once!r:.100}: must be an integer of at least 1, or None",
                param="concurrency_limit",
            )
        searches = [self._search(prompt) for prompt in prompts]
        size = at_once or max(1, len(searches))
        with _bar(len(searches), use_tqdm) as done:
            for first in range(0, len(searches), size):
                self._finish(searches[first : first + size], done)
        return [self._output(search) for search, _ in searches]

    def _search(self, prompt: Prompt) -> tuple[BeamSearch, str | None]:
        refuse_embeds(prompt)
        tokens = self._intake.tokenize(prompt).token_ids
        if not tokens:
            raise RequestError("prompt: must hold at least one token", param="prompt")
        check_length(len(tokens), self._params, self._engine.model)
        salt: object = prompt.cache_salt if isinstance(prompt, ChatPrompt) else None
        if isinstance(prompt, dict):
            salt = prompt.get("cache_salt")
        salted = salt if isinstance(salt, str) else None
        return BeamSearch(tokens, self._params, self._ends), salted

    def _finish(
        self, searches: Sequence[tuple[BeamSearch, str | None]], done: Callable[[int], None]
    ) -> None:
        params = step_params(self._params, self._engine.model)
        live = list(searches)
        first = True
        while live:
            steps = [
                (search, step_prompt(tokens, salt))
                for search, salt in live
                for tokens in search.sequences()
            ]
            outputs = self._engine.run([prompt for _, prompt in steps], params)
            found: dict[int, list[Any]] = {}
            for (search, _), output in zip(steps, outputs):
                found.setdefault(id(search), []).append(next_logprobs(output))
                if first:
                    search.num_cached_tokens = output.num_cached_tokens
            for search, _ in live:
                search.advance(found[id(search)])
            first = False
            still = [one for one in live if not one[0].done]
            done(len(live) - len(still))
            live = still

    def _output(self, search: BeamSearch) -> BeamSearchOutput:
        output = search.output()
        if self._engine.tokenizer is not None:
            for sequence in output.sequences:
                self._add_texts(sequence)
        return output

    def _add_texts(self, sequence: BeamSequence) -> None:
        tokens, prompt, end = shown_tokens(sequence, self._params)
        decode = self._intake.detokenize
        sequence.text = decode([*tokens, *end])
        whole = decode(tokens, skip_special_tokens=True)
        rest = decode(tokens[len(prompt) :], skip_special_tokens=True)
        sequence.output_text = continued(whole, decode(prompt, skip_special_tokens=True), rest)
        if end:
            sequence.output_text += decode(end)


@contextmanager
def _bar(total: int, use_tqdm: bool | Callable[..., Any]) -> Iterator[Callable[[int], None]]:
    """A function that counts finished prompts on a progress bar."""
    if not wants_bar(use_tqdm):
        yield lambda _: None
        return
    bar = _maker(use_tqdm)(total=total, desc="Beam search", unit="prompt", dynamic_ncols=True)
    try:
        yield bar.update
    finally:
        bar.close()


def _maker(use_tqdm: bool | Callable[..., Any]) -> Callable[..., Any]:
    if callable(use_tqdm):
        return use_tqdm
    from tqdm import tqdm

    return tqdm
