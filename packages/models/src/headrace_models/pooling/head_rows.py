"""A classifier made of rows of a language model's head. Letters: L labels, H hidden size, V tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from headrace_core.errors import WeightsError
from headrace_models.layers.base import Slot
from headrace_models.pooling.classifier import HeadLinear

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext


class HeadRows(HeadLinear):
    """Head that keeps only the rows of some tokens, of weight [V, H] and bias [V].

    Its tensor is called ``table``, so that a head which is stored beside a classifier is none.

    Args:
        name: of the language model's head.
        vocab_size: V.
        ids: tokens, in the order of the labels; None: all.
        difference: of two tokens, one label: second row minus first, in float32.
        tied: gives the table of input vectors, once loaded, if that is the head's weight.
        bias: the head has one.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        in_features: int,
        vocab_size: int,
        ids: Sequence[int] | None,
        *,
        difference: bool = False,
        tied: Callable[[], Tensor] | None = None,
        bias: bool = False,
    ) -> None:
        rows = vocab_size if ids is None else len(ids)
        super().__init__(context, name, in_features, 1 if difference else rows, bias=bias)
        self.ids, self.difference, self.tied = ids, difference, tied
        self.table_shape = (vocab_size, in_features)

    def slots(self) -> Mapping[str, Slot]:
        slots = {} if self.tied is not None else {"table": Slot(self.table_shape)}
        if self.has_bias:
            # Stored by itself, in the layer, or in both places. What waits for another leaf must wait
            # to the end, which optional tensors do.
            bias = Slot(self.table_shape[:1], required=False)
            slots |= {"bias": bias, "own_bias": bias}
        return slots

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        table = tensors["table"] if self.tied is None else self.tied()
        own = {"weight": self._chosen(table)}
        if self.has_bias:
            bias = tensors.get("own_bias", tensors.get("bias"))
            if bias is None:
                raise WeightsError(f"tensor {self.name + '.bias'!r} is missing from the checkpoint")
            own["bias"] = self._chosen(bias)
        super().load(own)

    def _chosen(self, table: Tensor) -> Tensor:
        rows = (table if self.ids is None else table[list(self.ids)]).float()
        kept = rows[1:] - rows[:1] if self.difference else rows
        return kept.to(getattr(torch, self.dtype))
