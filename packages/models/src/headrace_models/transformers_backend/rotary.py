"""Rotary frequencies as a table, which the tree's own module fills once.

The module would compute cosines and sines of its positions in every step. Rows of a table are one op,
which a step may be recorded with, and a position's numbers are the same whatever else is in the batch.

Letters: T tokens, N positions of the longest context, D rotated size of a head.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from headrace_models.transformers_backend.weight_modules import compute_by

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext


def tabulate_rotary(context: BuildContext, tree: nn.Module) -> None:
    """Have modules look up what follows from positions alone."""
    for module in tree.modules():
        if any(True for _ in module.parameters()):
            continue
        if list(inspect.signature(module.forward).parameters)[1:2] == ["position_ids"]:
            compute_by(module, _Lookup(context, module.forward))


class _Lookup:
    """Stands in for a module that is called with (x, position_ids, ...), where x tells the dtype and the
    others are plain values.

    What it gives must be tensors [1, T, D] whose rows follow from the positions [1, T]. Whether they do
    is seen at the first call with other arguments, and a module that does otherwise computes as before.
    """

    def __init__(self, context: BuildContext, compute: Callable[..., Any]) -> None:
        self.context, self.compute = context, compute
        self.tables: dict[Any, list[Tensor] | None] = {}

    def __call__(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        plain = all(isinstance(v, str | int | float | None) for v in (*args, *kwargs.values()))
        if not plain or position_ids.dim() != 2 or position_ids.shape[0] != 1:
            return self.compute(x, position_ids, *args, **kwargs)
        key = (x.dtype, args, tuple(kwargs.items()))
        if key not in self.tables:
            self.tables[key] = self._fill(x, *args, **kwargs)
        tables = self.tables[key]
        if tables is None:
            return self.compute(x, position_ids, *args, **kwargs)
        ids = position_ids.view(-1)
        return tuple(self.context.ops.embedding(ids, table).unsqueeze(0) for table in tables)

    def _fill(self, x: Tensor, *args: Any, **kwargs: Any) -> list[Tensor] | None:
        """The tables [N, D]; None if there are none."""
        size = self.context.max_model_len
        every = torch.arange(size, device=x.device)
        some = every.flip(0)[:: max(1, size // 7)]
        try:
            whole = self.compute(x, every.unsqueeze(0), *args, **kwargs)
            part = self.compute(x.new_ones(1, 2, 3), some.unsqueeze(0), *args, **kwargs)
        except Exception:  # it computes with x, which is not of so many tokens
            return None
        if not isinstance(whole, tuple) or not all(isinstance(t, torch.Tensor) for t in whole):
            return None
        if any(t.shape[:-1] != (1, size) or not t.is_floating_point() for t in whole):
            return None
        close = 1e-5 if x.dtype is torch.float32 else 1e-2  # one rounding
        if not all(torch.allclose(a[0, some], b[0], atol=close) for a, b in zip(whole, part)):
            return None
        return [t[0].contiguous() for t in whole]
