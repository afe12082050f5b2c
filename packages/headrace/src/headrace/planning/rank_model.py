"""The model of one rank, built without weights, and the stages that it can be cut into."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, cast

from headrace.assembly.footprint import rank_context, rank_model, specs_of
from headrace.assembly.resolved import ResolvedConfig
from headrace.planning.layouts import Layout
from headrace.planning.parallelism import stage_ranges, with_layout
from headrace_core.errors import UnsupportedModel
from headrace_core.kv import CacheSpec

if TYPE_CHECKING:
    from headrace_core.model import BuildContext
    from headrace_models.layer_parts import LayerParts, ModelParts, RoutedExperts
    from headrace_models.layers.base import Layer
    from headrace_models.linear_storage import LinearRead


class RankModel(NamedTuple):
    """A model as one of some ranks builds it."""

    parts: ModelParts
    specs: Mapping[str, CacheSpec]
    linear: tuple[LinearRead, ...]
    """Its linear layers."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """What one rank of a pipeline's stage keeps, reads and exchanges. Sizes in bytes."""

    layers: int
    weights: int
    reads: int
    """That a decode step reads whatever its tokens are."""
    experts: tuple[RoutedExperts, ...]
    """Of each layer; of which a step reads those that its tokens go to."""
    reduced: int
    """That is summed over the ranks for each token."""
    reductions: int
    """Sums over the ranks in a step."""
    gathered: int
    """Of a token's logits that ranks bring together."""
    met: int
    """Of each token, that goes to all ranks of engines which share experts; as much comes back."""
    meetings: int
    """Mixtures in which it does, in a step."""
    specs: Mapping[str, CacheSpec]
    samples: bool
    """True if logits are made on it."""

    def step_reads(self, tokens: int, engines: int = 1) -> int:
        """Bytes of weights that a step of so many tokens is expected to read, if tokens choose their experts
        evenly and independently.

        Args:
            engines: that share the experts, with as many tokens each.
        """
        tokens = tokens * engines
        chosen = (
            experts.num_bytes * (1 - (1 - min(1.0, experts.top_k / experts.number)) ** tokens)
            for experts in self.experts
        )
        return self.reads + round(sum(chosen))


class RankModels:
    """Builds the models of a checkpoint's ranks, each once.

    Args:
        resolved: the engine's configuration, whose layout does not matter.

    Raises:
        UnsupportedModel: what the model caches is not known before it runs.
    """

    def __init__(self, resolved: ResolvedConfig) -> None:
        info = resolved.info
        if info.source != "native":
            raise UnsupportedModel(
                f"model {info.name!r}: runs by transformers' code, of which a plan knows neither caches nor "
                "layers; `headrace inspect` estimates its memory"
            )
        if info.runner != "generate":
            raise UnsupportedModel(
                f"model {info.name!r}: generates nothing (runner {info.runner}), and plans are of decoding; "
                "`headrace inspect` estimates its memory"
            )
        self._resolved = resolved
        self._built: dict[Layout, RankModel] = {}

    @cached_property
    def context(self) -> BuildContext:
        from headrace.assembly.worker.context import backend_chooser, build_context
        from headrace.assembly.worker.ops import choose_ops, cpu_threads
        from headrace_engine.startup import StartupTimeline

        resolved = self._resolved
        ops = choose_ops(resolved, StartupTimeline(), cpu_threads(resolved))
        return build_context(resolved, ops, backend_chooser(resolved, ops))

    @property
    def has_experts(self) -> bool:
        """True if tokens go to some of several experts."""
        return any(layer.experts for layer in self.of(1).parts.layers)

    @property
    def item_bytes(self) -> int:
        """Bytes of a number of the activations."""
        import torch

        size: int = getattr(torch, self._resolved.info.dtype).itemsize
        return size

    def of(self, ranks: int, *, experts: bool = False, engines: int = 1) -> RankModel:
        """The model of rank 0.

        Args:
            experts: ranks have whole experts.
            engines: that share these.

        Raises:
            UnsupportedModel, ConfigError: it cannot be divided so; names the layer.
        """
        key = Layout(ranks, data=engines, experts=experts)
        if key not in self._built:
            from headrace_models.layer_parts import layer_parts
            from headrace_models.linear_storage import linear_reads

            config = with_layout(self._resolved.config, key)
            resolved = self._resolved._replace(config=config)
            model = rank_model(resolved, rank_context(resolved, self.context))
            dtype = resolved.info.dtype
            linear = tuple(linear_reads(cast("Layer", model), dtype))
            self._built[key] = RankModel(layer_parts(model, dtype), specs_of(model), linear)
        return self._built[key]

    def stages(self, layout: Layout) -> list[Stage]:
        """Each stage's rank 0.

        Raises:
            UnsupportedModel: see :meth:`of`; or layers are not one list, which stages could share.
            ConfigError: more stages than layers.
        """
        parts, specs, _ = self.of(
            layout.tensor, experts=layout.experts, engines=layout.sharing_engines
        )
        layers = parts.layers
        ranges = stage_ranges(parts, layout.pipeline)
        return [
            self._stage(parts, [layers[i] for i in inside], specs, is_first=inside is ranges[0])
            for inside in ranges
        ]

    def _stage(
        self,
        parts: ModelParts,
        layers: Sequence[LayerParts],
        specs: Mapping[str, CacheSpec],
        *,
        is_first: bool,
    ) -> Stage:
        inside = [*layers, *([parts.front, parts.head] if is_first else [])]
        names = {name for part in inside for name in part.caches}
        return Stage(
            layers=len(layers),
            weights=parts.tables + sum(part.weights for part in inside),
            reads=sum(part.reads for part in inside),
            experts=tuple(experts for part in layers for experts in part.experts),
            reduced=self.item_bytes * sum(part.reduced for part in inside),
            reductions=sum(part.reductions for part in inside),
            gathered=self.item_bytes * sum(part.gathered for part in inside),
            met=self.item_bytes * sum(part.met for part in inside),
            meetings=sum(part.meetings for part in inside),
            specs={name: spec for name, spec in specs.items() if name in names},
            samples=is_first,
        )
