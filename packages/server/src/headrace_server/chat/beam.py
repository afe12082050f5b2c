"""``use_beam_search``: the ``n`` likeliest answers, as outputs like those of sampling."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any, NamedTuple

from headrace_core.engine import EngineClient
from headrace_core.errors import PromptTooLong, UnsupportedFeature
from headrace_core.output import RequestOutput
from headrace_core.request import Prompt
from headrace_core.sampling.params import BeamSearchParams
from headrace_server.protocols.openai.bodies.sampling import SamplingBody
from headrace_server.protocols.openai.bodies.structured import ResponseFormat
from headrace_server.requests.beam_output import as_request_output
from headrace_server.requests.constraints import SPELLINGS

_WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "stop": (None, []), "stop_token_ids": (None, []), "min_tokens": (0,), "logit_bias": (None, {}),
    "allowed_token_ids": (None,), "bad_words": (None, []), "frequency_penalty": (0.0, None),
    "presence_penalty": (0.0, None), "repetition_penalty": (1.0, None), "top_p": (1.0, None),
    "top_k": (0, -1, None), "min_p": (0.0, None), "logprobs": (None, False),
    "prompt_logprobs": (None,), "truncate_prompt_tokens": (None,),
    "response_format": (None, ResponseFormat.model_validate({"type": "text"})),
    "structured_outputs": (None,), "thinking_token_budget": (None,), "headrace_xargs": (None, {}),
    "vllm_xargs": (None, {}), "kv_transfer_params": (None,), **dict.fromkeys(SPELLINGS, (None, "")),
}  # fmt: skip
"""Fields that a search cannot honour -> the values that ask for nothing."""


class Beams(NamedTuple):
    """The search that a body asks for."""

    width: int
    max_tokens: int | None
    """None: until the context is full."""
    ignore_eos: bool
    temperature: float
    length_penalty: float
    include_stop: bool

    def params(self, max_tokens: int) -> BeamSearchParams:
        """As the search takes them."""
        return BeamSearchParams(
            beam_width=self.width,
            max_tokens=max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            length_penalty=self.length_penalty,
            include_stop_str_in_output=self.include_stop,
        )


def beams_of(body: SamplingBody, max_tokens: int | None) -> Beams | None:
    """The search that a body asks for, None if it samples.

    Raises:
        UnsupportedFeature: a field asks for what a search cannot do.
    """
    if not body.use_beam_search:
        return None
    for name, harmless in _WITHOUT_EFFECT.items():
        value = getattr(body, name, None)
        if not any(value == one and type(value) is type(one) for one in harmless):
            raise UnsupportedFeature(f"{name}: cannot be combined with use_beam_search", param=name)
    return Beams(
        body.n,
        max_tokens,
        body.ignore_eos,
        body.temperature or 0.0,
        body.length_penalty,
        body.include_stop_str_in_output,
    )


async def beam_outputs(
    engine: EngineClient,
    prompt: Prompt,
    beams: Beams,
    request_id: str,
    *,
    priority: int,
    add_special_tokens: bool | None = None,
) -> AsyncGenerator[RequestOutput, None]:
    """One output, the last, with a completion per beam, the likeliest first.

    Raises: as :meth:`~headrace_core.engine.EngineClient.beam_search`.
    """
    max_tokens = beams.max_tokens
    if max_tokens is None:
        max_tokens = await _room(engine, prompt, add_special_tokens)
    found = await engine.beam_search(
        prompt,
        beams.params(max_tokens),
        request_id,
        priority=priority,
        add_special_tokens=add_special_tokens,
    )
    yield as_request_output(found, request_id)


async def _room(engine: EngineClient, prompt: Prompt, add_special_tokens: bool | None) -> int:
    """Tokens that fit behind a prompt."""
    tokens = await engine.tokenize(prompt, add_special_tokens=add_special_tokens)
    limit = engine.model.max_model_len
    if len(tokens.token_ids) >= limit:
        raise PromptTooLong(limit, len(tokens.token_ids), 1)
    return limit - len(tokens.token_ids)
