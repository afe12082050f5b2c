"""Routing of rows to experts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headrace_core.errors import ConfigError
from headrace_core.ops import SCORINGS
from headrace_kernels.cpu.library import Library
from headrace_kernels.cpu.ops.arguments import dtype_code, matrix, vector

_CODES: Mapping[str, int] = {name: code for code, name in enumerate(SCORINGS)}


class RouteExperts:
    """See :class:`headrace_core.ops.RouteExpertsOp`."""

    def __init__(self, library: Library) -> None:
        self._kernel = library.route_experts

    def __call__(
        self,
        x: Tensor,
        k: int,
        *,
        scoring: str = "softmax",
        bias: Tensor | None = None,
        num_groups: int = 1,
        top_groups: int = 1,
        group_score: str = "max",
        renormalise: bool = False,
        scale: float = 1.0,
        jitter: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        x, rows, stride = matrix(x)
        experts = x.shape[1]
        if scoring not in _CODES:
            raise ConfigError(
                f"route_experts: scoring = {scoring!r}: must be one of {list(SCORINGS)}"
            )
        if bias is not None:
            bias = vector(bias, torch.float32, experts, "route_experts: bias")
        weights = torch.empty(rows, k, dtype=torch.float32)
        ids = torch.empty(rows, k, dtype=torch.int64)
        status = self._kernel(
            weights.data_ptr(), ids.data_ptr(), x.data_ptr(),
            None if bias is None else bias.data_ptr(), rows, experts, k, num_groups, top_groups,
            stride, scale, jitter, _CODES[scoring], group_score == "top2", renormalise,
            dtype_code(x.dtype),
        )  # fmt: skip
        if status:
            raise ConfigError(
                f"route_experts: k = {k} of the best {top_groups} of {num_groups} groups of "
                f"{experts} experts: groups must be equal, and k at most as many as are in them"
            )
        return weights, ids
