"""Decoders with mixtures of experts: Llama, in which some or all MLPs are mixtures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import MAX_EXPERTS, Settings
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.mlp import GatedMLP, MLPLayer
from headrace_models.layers.moe.router import Routing
from headrace_models.layers.moe.sparse_moe import SparseMoE
from headrace_models.loading.rules.llama import RULES
from headrace_models.loading.rules.moe import expert_rules, router_rules, shared_rules

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

MOE_RULES = (*RULES, *router_rules(), *expert_rules(), *shared_rules())
"""Llama's, and those of experts in the layout that DeepSeek and Qwen began."""


class MoEDecoder(LlamaDecoder):
    """Families say which layers are dense, how they route, and what sizes they have."""

    weight_rules: ClassVar[Sequence[WeightRule]] = MOE_RULES
    mixture: ClassVar[Mapping[str, Any]] = {}
    """Arguments of :class:`SparseMoE` that all layers have."""
    shared_name: ClassVar[str] = "shared_experts"

    def is_dense(self, index: int) -> bool:
        """True if the layer has an ordinary MLP."""
        return index < self.settings.integer("first_k_dense_replace", 0, minimum=0)

    def routing(self, index: int) -> Routing:
        """DeepSeek V3's: sigmoids, a correction, groups that count by their best two."""
        return deepseek_routing(self.settings)

    def expert_size(self, index: int) -> int:
        return self.settings.integer("moe_intermediate_size")

    def gate(self) -> str:
        """The op's name of the experts' activation."""
        return self.settings.activation("hidden_act")

    def shared_size(self, index: int) -> int:
        """Inner size of what all tokens go to; 0: nothing."""
        return self.expert_size(index) * self.settings.integer("n_shared_experts", 0, minimum=0)

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        if self.is_dense(index):
            return super().make_mlp(context, index, name)
        return self.make_mixture(context, index, name)

    def make_mixture(
        self, context: BuildContext, index: int, name: str, **differences: Any
    ) -> SparseMoE:
        """The mixture of a layer; ``differences`` are further arguments of :class:`SparseMoE`."""
        arguments = {
            "hidden_size": self.hidden_size(),
            "intermediate_size": self.expert_size(index),
            "routing": self.routing(index),
            "activation": self.gate(),
            "shared": self.make_shared(context, index, f"{name}.{self.shared_name}"),
            **self.mixture,
            **differences,
        }
        return self.mixture_class()(context, name, **arguments)

    def mixture_class(self) -> type[SparseMoE]:
        return SparseMoE

    def make_shared(self, context: BuildContext, index: int, name: str) -> MLPLayer | None:
        size = self.shared_size(index)
        if not size:
            return None
        return GatedMLP(context, name, self.hidden_size(), size, self.gate())


def deepseek_routing(
    settings: Settings,
    *,
    experts: str = "n_routed_experts",
    scale: float = 1.0,
    renormalise: bool = True,
) -> Routing:
    """By the keys of DeepSeek V3's config, which many share.

    Args:
        experts: the config's name of their number.
        scale, renormalise: of a config that does not say.
    """
    return Routing(
        num_experts=settings.integer(experts, maximum=MAX_EXPERTS),
        top_k=settings.integer("num_experts_per_tok"),
        scoring="sigmoid",
        renormalise=settings.flag("norm_topk_prob", renormalise),
        scale=settings.number("routed_scaling_factor", scale),
        num_groups=settings.integer("n_group", 1),
        top_groups=settings.integer("topk_group", 1),
        group_score="top2",
    )


def softmax_routing(
    settings: Settings, *, experts: str = "num_experts", top_k: int = 2, renormalise: bool = False
) -> Routing:
    """The likeliest experts of a softmax.

    Args:
        experts: the config's name of their number.
        top_k, renormalise: of a config that does not say.
    """
    return Routing(
        num_experts=settings.integer(experts, maximum=MAX_EXPERTS),
        top_k=settings.integer("num_experts_per_tok", top_k),
        renormalise=settings.flag("norm_topk_prob", renormalise),
    )


def is_dense_by_list(settings: Settings, index: int, first_dense: int) -> bool:
    """By ``mlp_layer_types``; without it, the first layers are dense."""
    kinds = settings.config.get("mlp_layer_types")
    if kinds is None:
        return index < first_dense
    count = settings.integer("num_hidden_layers")
    known = ("dense", "sparse")
    if not isinstance(kinds, list) or len(kinds) != count or any(k not in known for k in kinds):
        raise UnsupportedModel(
            f"config.json: mlp_layer_types = {kinds!r:.200}: must be {count} entries out of "
            f"{', '.join(known)}"
        )
    return bool(kinds[index] == "dense")


CORRECTED: Mapping[str, Any] = {"corrected": True, "exact_router": True}
"""Arguments of mixtures that are routed as DeepSeek V3's."""


def is_dense_by_step(settings: Settings, index: int) -> bool:
    """True if the layer has an ordinary MLP, as Qwen's configs state it."""
    step = settings.integer("decoder_sparse_step", 1)
    return index in settings.integers("mlp_only_layers") or (index + 1) % step != 0


def num_experts(settings: Settings) -> int:
    """transformers 4 writes ``num_experts``, 5 ``num_local_experts``."""
    has_old = settings.config.get("num_experts") is not None
    return settings.integer("num_experts" if has_old else "num_local_experts", maximum=MAX_EXPERTS)
