"""A Q-Former over windows of a recording's states: learned queries look at each window.

Tang et al. 2023, arXiv:2310.13289. Letters: Q queries, S states of a window.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch.nn import functional

from headrace_core.model import WeightRule
from headrace_models.config.settings import Settings
from headrace_models.layers import qformer
from headrace_models.layers.base import Layer, Part
from headrace_models.layers.linear import Linear

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext


def qformer_rules(source: str, target: str) -> tuple[WeightRule, ...]:
    """Rules of a :class:`WindowQFormer`: its names in the checkpoint and in the model."""
    return (
        *qformer.qformer_rules(f"{source}.qformer", f"{source}.query", f"{target}.former"),
        WeightRule(f"{source}.linear", f"{target}.out"),
    )


class WindowQFormer(Layer):
    """States of a recording -> Q vectors for each window of S.

    Args:
        stated: ``projector_config``.
        name: as the checkpoint spells it.
        sizes: of the states, and of the vectors.
        window: states of a window, and queries.
    """

    def __init__(
        self,
        context: BuildContext,
        stated: Mapping[str, Any],
        name: str,
        sizes: tuple[int, int],
        window: tuple[int, int],
    ) -> None:
        Settings(stated).refuse("use_qformer_text_input", False)
        (states, vectors), (self.window, number) = sizes, window
        names = f"{name}.qformer", f"{name}.query"
        self.former = qformer.QFormer(context, "projector_config", stated, names, number, states)
        self.out = Linear(context, f"{name}.linear", self.former.size, [Part(vectors)], bias=True)

    def __call__(self, states: Tensor) -> Tensor:
        """states [L, size] -> [ceil(L / S) * Q, vectors]; zeros fill up the last window, and are seen."""
        padded = functional.pad(states, (0, 0, 0, -len(states) % self.window))
        windows = padded.view(-1, self.window, padded.shape[1])
        return self.out(self.former(windows).flatten(0, 1))
