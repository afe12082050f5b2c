"""One request with ``n`` completions -> the parameters of each."""

from __future__ import annotations

import copy
import hashlib

from headrace_core.sampling import SamplingParams


def completion_params(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of one of ``n`` completions."""
    if params.n == 1 and params.structured_outputs is None:
        return params
    own = copy.copy(params)
    own.n = 1
    own.structured_outputs = None  # the core is told of it in its own form
    if params.seed is not None and index:
        own.seed = _derived_seed(params.seed, index)
    if index:
        own.prompt_logprobs = None  # the prompt is the same: the first completion's are enough
    return own


def _derived_seed(seed: int, index: int) -> int:
    """A seed for completion ``index`` that does not meet those of neighbouring seeds."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
