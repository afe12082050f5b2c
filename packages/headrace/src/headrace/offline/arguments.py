"""Checks the prompts and parameters that callers of the offline API hand in, and makes lists of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from headrace.offline.pooling import listed
from headrace_core.arrays import own_value
from headrace_core.errors import RequestError
from headrace_core.lora import LoRARequest
from headrace_core.request import ChatPrompt, Prompt
from headrace_core.sampling.params import RequestOutputKind, SamplingParams

Kind = TypeVar("Kind")
WAKING_TIMEOUT = 3600.0
"""Longest wait for an engine that falls asleep or wakes up, in seconds: it may read a large checkpoint."""
ACCEPTED = "SamplingParams, a list with one for each prompt, or None for the model's defaults"


def as_tags(tags: object) -> object:
    """Names of parts of an engine as a list, where they are a collection; else as they are."""
    return list(tags) if isinstance(tags, (tuple, set, frozenset)) else tags


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list: a list or an array of integers is one prompt.

    Raises:
        RequestError: it is neither.
    """
    if isinstance(prompts, (str, Mapping, ChatPrompt)):
        return [cast("Prompt", prompts)]
    several = listed("prompts", own_value(prompts))
    first = own_value(several[0]) if several else None
    if isinstance(first, int) and not isinstance(first, bool):
        return [cast("Prompt", several)]
    for index, prompt in enumerate(several):
        if prompt is None or isinstance(prompt, bool | int | float):
            raise RequestError(
                f"prompts[{index}] = {prompt!r}: must be text, token ids, or a dictionary with "
                "'prompt' or 'prompt_token_ids'",
                param="prompts",
            )
    return cast("list[Prompt]", several)


def as_conversations(messages: object) -> list[Sequence[Mapping[str, Any]]]:
    """One conversation or many, as a list.

    Raises:
        RequestError: it is neither.
    """
    several = list(messages) if _is_list(messages) else None  # type: ignore[call-overload]
    conversations: list[Sequence[Mapping[str, Any]]]
    if several and all(_is_list(each) for each in several):
        conversations = [list(each) for each in several]
    else:
        conversations = [several or []]
    if several is None or not all(isinstance(m, Mapping) for each in conversations for m in each):
        raise RequestError(
            f"messages = {messages!r:.100}: must be a list of messages, each a dictionary with "
            "'role' and 'content', or a list of such lists",
            param="messages",
        )
    return conversations


def check_chat_options(
    *,
    chat_template: object = None,
    tools: object = None,
    documents: object = None,
    chat_template_kwargs: object = None,
    add_generation_prompt: object = True,
    continue_final_message: object = False,
    **_: object,
) -> None:
    """Check how conversations are to be rendered.

    Raises:
        RequestError: an option is of another kind, or two exclude each other.
    """
    if chat_template is not None and not isinstance(chat_template, str):
        raise _not_params("chat_template", chat_template, "a template's text, or None")
    for name, given in (("tools", tools), ("documents", documents)):
        if given is not None and not (
            _is_list(given) and all(isinstance(one, Mapping) for one in cast("list[Any]", given))
        ):
            raise _not_params(name, given, "a list of JSON objects, or None")
    if chat_template_kwargs is not None and not isinstance(chat_template_kwargs, Mapping):
        raise _not_params(
            "chat_template_kwargs", chat_template_kwargs, "a mapping of names to values, or None"
        )
    flags = {
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
    }
    for name, flag in flags.items():
        if own_value(flag) not in (True, False):
            raise _not_params(name, flag, "True or False")
    if all(flags.values()):
        raise RequestError(
            "continue_final_message = True: must be False while add_generation_prompt is True",
            param="continue_final_message",
        )


def as_sampling_params(
    params: SamplingParams | Iterable[SamplingParams], num_prompts: int
) -> list[SamplingParams]:
    """Parameters of each prompt, for final outputs only: nobody sees what a batch yields on the way.

    Raises:
        RequestError: they are of another kind, or not as many as prompts.
    """
    if isinstance(params, SamplingParams):
        return [_final(params)] * num_prompts
    if isinstance(params, str | bytes | Mapping) or not isinstance(params, Iterable):
        raise _not_params("sampling_params", params, ACCEPTED)
    every = list(params)
    for index, one in enumerate(every):
        need("sampling_params", one, SamplingParams, place=f"[{index}]")
    need_one_each("sampling_params", every, num_prompts)
    return [_final(one) for one in every]


def as_priorities(priority: object, num_prompts: int) -> list[int] | None:
    """A priority for each prompt, or None.

    Raises:
        RequestError: one is not an integer, or there are more or fewer than prompts.
    """
    if priority is None:
        return None
    every = own_value(priority)
    if not _is_list(every):
        raise _not_params("priority", priority, "a list with an integer for each prompt, or None")
    every = [own_value(one) for one in every]
    for index, one in enumerate(every):
        if not isinstance(one, int) or isinstance(one, bool):
            raise _not_params(f"priority[{index}]", one, "an integer")
    need_one_each("priority", every, num_prompts)
    return cast("list[int]", every)


def need(name: str, given: object, kind: type[Kind], *, place: str = "") -> Kind:
    """An argument that is of a kind.

    Raises:
        RequestError: naming the argument.
    """
    if not isinstance(given, kind):
        raise _not_params(f"{name}{place}", given, f"a {kind.__name__}")
    return given


def need_one_each(name: str, values: Sequence[object], num_prompts: int) -> None:
    """Raises: RequestError, there are more or fewer than prompts."""
    if len(values) != num_prompts:
        raise RequestError(f"{name}: {len(values)} given for {num_prompts} prompts", param=name)


def as_adapters(lora_request: object, num_prompts: int) -> list[LoRARequest | None] | None:
    """An adapter for each prompt, or None where all have the base model.

    Raises:
        RequestError: one is no LoRARequest, or there are more or fewer than prompts.
    """
    if lora_request is None:
        return None
    if not _is_list(lora_request):
        return [as_adapter(lora_request)] * num_prompts
    every = list(cast("Sequence[object]", lora_request))
    for index, one in enumerate(every):
        if one is not None:
            need("lora_request", one, LoRARequest, place=f"[{index}]")
    need_one_each("lora_request", every, num_prompts)
    return cast("list[LoRARequest | None]", every)


def as_adapter(lora_request: object) -> LoRARequest | None:
    """The adapter of a call that has one for all.

    Raises:
        RequestError: it is no LoRARequest.
    """
    return None if lora_request is None else need("lora_request", lora_request, LoRARequest)


def as_timeout(timeout: object) -> float | None:
    """Seconds to wait, or None.

    Raises:
        RequestError: it is not a number above 0.
    """
    seconds = own_value(timeout)
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise _not_params("timeout", timeout, "a number of seconds above 0, or None")
    return float(seconds)


def as_seconds(name: str, given: object) -> float:
    """A number of seconds.

    Raises:
        RequestError: it is not a number, or is below 0.
    """
    seconds = own_value(given)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 0:
        raise _not_params(name, given, "a number of seconds, at least 0")
    return float(seconds)


def as_worker_call(
    method: str | Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> tuple[str | Callable[..., Any], list[Any]]:
    """A worker's method, or a function that gets the worker, and its arguments by position.

    Raises:
        RequestError: it is neither, or the arguments do not fit the method.
    """
    if not isinstance(method, str) and not callable(method):
        raise _not_params("method", method, "the name of a worker method, or a function")
    if not _is_list(args):
        raise _not_params("args", args, "a list of arguments")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise _not_params("kwargs", kwargs, "a mapping of names to arguments, or None")
    if not kwargs:
        return method, list(args)
    if not isinstance(method, str):
        return partial(method, **kwargs), list(args)
    from headrace_engine.core import PARAMETERS, WORKER_CALLS

    if method not in WORKER_CALLS:
        raise RequestError(
            f"kwargs: must be left out with method = {method[:64]!r}, which is none of the engine's own "
            "calls: methods of a worker extension take arguments by position",
            param="kwargs",
        )
    names = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        for name in PARAMETERS.get(method, ())
    ]
    try:
        bound = inspect.Signature(names).bind(*args, **kwargs)
    except TypeError as error:
        raise RequestError(f"kwargs: {method}: {error}", param="kwargs") from None
    return method, list(bound.args)


def _final(params: SamplingParams) -> SamplingParams:
    params = params.clone()
    params.output_kind = RequestOutputKind.FINAL_ONLY
    return params


def _is_list(given: object) -> bool:
    return isinstance(given, Sequence) and not isinstance(given, str | bytes | bytearray)


def _not_params(name: str, given: object, accepted: str) -> RequestError:
    return RequestError(
        f"{name} = {given!r:.100}: must be {accepted}", param=name.partition("[")[0]
    )
