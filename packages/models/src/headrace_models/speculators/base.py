"""What all heads share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace_core.errors import UnsupportedFeature
from headrace_models.config.rope import rope_settings
from headrace_models.config.settings import Settings
from headrace_models.layers.attention.selection import self_attention
from headrace_models.layers.attention.self_attention import CachedLayer, SelfAttention
from headrace_models.layers.base import Layer, walk
from headrace_models.layers.decoder import Decoder
from headrace_models.layers.mlp import GatedMLP
from headrace_models.layers.norm import RMSNorm
from headrace_models.layers.rotary import rotary_table

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import AttentionLayer, BuildContext, WeightRule


class Head(Layer, ABC):
    """A :class:`headrace_engine.speculation.draft_head.DraftHead`.

    Args:
        context: its ``config`` is the head's, its ``quant`` says how the head's layers are stored.
        target: the model that it guesses for; what is not of the head's own checkpoint is the model's.
        stored: names of the checkpoint's tensors, as :meth:`translate` makes them.
    """

    streams: Sequence[int] = ()
    most: int | None = None
    target_methods: Sequence[str] = ("token_vectors", "compute_logits")
    token_ids: Tensor | None = None

    def __init__(self, context: BuildContext, target: Decoder, stored: Collection[str]) -> None:
        self.context, self.ops = context, context.ops
        self.settings = Settings(context.config)
        self.width = target.hidden_size()
        """The model's, if the head says no other."""
        self._target = (target,)  # in a tuple: it is no piece of this one

    @property
    def target(self) -> Decoder:
        return self._target[0]

    def retarget(self, target: object) -> None:
        """Guess for another model of the same shapes from now on.

        Raises:
            UnsupportedFeature: it has others.
        """
        new = decoder_of(target)
        sizes = [(m.hidden_size(), m.num_layers(), type(m)) for m in (self.target, new)]
        if sizes[0] != sizes[1]:
            raise UnsupportedFeature(
                f"speculative_config: the head guesses for {sizes[0][2].__name__} of {sizes[0][1]} layers "
                f"{sizes[0][0]} wide, not for {sizes[1][2].__name__} of {sizes[1][1]} layers {sizes[1][0]} "
                "wide",
                param="speculative_config",
            )
        self._target = (new,)

    @abstractmethod
    def rules(self) -> Sequence[WeightRule]:
        """See :attr:`headrace_core.model.CausalLM.weight_rules`."""

    def passed_over(self) -> Mapping[str, str]:
        """See :attr:`headrace_core.model.IgnoresWeights.ignored_weights`."""
        return {}

    @classmethod
    def rename(cls, name: str, config: Mapping[str, Any]) -> str:
        """The rules' name of a checkpoint's tensor."""
        return name

    def translate(
        self, tensors: Iterable[tuple[str, Tensor, Path]]
    ) -> Iterable[tuple[str, Tensor, Path]]:
        """See :class:`headrace_core.model.TranslatesWeights`."""
        return ((self.rename(name, self.settings.config), t, file) for name, t, file in tensors)

    def attention_layers(self) -> Mapping[str, AttentionLayer]:
        found = (layer for _, layer in walk(self) if isinstance(layer, CachedLayer))
        return {layer.spec.name: layer for layer in found}

    def project(self, hidden: Tensor, streams: Sequence[Tensor]) -> Tensor:
        return hidden.clone()

    def token_vectors(self, ids: Tensor) -> Tensor:
        return self.target.token_vectors(ids)

    @abstractmethod
    def forward(
        self, batch: ForwardBatch, states: Tensor, depth: int, vectors: Tensor | None = None
    ) -> Tensor: ...

    def picked(self, batch: ForwardBatch, x: Tensor) -> Tensor:
        """The rows of ``batch.logits_rows`` of x [T, W]."""
        return x if batch.logits_rows is None else self.ops.embedding(batch.logits_rows, x)

    def compute_logits(self, states: Tensor, depth: int) -> Tensor:
        return self.target.compute_logits(states)

    def check(self) -> None:
        """Refuse what the loaded weights say. Raises: WeightsError."""


def decoder_of(model: object) -> Decoder:
    """The model as heads need it. Raises: UnsupportedFeature: it is none of headrace's own."""
    if isinstance(model, Decoder):
        return model
    raise UnsupportedFeature(
        f"speculative_config.method: {type(model).__name__}: heads guess for models that headrace runs by "
        "its own classes only (--model-impl auto)",
        param="speculative_config",
    )


class LlamaPieces:
    """Pieces of the Llama layers that heads are made of.

    Args:
        context: of the head.
    """

    def __init__(self, context: BuildContext) -> None:
        self.context, self.settings = context, Settings(context.config)
        self.size = self.settings.integer("hidden_size")
        self.eps = self.settings.number("rms_norm_eps", 1e-6)
        self.rotary = rotary_table(
            context,
            rope_settings(self.settings.config, theta=10_000.0),
            self.settings.head_dim(),
            max_positions=self.settings.integer("max_position_embeddings", 2048),
            length=context.max_model_len,
        )
        types = self.settings.config.get("layer_types") or []
        if "sliding_attention" in types:
            raise UnsupportedFeature(
                f"speculative_config.model: config.json: layer_types = {types}: must be full_attention",
                param="speculative_config",
            )

    def norm(self, name: str) -> RMSNorm:
        return RMSNorm(self.context, name, self.size, self.eps)

    def attention(self, name: str, **differences: Any) -> SelfAttention:
        bias = self.settings.flag("attention_bias", False)
        arguments = {
            "hidden_size": self.size,
            "num_heads": self.settings.integer("num_attention_heads"),
            "num_kv_heads": self.settings.num_kv_heads(),
            "head_dim": self.settings.head_dim(),
            "rotary": self.rotary,
            "qkv_bias": bias,
            "out_bias": bias,
            **differences,
        }
        return self_attention(self.context, name, **arguments)

    def mlp(self, name: str) -> GatedMLP:
        return GatedMLP(
            self.context,
            name,
            self.size,
            self.settings.integer("intermediate_size"),
            self.settings.activation("hidden_act", default="silu"),
            bias=self.settings.flag("mlp_bias", False),
        )
