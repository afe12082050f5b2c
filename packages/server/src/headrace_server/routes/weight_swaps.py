"""Weights that change while the server runs: swap them for another checkpoint's, and say which serve.

Part of the control routes (:mod:`headrace_server.routes.control`).
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from headrace_core.engine import EngineClient
from headrace_core.errors import RequestError
from headrace_core.request import TextPrompt, TokensPrompt

SWAP_TIMEOUT = 7200.0
"""Longest wait for other weights to serve, in seconds; the swap itself goes on."""
MAX_PROBES = 256
MAX_PROMPT = 1 << 20


class ProbeBody(BaseModel):
    """A prompt that new weights must continue as said."""

    model_config = ConfigDict(extra="forbid")

    prompt: (
        Annotated[str, Field(min_length=1, max_length=MAX_PROMPT)]
        | Annotated[list[int], Field(min_length=1, max_length=MAX_PROMPT)]
    ) = Field(description="Text, or token ids.")
    expected_token_ids: Annotated[list[int], Field(max_length=MAX_PROMPT)] = Field(
        [], description="Its greedy continuation; empty: the prompt counts for max_perplexity only."
    )


class SwapBody(BaseModel):
    """Body of ``POST /swap_weights``."""

    model_config = ConfigDict(extra="forbid")

    path: Annotated[str, Field(min_length=1, max_length=4096)] = Field(
        description="Folder or file of a checkpoint on the machine of the engine. It is read beside the "
        "running weights, which takes as much memory again until they have changed places."
    )
    weights_version: Annotated[str, Field(min_length=1, max_length=128)] | None = Field(
        None, description="Name of the new weights; null: the next number."
    )
    drain_timeout: Annotated[float, Field(ge=0, le=86_400)] | None = Field(
        None,
        description="Seconds that requests under way have to end, else the swap is given up; null: 60.",
    )
    probe: Annotated[list[ProbeBody], Field(min_length=1, max_length=MAX_PROBES)] | None = None
    max_perplexity: Annotated[float, Field(ge=1)] | None = Field(
        None, description="Most that the new weights may have on the prompts of probe."
    )


class SwapSeconds(BaseModel):
    """Times of a swap."""

    build: float
    """Reading, packing, checking; the old weights served."""
    drain: float
    """Requests ended; new ones waited."""
    switch: float
    """Nothing ran."""


class Swapped(BaseModel):
    """Answer of ``POST /swap_weights``."""

    weights_version: str
    previous_version: str
    bytes: int
    """Memory of the new weights, as reckoned."""
    perplexity: float | None
    seconds: SwapSeconds


class Version(BaseModel):
    """Answer of ``GET /weights_version``."""

    weights_version: str


def add_routes(router: APIRouter, engine: EngineClient) -> None:
    """Add the routes to those of control."""

    @router.post("/swap_weights")
    async def swap_weights(body: SwapBody) -> Swapped:
        """Read another checkpoint of the same model beside the running weights, check it, and serve with
        it. Requests under way end on the old weights, later ones wait. If anything fails, the old weights
        serve on."""
        options = body.model_dump(exclude={"probe"})
        if body.probe is not None:
            options["probe"] = [
                await _as_tokens(engine, probe, f"probe[{index}].prompt")
                for index, probe in enumerate(body.probe)
            ]
        found = await engine.collective_rpc("swap_weights", args=[options], timeout=SWAP_TIMEOUT)
        return Swapped.model_validate(found[0])

    @router.get("/weights_version")
    async def weights_version() -> Version:
        """Show which weights compute now."""
        return Version(weights_version=(await engine.collective_rpc("weights_version"))[0])


async def _as_tokens(engine: EngineClient, probe: ProbeBody, where: str) -> dict[str, Any]:
    prompt = probe.prompt
    given = (
        TextPrompt(prompt=prompt)
        if isinstance(prompt, str)
        else TokensPrompt(prompt_token_ids=prompt)
    )
    try:
        tokens = (await engine.tokenize(given)).token_ids
    except RequestError as error:
        error.param = where
        raise
    return {"prompt_token_ids": tokens, "expected_token_ids": probe.expected_token_ids}
