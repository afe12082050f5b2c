"""The language model of a checkpoint that has towers for media beside it: its family's class, which
passes over the tensors of everything else."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_models.catalogue.multimodal import Wrapper
    from headrace_models.layers.vision.media_decoder import MediaModel

logger = logging.getLogger(__name__)


def text_of(
    own: type[Any], wrapper: Wrapper, tower: str | None = None, *, has_towers: bool = True
) -> type[Any]:
    """A family's class for checkpoints of a wrapper. What the class makes of its own checkpoints'
    tensors it makes of these, under its own names.

    Args:
        tower: see :attr:`Wrapper.towers`; None: media are not served.
        has_towers: False: media come as vectors, and the tensors of towers are passed over.
    """
    media = None if tower is None else _load(tower)
    names = None if media is None or not has_towers else media.media_names

    def renamed(
        self: Any, tensors: Iterable[tuple[str, Tensor, Path]], then: str = "renamed"
    ) -> Iterable[tuple[str, Tensor, Path]]:
        named = _renamed(wrapper, tensors, names)
        if wrapper.transposes_experts:
            named = _with_rows_first(named, self.settings.integer("hidden_size"))
        inner = getattr(super(made, self), then, None) or getattr(
            super(made, self), "translate", None
        )
        return named if inner is None else inner(named)

    def translate(
        self: Any, tensors: Iterable[tuple[str, Tensor, Path]]
    ) -> Iterable[tuple[str, Tensor, Path]]:
        return renamed(self, tensors, "translate")

    members: dict[str, Any] = {"translate": translate, "renamed": renamed}
    members["__module__"] = own.__module__
    name = own.__name__
    bases: tuple[type[Any], ...] = (own,)
    if media is not None:
        name, bases = wrapper.name, (media, own)
        rules = (*media.decoder_rules, *(media.media_rules if has_towers else ()))
        members |= {"weight_rules": (*own.weight_rules, *rules), "has_towers": has_towers}
    made = type(name, bases, members)
    return made


def _load(tower: str) -> type[MediaModel]:
    module, _, name = tower.partition(":")
    found = importlib.import_module(f"headrace_models.families.{module}")
    family: type[MediaModel] = getattr(found, name)
    return family


def _with_rows_first(
    tensors: Iterable[tuple[str, Tensor, Path]], hidden_size: int
) -> Iterator[tuple[str, Tensor, Path]]:
    """All experts' matrices as [experts, rows, columns], which published checkpoints have the other way
    round and transformers 5 writes so. A square one stays, as it does there."""
    for name, tensor, file in tensors:
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            rows, columns = tensor.shape[-2:]
            into = name.endswith(".gate_up_proj")
            if rows != columns and (rows if into else columns) == hidden_size:
                tensor = tensor.transpose(-1, -2).contiguous()
        yield name, tensor, file


def _renamed(
    wrapper: Wrapper,
    tensors: Iterable[tuple[str, Tensor, Path]],
    tower_names: Sequence[tuple[str, str]] | None,
) -> Iterator[tuple[str, Tensor, Path]]:
    """
    Args:
        tower_names: see :attr:`MediaModel.media_names`; None: towers are passed over.
    """
    passed_over = size = 0
    for name, tensor, file in tensors:
        own_name = wrapper.own_name(name)
        if own_name is None and tower_names is not None:
            own_name = wrapper.tower_name(name)
            for begin, instead in tower_names:
                if own_name is not None and own_name.startswith(begin):
                    own_name = instead + own_name.removeprefix(begin)
        if own_name is None:
            passed_over, size = passed_over + 1, size + tensor.nbytes
        else:
            yield own_name, tensor, file
    if passed_over:
        logger.info(
            "%s: text is served; %d tensors for images and other media (%.2f GiB) are not read",
            wrapper.name, passed_over, size / (1 << 30),
        )  # fmt: skip
