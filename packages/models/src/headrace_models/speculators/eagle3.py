"""EAGLE-3: a layer that reads the model's lower, middle and upper states and has a vocabulary of its own.

Li et al. 2025, arXiv:2503.01840. ``fc`` brings the streams before three layers of the model to one state. The
layer's attention reads the normed embedding of token p + 1 beside the normed state of position p; its
residual is the state, or the normed state (``norm_before_residual``). Its sum stands for the next state; its
norm goes to the head, whose token i is the model's token ``i + d2t[i]``.

Layouts: ``midlayer`` (SafeAILab's ``LlamaForCausalLMEagle3``), ``layers.0`` (``speculators_model_type:
eagle3``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from headrace_core.errors import WeightsError
from headrace_core.model import WeightRule
from headrace_models.layers.attention.self_attention import Attention
from headrace_models.layers.base import Part, Slot, WeightLayer
from headrace_models.layers.embedding import Embedding
from headrace_models.layers.linear import Linear, row_parallel
from headrace_models.speculators.base import Head, LlamaPieces
from headrace_models.speculators.eagle import LAYER_RULES

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext
    from headrace_models.layers.decoder import Decoder

STREAMS = "eagle_aux_hidden_state_layer_ids"

RULES = (
    WeightRule("fc", "fc"),
    *(
        WeightRule(
            rule.source.replace("layers.{}", "layers.0"),
            rule.target.removeprefix("layers.{}."),
            part=rule.part,
        )
        for rule in LAYER_RULES
    ),
    WeightRule("layers.0.hidden_norm", "hidden_norm"),
    WeightRule("norm", "norm"),
    WeightRule("lm_head", "head"),
    WeightRule("embed_tokens", "embed"),
    WeightRule("d2t", "token_map"),
)


class PairAttention(Attention):
    """Attention whose input is two vectors side by side.

    Args:
        out_size: of its output.
    """

    def __init__(
        self, context: BuildContext, name: str, *, out_size: int, **arguments: Any
    ) -> None:
        super().__init__(context, name, **arguments)
        heads = arguments["num_heads"] * arguments["head_dim"]
        bias = arguments["out_bias"]
        self.out = row_parallel(context, f"{name}.o_proj", heads, out_size, bias=bias)


class TokenMap(WeightLayer):
    """``d2t``: what is added to an id of the head's vocabulary for the model's, [Vd] int64."""

    def __init__(self, context: BuildContext, size: int) -> None:
        self.name, self.size, self.device = "d2t", size, context.device

    def slots(self) -> Mapping[str, Slot]:
        return {"weight": Slot((self.size,), "int64")}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        ids = torch.arange(self.size, device=self.device)
        self.ids = ids + tensors["weight"].to(self.device)
        """[Vd] int64; the model's ids."""


class Eagle3Head(Head):
    """See the module's docstring."""

    def __init__(self, context: BuildContext, target: Decoder, stored: Collection[str]) -> None:
        super().__init__(context, target, stored)
        settings = self.settings
        for option in ("norm_before_fc", "fc_norm", "norm_output"):
            settings.refuse(option, False)
        settings.refuse("num_hidden_layers", 1)
        layers = target.num_layers()
        self.streams = tuple(settings.integers(STREAMS)) or (2, layers // 2, layers - 3)
        pieces = LlamaPieces(context)
        self.width = size = pieces.size
        name = "layers.0"
        width = len(self.streams) * target.hidden_size()
        self.fc = Linear(context, "fc", width, [Part(size)], bias="fc.bias" in stored)
        self.input_norm = pieces.norm(f"{name}.input_layernorm")
        self.hidden_norm = pieces.norm(f"{name}.hidden_norm")
        self.attention = pieces.attention(
            f"{name}.self_attn", hidden_size=2 * size, out_size=size, kind=PairAttention
        )
        self.mlp_norm = pieces.norm(f"{name}.post_attention_layernorm")
        self.mlp = pieces.mlp(f"{name}.mlp")
        self.norm = pieces.norm("norm")
        self.normed_residual = settings.flag("norm_before_residual", False)
        self.vocab_size = settings.integer("vocab_size")
        draft_size = settings.integer("draft_vocab_size", self.vocab_size)
        self.head = Linear(context, "lm_head", size, [Part(draft_size)])
        self.embed: Embedding | None = None
        self.target_methods = ("token_vectors",)
        if "embed_tokens.weight" in stored or size != target.hidden_size():
            self.embed = Embedding(context, "embed_tokens", self.vocab_size, size)
            self.target_methods = ()
        self.token_map: TokenMap | None = None
        if "d2t" in stored or draft_size != self.vocab_size:
            self.token_map = TokenMap(context, draft_size)

    def rules(self) -> Sequence[WeightRule]:
        return RULES

    def passed_over(self) -> Mapping[str, str]:
        return {"t2d": "says the same as d2t"}

    @classmethod
    def rename(cls, name: str, config: Mapping[str, Any]) -> str:
        name = name.removeprefix("model.")
        if name == "d2t":
            return "d2t.weight"
        return name.replace("midlayer.", "layers.0.")

    def check(self) -> None:
        """Refuse a map that leads out of the vocabulary."""
        if self.token_map is None:
            return
        self.token_ids = ids = self.token_map.ids
        if int(ids.min()) < 0 or int(ids.max()) >= self.vocab_size:
            raise WeightsError(
                f"d2t: leads to token {int(ids.max())} (least {int(ids.min())}): must be within the model's "
                f"vocabulary of {self.vocab_size} tokens"
            )

    def project(self, hidden: Tensor, streams: Sequence[Tensor]) -> Tensor:
        return self.fc(torch.cat(list(streams), dim=-1))

    def token_vectors(self, ids: Tensor) -> Tensor:
        return super().token_vectors(ids) if self.embed is None else self.embed(ids)

    def forward(
        self, batch: ForwardBatch, states: Tensor, depth: int, vectors: Tensor | None = None
    ) -> Tensor:
        if vectors is None:
            vectors = self.token_vectors(batch.input_ids)
        normed = self.hidden_norm(states)
        x = self.attention(torch.cat([self.input_norm(vectors), normed], dim=-1), batch)
        residual = self.picked(batch, normed if self.normed_residual else states)
        x, stream = self.mlp_norm.add(self.picked(batch, x), residual.clone())
        return self.mlp(x) + stream

    def compute_logits(self, states: Tensor, depth: int) -> Tensor:
        return self.head(self.norm(states))
