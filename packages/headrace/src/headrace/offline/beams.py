"""Beam search over the synchronous engine, with a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from headrace.progress import wants_bar
from headrace_core.arrays import own_value
from headrace_core.errors import RequestError
from headrace_core.lora import LoRARequest
from headrace_core.output import BeamSearchOutput
from headrace_core.request import Prompt
from headrace_core.sampling.params import BeamSearchParams

if TYPE_CHECKING:
    from headrace_engine.offline import OfflineEngine


def search_beams(
    engine: OfflineEngine,
    prompts: Sequence[Prompt],
    params: BeamSearchParams,
    *,
    use_tqdm: bool | Callable[..., Any] = False,
    at_once: int | None = None,
    lora_requests: Sequence[LoRARequest | None] | None = None,
) -> list[BeamSearchOutput]:
    """One output per prompt, in order.

    Args:
        prompts: text, tokens or chats.
        params: of every search.
        use_tqdm: show how many are done; or a callable that makes a bar.
        at_once: prompts that are searched at the same time; None: all.
        lora_requests: one for each prompt; None: all with the base model.

    Raises:
        RequestError: a prompt or a parameter is wrong, or the engine cannot search so.
    """
    at_once = own_value(at_once)
    if at_once is not None and (type(at_once) is not int or at_once < 1):
        raise RequestError(
            f"concurrency_limit = {at_once!r:.100}: must be an integer of at least 1, or None",
            param="concurrency_limit",
        )
    with _bar(len(prompts), use_tqdm) as done:
        return engine.beam_search(
            prompts,
            params,
            at_once=at_once,
            lora_requests=lora_requests,
            on_output=lambda index, output: done(1),
        )


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
