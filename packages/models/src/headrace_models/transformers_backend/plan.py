"""Plan of transformers for cutting linear layers over the ranks, by module name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from headrace_core.errors import UnsupportedModel

COLUMNS, ROWS, HALVES, WHOLE = "columns", "rows", "halves", "whole"

_STYLES: Mapping[str, str] = {
    "colwise": COLUMNS,
    "rowwise": ROWS,
    "packed_colwise": HALVES,
    "colwise_gather_output": WHOLE,
    "rowwise_split_input": WHOLE,
    "replicated_with_grad_allreduce": WHOLE,
    "replicate": WHOLE,
    "mla_kv_a_proj": WHOLE,
    "moe_tp_experts": WHOLE,
}
"""transformers' style -> what a rank keeps: some outputs, some inputs, some outputs of each of two
halves, or everything. Experts are cut by their own layer."""


class TensorParallelPlan:
    """The plan of one tree.

    Args:
        base: the base model.
        prefix: of its names in the tree, with its dot.
        world_size: with one rank no plan is needed.
    """

    def __init__(self, base: Any, prefix: str, world_size: int) -> None:
        self.patterns: list[tuple[re.Pattern[str], str]] = []
        if world_size == 1:
            return
        plan = getattr(base, "_tp_plan", None) or getattr(base.config, "base_model_tp_plan", None)
        if not plan:
            raise UnsupportedModel(
                f"tensor_parallel_size = {world_size}: {type(base.config).__name__} has no "
                "base_model_tp_plan, which says of each linear layer whether it is colwise or rowwise"
            )
        for pattern, style in plan.items():
            either = re.escape(pattern).replace(r"\*", "[^.]+")
            self.patterns.append((re.compile(re.escape(prefix) + either), str(style)))

    def style(self, name: str) -> str:
        """Way in which the module of that full name is cut.

        Raises:
            UnsupportedModel: the plan says something that is not known.
        """
        for pattern, style in self.patterns:
            if pattern.fullmatch(name):
                if style not in _STYLES:
                    raise UnsupportedModel(
                        f"base_model_tp_plan: {name} = {style!r}: must be one of {', '.join(_STYLES)}"
                    )
                return _STYLES[style]
        return WHOLE
