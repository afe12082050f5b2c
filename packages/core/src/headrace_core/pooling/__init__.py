"""Pooling: what a caller may ask of it, what a user may set, and what a checkpoint comes to.

A pooling model turns the hidden states of a prompt into vectors or scores. What it can do is a list
of *tasks*; each request has one.

================  ==========================================================================
``embed``         one vector for the prompt
``classify``      one row of probabilities (or logits) for the prompt
``score``         the same with one label: how well the two texts of a pair fit
``token_embed``   one vector for each token
``token_classify``  one row for each token
``plugin``        whatever an IO processor makes of the results
================  ==========================================================================
"""

from headrace_core.pooling.config import PoolerConfig, as_pooler_fields
from headrace_core.pooling.info import (
    CLASSIFY_TASKS,
    EMBED_TASKS,
    POOLING_TASKS,
    POOLING_TYPES,
    TOKEN_TASKS,
    DenseModule,
    LateInteraction,
    PairChat,
    PoolingInfo,
    PoolingTraits,
)
from headrace_core.pooling.params import VALID_PARAMS, PoolingParams

__all__ = [
    "CLASSIFY_TASKS",
    "EMBED_TASKS",
    "POOLING_TASKS",
    "POOLING_TYPES",
    "TOKEN_TASKS",
    "VALID_PARAMS",
    "DenseModule",
    "LateInteraction",
    "PairChat",
    "PoolerConfig",
    "PoolingInfo",
    "PoolingParams",
    "PoolingTraits",
    "as_pooler_fields",
]
