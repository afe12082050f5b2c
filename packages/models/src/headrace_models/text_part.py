"""The language model of a checkpoint that has towers for media beside it: its family's class, which
passes over the tensors of everything else."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_models.catalogue.multimodal import Wrapper

logger = logging.getLogger(__name__)


def text_of(own: type[Any], wrapper: Wrapper) -> type[Any]:
    """A family's class for checkpoints of a wrapper. What the class makes of its own checkpoints'
    tensors it makes of these, under its own names."""

    def translate(
        self: Any, tensors: Iterable[tuple[str, Tensor, Path]]
    ) -> Iterable[tuple[str, Tensor, Path]]:
        named = _renamed(wrapper, tensors)
        inner = getattr(super(made, self), "translate", None)
        return named if inner is None else inner(named)

    made = type(own.__name__, (own,), {"translate": translate, "__module__": own.__module__})
    return made


def _renamed(
    wrapper: Wrapper, tensors: Iterable[tuple[str, Tensor, Path]]
) -> Iterator[tuple[str, Tensor, Path]]:
    passed_over = size = 0
    for name, tensor, file in tensors:
        own_name = wrapper.own_name(name)
        if own_name is None:
            passed_over, size = passed_over + 1, size + tensor.nbytes
        else:
            yield own_name, tensor, file
    if passed_over:
        logger.info(
            "%s: text is served; %d tensors for images and other media (%.2f GiB) are not read",
            wrapper.name, passed_over, size / (1 << 30),
        )  # fmt: skip
